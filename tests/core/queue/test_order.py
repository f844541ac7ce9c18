"""Order of requests: class, arrival, joined loads, bounded queues, patience. For switches see `test_switching`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from greenroom.core import events as ev
from greenroom.core.effects import RejectCode
from greenroom.core.events import Limits, Timer, TimerKind
from greenroom.core.model import DeviceId, RequestId, TenantId, Tier
from greenroom.core.policy import BUILT_IN, SWAPPERS
from greenroom.core.policy.base import Turn
from greenroom.core.policy.fifo import FirstCome
from greenroom.core.policy.swapper import ByMemory, Eviction, Resident, Target
from greenroom.core.queue.waitlist import Waiter
from tests.core.world import Fate, World, gpu, host, model


def one_at_a_time(queue_depth_max: int = 1_000) -> World:
    """Two models that do not fit together."""
    return World([model("a", 6_000), model("b", 6_000)], limits=Limits(queue_depth_max=queue_depth_max))


def ready(world: World, *names: str) -> None:
    """Bring these models one after the other and leave them idle."""
    for name in names:
        world.arrive(f"warm-{name}-{len(world.calls_by_id)}", name, takes_s=0.0)
        world.run(10.0)
        assert world.tier(name) is Tier.READY


def test_a_request_for_a_ready_model_is_granted_before_its_arrival_returns() -> None:
    world = one_at_a_time()
    ready(world, "a")
    assert world.arrive("r", "a").fate is Fate.GRANTED


def test_a_request_for_a_cold_model_is_served_when_the_load_is_done() -> None:
    world = one_at_a_time()
    call = world.arrive("r", "a", takes_s=1.0)
    assert world.kinds() == ["load a"] and world.fate("r") is Fate.WAITING
    world.run()
    assert world.fate("r") is Fate.SERVED and call.granted_at == 5.0 and world.is_at_rest()


def test_fifty_requests_join_one_load() -> None:
    world = World([model("a", concurrency=4)])
    for number in range(50):
        world.arrive(f"r{number}", "a", takes_s=0.5)
    world.run()
    assert world.kinds() == ["load a"]
    assert world.granted() == [f"r{number}" for number in range(50)]
    assert all(call.fate is Fate.SERVED for call in world.calls_by_id.values())


def test_requests_of_one_model_are_served_by_priority_then_by_arrival() -> None:
    world = World([model("a")])
    for name, priority in [("low1", 2), ("normal1", 1), ("low2", 2), ("urgent", 0), ("normal2", 1)]:
        world.arrive(name, "a", priority=priority, takes_s=1.0)
    world.run()
    assert world.granted() == ["urgent", "normal1", "normal2", "low1", "low2"]


def test_cold_models_are_loaded_by_priority_of_their_waiting_requests() -> None:
    world = World([model(name, 6_000) for name in "abc"])
    world.arrive("running", "a", takes_s=10.0)
    world.run(6.0)
    world.arrive("normal", "b", takes_s=1.0)
    world.arrive("urgent", "c", takes_s=1.0, priority=0)
    world.run()
    assert world.granted() == ["running", "urgent", "normal"]


def test_concurrency_of_a_slot_makes_waiters_not_errors() -> None:
    world = World([model("a", concurrency=2)])
    ready(world, "a")
    calls = [world.arrive(f"r{number}", "a", takes_s=1.0) for number in range(5)]
    assert [call.fate for call in calls] == [Fate.GRANTED] * 2 + [Fate.WAITING] * 3
    world.run()
    assert [call.granted_at - calls[0].granted_at for call in calls] == [0, 0, 1, 1, 2]


def test_a_model_takes_as_many_at_once_as_its_spec_says_else_one() -> None:
    world = World([model("three", 1_000, concurrency=3), model("one", 1_000, concurrency=1), model("unsaid", 1_000)])
    for name in ("three", "one", "unsaid"):
        for number in range(3):
            world.arrive(f"{name}{number}", name)
    world.run(10.0)
    granted = [call.id for call in world.calls_by_id.values() if call.fate is Fate.GRANTED]
    assert granted == ["three0", "three1", "three2", "one0", "unsaid0"]


def test_a_full_queue_refuses_with_depth_and_a_time_to_come_back() -> None:
    world = one_at_a_time(queue_depth_max=2)
    for number in range(3):
        world.arrive(f"r{number}", "a", takes_s=1.0)
    rejection = world.calls_by_id["r2"].rejection
    assert rejection is not None and rejection.code is RejectCode.QUEUE_FULL
    assert (rejection.queue_depth, rejection.retry_after_s) == (2, 1.0)
    world.run()
    assert world.fate("r1") is Fate.SERVED
    world.arrive("r3", "b", takes_s=1.0)
    world.arrive("r4", "b", takes_s=1.0)
    world.arrive("r5", "b", takes_s=1.0)
    rejection = world.calls_by_id["r5"].rejection
    assert rejection is not None and rejection.retry_after_s == rejection.avg_wait_s > 1.0


def refused_for(world: World, request: str) -> RejectCode | None:
    rejection = world.calls_by_id[request].rejection
    return None if rejection is None else rejection.code


def test_a_tenant_that_fills_its_places_is_refused_and_others_go_on() -> None:
    limits = Limits(queue_depth_max=9, tenant_depths={TenantId("flood"): 2}, tenant_depth_max=1)
    world = World([model("a", 6_000), model("b", 6_000)], limits=limits)
    for number in range(3):
        world.arrive(f"flood{number}", "a", tenant="flood", takes_s=1.0)
    for name in ("x", "y"):
        world.arrive(f"{name}0", "b", tenant=name, takes_s=1.0)
        world.arrive(f"{name}1", "b", tenant=name, takes_s=1.0)
    full = RejectCode.TENANT_QUEUE_FULL
    assert [refused_for(world, f"flood{number}") for number in range(3)] == [None, None, full]
    assert [refused_for(world, name) for name in ("x0", "x1", "y0", "y1")] == [None, full, None, full]
    world.run()
    world.arrive("again", "a", tenant="flood", takes_s=1.0)
    assert refused_for(world, "again") is None, "places are free again"


def test_tenants_that_callers_make_up_share_their_places() -> None:
    limits = Limits(tenant_depths={TenantId("named"): 1}, tenant_depth_max=2, others_share_depth=True)
    world = World([model("a", 6_000)], limits=limits)
    for name in ("named", "x", "y", "z"):
        world.arrive(name, "a", tenant=name, takes_s=1.0)
    assert [refused_for(world, name) for name in ("named", "x", "y")] == [None] * 3
    assert refused_for(world, "z") is RejectCode.TENANT_QUEUE_FULL


def test_a_full_queue_still_serves_requests_that_need_not_wait() -> None:
    world = World([model("a", 6_000, concurrency=9), model("b", 6_000)], limits=Limits(queue_depth_max=1))
    ready(world, "a")
    world.arrive("busy", "a", takes_s=9.0)
    world.arrive("waits", "b", takes_s=1.0)
    assert world.arrive("warm", "a", takes_s=1.0).fate is Fate.GRANTED
    assert world.arrive("cold", "b").fate is Fate.REJECTED


def test_no_waiter_blocks_requests_for_which_there_is_room() -> None:
    """A request for another model delays neither less urgent nor equal ones; the policy ends that in time."""
    world = World([model("a", 6_000, concurrency=9), model("b", 6_000)])
    ready(world, "a")
    world.arrive("running", "a", takes_s=3.0)
    world.arrive("urgent", "b", takes_s=1.0, priority=0)
    assert world.arrive("low", "a", takes_s=1.0, priority=2).fate is Fate.GRANTED
    assert world.arrive("equal", "a", takes_s=1.0, priority=0).fate is Fate.GRANTED
    world.run()
    assert world.granted()[-1] == "urgent"


def test_waiters_on_other_gpus_are_not_held_up() -> None:
    world = World([model("a", 6_000), model("b", 6_000), model("c", 2_000)], devices=(gpu(0, 8_000), gpu(1, 4_000)))
    ready(world, "a")
    world.arrive("running", "a")
    world.arrive("blocked", "b")
    world.arrive("low", "c", takes_s=1.0, priority=2)
    world.run()
    assert world.fate("low") is Fate.SERVED and world.fate("blocked") is Fate.WAITING


def test_sharing_only_a_plentiful_device_with_a_waiter_delays_no_request() -> None:
    """Both need some of the host's memory, of which there is enough; only the GPU is short."""
    on = [(DeviceId("gpu0"),), (DeviceId("gpu0"),), (DeviceId("gpu1"),)]
    specs = [model(name, 6_000, host_mib=100, devices=where) for name, where in zip("abc", on, strict=True)]
    world = World(specs, devices=(gpu(0, 8_000), gpu(1, 8_000), host(1_000)))
    ready(world, "a")
    world.arrive("running", "a")
    world.arrive("blocked", "b")
    world.arrive("low", "c", takes_s=1.0, priority=2)
    world.run()
    assert world.fate("low") is Fate.SERVED and world.fate("blocked") is Fate.WAITING


