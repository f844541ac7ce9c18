"""First come, first served: a ready model serves its own queue, an idle one gives way, a busy one never."""

from __future__ import annotations

import pytest

from greenroom.core.events import Limits
from greenroom.core.model import ModelId, RequestId, Tier
from greenroom.core.policy import make_policy
from greenroom.core.queue.waitlist import Waiter, WaiterKind
from tests.core.decide.test_switching import stream
from tests.core.queue.test_order import ready
from tests.core.world import Fate, World, gpu, model

FIFO = Limits(policy="fifo")


def several(*names: str, gpu_mib: int = 6_000, concurrency: int = 1) -> World:
    return World([model(name, gpu_mib, concurrency=concurrency) for name in names], limits=FIFO)


def test_a_ready_model_serves_its_own_waiters_before_an_older_one_for_another() -> None:
    world = several("a", "b")
    ready(world, "a")
    world.arrive("run", "a", takes_s=5.0)
    world.arrive("cold", "b", takes_s=1.0)
    world.arrive("warm", "a", takes_s=1.0)
    world.run()
    assert world.granted()[-2:] == ["warm", "cold"]


def test_an_idle_model_gives_way_at_once() -> None:
    world = several("a", "b")
    ready(world, "a")
    for number in range(20):
        world.arrive(f"r{number}", "a", takes_s=0.1)
    world.run()
    world.arrive("cold", "b", takes_s=1.0)
    assert world.kinds()[-1] == "unload a", "it does not linger"


def test_the_oldest_cold_model_goes_next() -> None:
    world = several("a", "b", "c")
    ready(world, "a")
    world.arrive("run", "a", takes_s=5.0)
    world.arrive("b", "b", takes_s=1.0)
    for number in range(9):
        world.arrive(f"c{number}", "c", takes_s=1.0)
    world.run()
    assert world.granted()[2] == "b", "however many wait for the other"


def test_lower_priority_numbers_go_first_and_age_lifts_no_request() -> None:
    world = several("a", "b", "c")
    ready(world, "a")
    world.arrive("run", "a", takes_s=500.0)
    world.arrive("late-b", "b", takes_s=1.0, priority=2)
    world.run(400.0)
    world.arrive("early-c", "c", takes_s=1.0, priority=1)
    world.run()
    assert world.granted()[-2:] == ["early-c", "late-b"]


def test_within_a_model_priority_goes_before_arrival_and_tenants_do_not_matter() -> None:
    world = several("a")
    ready(world, "a")
    world.arrive("run", "a", takes_s=1.0)
    for number in range(3):
        world.arrive(f"many-{number}", "a", takes_s=1.0, tenant="many")
    world.arrive("few", "a", takes_s=1.0, tenant="few")
    world.arrive("urgent", "a", takes_s=1.0, priority=0, tenant="many")
    world.run()
    assert world.granted()[2:] == ["urgent", "many-0", "many-1", "many-2", "few"]


@pytest.mark.untraced
def test_a_model_in_constant_use_keeps_the_others_out() -> None:
    """What the default policy is for."""
    world = several("a", "b", concurrency=2)
    ready(world, "a")
    stream(world, "a", 0.6, world.now + 300.0)
    world.run(0.1)
    cold = world.arrive("cold", "b", takes_s=1.0, priority=0)
    world.run(290.0)
    assert world.fate("cold") is Fate.WAITING and not world.timers
    world.run()
    assert world.fate("cold") is Fate.SERVED and cold.granted_at - cold.arrived > 290.0


def test_the_least_recently_used_leaves_whatever_it_costs_to_bring_back() -> None:
    world = several("a", "b", "c", gpu_mib=4_000)
    ready(world, "a", "b")
    for number in range(30):
        world.arrive(f"r{number}", "a", takes_s=0.0)
    world.run(1.0)
    world.arrive("last", "b", takes_s=0.0)
    world.arrive("c", "c", takes_s=0.0)
    world.run()
    assert world.tier("a") is Tier.COLD and world.tier("b") is Tier.READY


def test_another_device_is_used_before_a_model_is_evicted() -> None:
    world = World([model("a", 6_000), model("b", 6_000)], devices=(gpu(0, 8_000), gpu(1, 8_000)), limits=FIFO)
    ready(world, "a", "b")
    assert world.kinds() == ["load a", "load b"]


def test_policies_are_made_by_name() -> None:
    policy = make_policy(FIFO)
    one = Waiter(RequestId("r"), WaiterKind.REQUEST, 7, ModelId("m"), (ModelId("m"),), 3, 10.0)
    assert policy.turn(one, 99.0, 1e6) == (3, 7)
    assert policy.priority_class(0) == policy.priority_class(2)
