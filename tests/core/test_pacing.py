"""The rules of every policy: how long a stay is, how often others may be overtaken, when waiting is too long."""

from __future__ import annotations

from collections import deque
from math import inf

from greenroom.core.events import Limits
from greenroom.core.model import ModelId, RequestId
from greenroom.core.policy.base import Pacing, overtakes_since, passed_since
from greenroom.core.policy.default import ByCost
from greenroom.core.policy.swapper import ByMemory
from greenroom.core.queue.waitlist import Queue, Waiter, WaiterKind

PACING = Pacing(Limits(residency_swaps=2.0, batch_swaps=5.0, overtakes_max=3))
M = ModelId("m")


def queue_since(arrived: float) -> Queue:
    queue = Queue(M, ByCost(Limits(), ByMemory()).priority_class)
    queue.add(Waiter(RequestId("r"), WaiterKind.REQUEST, 1, M, (M,), 1, arrived))
    return queue


def test_a_stay_pays_for_its_swap_and_a_batch_for_the_drain_as_well() -> None:
    assert PACING.stay_s(10.0, 2.0) == (20.0, 60.0)


def test_only_as_many_grants_are_kept_as_may_overtake() -> None:
    recent = PACING.recent(deque([1.0, 2.0, 3.0, 4.0]))
    assert list(recent) == [2.0, 3.0, 4.0] and passed_since(recent) == 2.0
    assert passed_since(PACING.recent(deque([1.0]))) == -inf, "there is room for more"
    assert passed_since(deque(maxlen=0)) == inf, "none may be overtaken"


def test_the_policy_is_asked_again_when_all_grants_that_count_came_after_the_batch() -> None:
    recent = PACING.recent(deque([2.0, 3.0, 4.0]))
    assert overtakes_since(recent, batch_until=2.0) == 2.0
    assert overtakes_since(recent, batch_until=2.5) == -inf
    assert overtakes_since(deque(maxlen=0), batch_until=0.0) == -inf


def test_devices_are_kept_for_what_was_late_for_as_long_again() -> None:
    queue = queue_since(100.0)
    late_s = queue.late_at - 100.0
    assert not PACING.keeps_devices(queue, 100.0 + 2 * late_s - 1.0)
    assert PACING.keeps_devices(queue, 100.0 + 2 * late_s)


def test_a_plan_gives_way_to_the_more_urgent_unless_its_queue_is_late() -> None:
    queue = queue_since(0.0)
    assert PACING.gives_way(1, queue, 0, now=1.0)
    assert not PACING.gives_way(1, queue, 1, now=1.0)
    assert not PACING.gives_way(1, queue, 0, now=queue.late_at)