def test_a_slot_that_gets_room_also_serves_requests_that_name_its_model_second() -> None:
    world = World([model("a", 6_000, concurrency=2), model("b", 6_000)])
    ready(world, "a")
    for name in ("run1", "run2"):
        world.arrive(name, "a")
    world.arrive("r", "b", "a")
    world.finish("run1")
    assert world.fate("r") is Fate.GRANTED and not world.scheduler.state.waitlist


def test_a_slot_serves_the_request_it_was_loaded_for_before_a_more_urgent_cold_one() -> None:
    world = one_at_a_time()
    world.arrive("normal", "a", takes_s=1.0)
    world.arrive("urgent", "b", takes_s=1.0, priority=0)
    world.run()
    assert world.granted() == ["normal", "urgent"]


def test_a_client_that_leaves_while_joined_does_not_stop_the_load() -> None:
    world = one_at_a_time()
    world.arrive("leaves", "a")
    world.arrive("stays", "a", takes_s=1.0)
    world.run(1.0)
    world.go("leaves")
    world.run()
    assert world.fate("stays") is Fate.SERVED and world.kinds() == ["load a"]


def test_a_load_goes_on_when_all_its_requests_have_left() -> None:
    world = one_at_a_time()
    world.arrive("leaves", "a")
    world.go("leaves")
    world.run()
    assert world.tier("a") is Tier.READY and world.arrive("next", "a").fate is Fate.GRANTED


