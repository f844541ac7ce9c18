"""The rules of every policy: for which queues devices are kept, and which plans are called off."""

from __future__ import annotations

from math import inf

import pytest

from greenroom.core.events import Limits
from greenroom.core.model import ModelId, RequestId
from greenroom.core.policy.base import Pacing, Policy
from greenroom.core.policy.default import BoundedFirstCome
from greenroom.core.policy.fifo import FirstCome
from greenroom.core.policy.swapper import ByMemory
from greenroom.core.queue.waitlist import Queue, Waiter, WaiterKind

PACING = Pacing(Limits(away_share=0.1))
DEFAULT = BoundedFirstCome(Limits(lift_s=60.0, deadlines_s=(5.0, 120.0, 480.0)), ByMemory())
M = ModelId("m")


def queue_since(arrived: float, kind: WaiterKind = WaiterKind.REQUEST, policy: Policy = DEFAULT) -> Queue:
    queue = Queue(M, policy.priority_class)
    queue.add(Waiter(RequestId("r"), kind, 1, M, (M,), 1, arrived))
    return queue


def test_devices_are_kept_from_the_deadline_on_for_a_share_of_the_time_waited() -> None:
    queue = queue_since(100.0)
    assert PACING.keeps_for_s(queue, 219.9) == 0.0
    assert PACING.keeps_for_s(queue, 220.0) == pytest.approx(12.0)
    assert PACING.keeps_for_s(queue, 1_100.0) == pytest.approx(100.0)


def test_devices_are_never_kept_for_a_preload_nor_under_a_policy_without_deadlines() -> None:
    assert PACING.keeps_for_s(queue_since(0.0, kind=WaiterKind.PRELOAD), 1e9) == 0.0
    assert PACING.keeps_for_s(queue_since(0.0, policy=FirstCome(Limits(), ByMemory())), 1e9) == 0.0


def test_a_plan_gives_way_to_the_more_urgent_unless_its_queue_is_past_its_deadline() -> None:
    queue = queue_since(0.0)
    assert PACING.gives_way(1, queue, 0, now=queue.deadline_at - 1.0)
    assert not PACING.gives_way(1, queue, 1, now=1.0), "only as urgent"
    assert not PACING.gives_way(1, queue, 0, now=queue.deadline_at)


def test_the_plan_of_a_preload_gives_way_however_long_it_has_waited() -> None:
    queue = queue_since(0.0, kind=WaiterKind.PRELOAD)
    assert queue.deadline_at == inf and PACING.gives_way(1, queue, 0, now=1e9)