def test_a_request_that_loses_patience_is_told_how_long_it_may_take() -> None:
    world = one_at_a_time()
    ready(world, "b", "a")
    world.arrive("running", "a")
    call = world.arrive("r", "b", within_s=3.0)
    world.run(2.9)
    assert call.fate is Fate.WAITING
    world.run(0.2)
    assert world.code("r") is RejectCode.EXPIRED
    assert call.rejection is not None and call.rejection.retry_after_s == 5.0


def test_an_expiry_timer_that_fires_early_rejects_no_request() -> None:
    world = one_at_a_time()
    ready(world, "a")
    world.arrive("running", "a")
    world.arrive("r", "b", within_s=10.0)
    timer = Timer(TimerKind.EXPIRE, "r")
    world.run(9.0)
    world.fire(timer)
    assert world.fate("r") is Fate.WAITING
    world.run()
    assert world.code("r") is RejectCode.EXPIRED and world.calls_by_id["r"].ended_at == 20.0


def test_patience_is_forgotten_with_the_grant() -> None:
    world = one_at_a_time()
    world.arrive("r", "a", within_s=6.0)
    world.run(20.0)
    assert world.fate("r") is Fate.GRANTED and not world.timers


def test_an_impatient_request_is_refused_at_once_when_it_cannot_be_in_time() -> None:
    world = one_at_a_time()
    assert world.arrive("unknown", "a", within_s=1.0, patient=False).fate is Fate.WAITING, "nothing was learned yet"
    world.run()
    ready(world, "b")
    assert world.arrive("late", "a", within_s=1.0, patient=False).fate is Fate.REJECTED
    assert world.arrive("in time", "a", within_s=9.0, patient=False).fate is Fate.WAITING
    assert world.arrive("patient", "a", within_s=1.0).fate is Fate.WAITING


def test_a_request_that_cannot_wait_long_enough_still_causes_the_load() -> None:
    world = one_at_a_time()
    world.arrive("first", "a", takes_s=1.0)
    world.run()
    ready(world, "b")
    moves = len(world.moves)
    assert world.arrive("late", "a", within_s=1.0, patient=False).fate is Fate.REJECTED
    assert len(world.moves) > moves, "some request must begin the load, or none is ever served"
    world.run()
    assert world.arrive("next", "a", takes_s=1.0, within_s=1.0, patient=False).fate is Fate.GRANTED


def test_a_request_that_cannot_wait_long_enough_waits_while_nothing_can_be_begun() -> None:
    world = one_at_a_time()
    world.arrive("first", "a", takes_s=1.0)
    world.run()
    ready(world, "b")
    world.arrive("long", "b", takes_s=50.0)
    assert world.arrive("late", "a", within_s=1.0, patient=False).fate is Fate.WAITING
    world.run()
    assert world.code("late") is RejectCode.EXPIRED


def test_the_same_request_twice_is_ignored_and_counted() -> None:
    world = one_at_a_time()
    call = world.arrive("r", "a", takes_s=1.0)
    world.post(world.arrival(call))
    world.run(5.5)
    world.post(world.arrival(call))
    world.run()
    assert world.granted() == ["r"] and world.scheduler.state.counters.ignored == 2


def test_the_end_of_an_unknown_request_is_ignored_and_counted() -> None:
    world = one_at_a_time()
    world.post(ev.ServeDone(0.0, RequestId("nobody")))
    world.post(ev.RequestGone(0.0, RequestId("nobody")))
    assert world.scheduler.state.counters.ignored == 2


def test_an_unknown_model_is_refused() -> None:
    world = one_at_a_time()
    world.arrive("r", "nope")
    assert world.code("r") is RejectCode.UNKNOWN_MODEL


def test_a_granted_request_whose_client_leaves_gives_its_place_to_the_next() -> None:
    world = one_at_a_time()
    ready(world, "a")
    world.arrive("leaves", "a")
    world.arrive("next", "a")
    world.go("leaves")
    assert world.fate("next") is Fate.GRANTED


class LastComeFirst(FirstCome):
    """The request that came last goes first."""

    def turn(self, waiter: Waiter, served_s: float, now: float) -> Turn:
        return (-waiter.sequence,)


@pytest.mark.pure
def test_a_policy_of_ones_own_decides_the_order() -> None:
    world = World(
        [model("a", 6_000), model("b", 6_000)],
        limits=Limits(policy="last"),
        policies={**BUILT_IN, "last": LastComeFirst},
    )
    ready(world, "a")
    world.arrive("run", "a", takes_s=1.0)
    calls = [world.arrive(name, "b", takes_s=1.0, tenant=name) for name in ("one", "two", "three")]
    world.run()
    assert sorted(calls, key=lambda call: call.granted_at) == calls[::-1]


class EvictsNothing(ByMemory):
    def eviction_for(
        self, target: Target, residents: Sequence[Resident], room_mib: Mapping[DeviceId, int]
    ) -> Eviction | None:
        return super().eviction_for(target, [], room_mib)


@pytest.mark.pure
def test_a_custom_swapper_decides_which_models_leave() -> None:
    swappers = {**SWAPPERS, "stubborn": EvictsNothing}
    world = World([model("a", 6_000), model("b", 6_000)], limits=Limits(swapper="stubborn"), swappers=swappers)
    ready(world, "a")
    world.arrive("r", "b")
    world.run(1_000.0)
    assert world.kinds() == ["load a"] and world.fate("r") is Fate.WAITING


@pytest.mark.pure
def test_waiting_requests_follow_a_changed_policy() -> None:
    world = World([model("a")], policies={**BUILT_IN, "last": LastComeFirst})
    ready(world, "a")
    world.arrive("run", "a", takes_s=1.0)
    calls = [world.arrive(name, "a", takes_s=1.0, tenant=name) for name in ("one", "two", "three")]
    world.config(limits=Limits(policy="last"))
    world.run()
    assert sorted(calls, key=lambda call: call.granted_at) == calls[::-1]
