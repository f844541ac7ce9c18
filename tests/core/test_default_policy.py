"""The default policy by itself: classes and ageing, rank, when one may take another's place, and what one is worth."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.decide.decision import Swap
from greenroom.core.events import Limits
from greenroom.core.model import ModelId, RequestId, SlotId, TenantId, Tier
from greenroom.core.policy.default import ByCost
from greenroom.core.policy.swapper import ByMemory, Resident
from greenroom.core.queue.waitlist import Queue, Waiter, WaiterKind

from .test_order import ready
from .world import World, model

POLICY = ByCost(Limits(), ByMemory())
SWAP_S = 5.0


def waiter(sequence: int, arrived: float, priority: int = 1, tenant: str = "") -> Waiter:
    name, wanted = RequestId(f"w{sequence}"), ModelId("m")
    return Waiter(name, WaiterKind.REQUEST, sequence, wanted, (wanted,), priority, arrived, TenantId(tenant))


def queue(*arrived: float, priority: int = 1, swap_s: float = SWAP_S, service_s: float = 1.0) -> Queue:
    result = Queue(ModelId("m"), POLICY.priority_class)
    for number, at in enumerate(arrived):
        result.add(waiter(number, at, priority))
    result.swap_s, result.service_s, result.at_once = swap_s, service_s, 99
    return result


def resident(**more: object) -> Resident:
    """Busy, in demand, long past its residency, and as dear to bring back as the newcomer."""
    one = Resident(
        slot=SlotId("s"),
        model=ModelId("r"),
        gives_mib={},
        leaves_to=Tier.COLD,
        priority=1,
        last_used=0.0,
        is_busy=True,
        is_fixed=False,
        rate=0.8,
        reload_s=SWAP_S,
        drain_s=1.0,
    )
    return replace(one, **more)  # type: ignore[arg-type]


# --- classes --------------------------------------------------------------------------------------------------------


def test_priorities_beyond_the_named_ones_stand_like_the_nearest() -> None:
    assert POLICY.priority_class(-5) is POLICY.priority_class(0) and POLICY.priority_class(99) is POLICY.priority_class(
        2
    )
    assert [POLICY.priority_class(priority).deadline_s for priority in (0, 1, 2)] == [5.0, 60.0, 240.0]


def test_a_class_weighs_twice_the_next() -> None:
    high, normal, low = (POLICY.priority_class(priority).weight for priority in (0, 1, 2))
    assert high == 2 * normal == 4 * low


def test_nobody_is_late_before_it_insists() -> None:
    for priority in (0, 1, 2):
        assert POLICY.priority_class(priority).late_s >= POLICY.priority_class(priority).deadline_s


def test_the_order_is_class_then_tenant_then_arrival() -> None:
    urgent, poor, rich, later = waiter(4, 0.0, 0), waiter(3, 0.0), waiter(1, 0.0), waiter(5, 0.0)
    turns = {
        name: POLICY.turn(one, served_s, 10.0)
        for name, one, served_s in (
            ("urgent", urgent, 99.0),
            ("poor", poor, 1.0),
            ("rich", rich, 5.0),
            ("later", later, 1.0),
        )
    }
    assert sorted(turns, key=lambda name: turns[name]) == ["urgent", "poor", "later", "rich"]


@pytest.mark.parametrize(("low_waited_s", "first"), [(59.0, "normal"), (61.0, "low"), (179.0, "low")])
def test_a_minute_of_waiting_lifts_by_one_class(low_waited_s: float, first: str) -> None:
    """A normal one has just come; the low one has waited longer, and its tenant had less so far."""
    now = 1_000.0
    low, normal = POLICY.turn(waiter(1, now - low_waited_s, 2), 0.0, now), POLICY.turn(waiter(2, now, 1), 5.0, now)
    assert (first == "low") == (low < normal)


def test_age_goes_on_lifting_above_the_highest_class() -> None:
    now = 1_000.0
    old, urgent = POLICY.turn(waiter(1, now - 200.0, 2), 9.0, now), POLICY.turn(waiter(2, now, 0), 0.0, now)
    assert old < urgent


@given(st.integers(-2, 4), st.integers(-2, 4), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e3))
def test_nobody_is_passed_for_ever(mine: int, other: int, arrived: float, later_s: float, served_s: float) -> None:
    """Whoever comes so many minutes later as its class is higher, and one more, goes behind, whatever anyone had."""
    lift_s = Limits().lift_s
    first = waiter(1, arrived, mine)
    second = waiter(2, arrived + (max(0, mine - other) + 1) * lift_s + later_s, other)
    now = second.arrived + 1.0
    assert POLICY.turn(first, served_s, now) < POLICY.turn(second, 0.0, now)


def test_class_and_age_decide_between_tenants_in_the_scheduler_too() -> None:
    world = World([model("a")])
    ready(world, "a")
    world.arrive("busy", "a", takes_s=70.0)
    world.arrive("low", "a", takes_s=1.0, priority=2, tenant="t")
    world.run(50.0)
    world.arrive("normal", "a", takes_s=1.0, tenant="u")
    world.arrive("urgent", "a", takes_s=1.0, priority=0, tenant="v")
    world.run()
    assert world.granted()[-3:] == ["urgent", "low", "normal"]


# --- rank -----------------------------------------------------------------------------------------------------------


def test_between_models_class_goes_first_then_who_has_waited_more_for_what_it_costs() -> None:
    now = 20.0
    urgent, many, one = queue(19.0, priority=0), queue(10.0, 10.0, 10.0), queue(10.0)
    dear = queue(10.0, swap_s=60.0)
    ranked = sorted([one, dear, urgent, many], key=lambda some: POLICY.rank(some, now))
    assert ranked == [urgent, many, one, dear]


def test_who_is_late_goes_before_everybody_and_strictly_by_age() -> None:
    late_s = POLICY.priority_class(1).late_s
    now = late_s + 100.0
    late, later = queue(50.0, swap_s=99.0), queue(60.0, 60.0, 60.0)
    fresh = queue(now - 1.0, priority=0)
    ranked = sorted([fresh, later, late], key=lambda some: POLICY.rank(some, now))
    assert ranked == [late, later, fresh]


def test_wishes_come_last() -> None:
    wish = Queue(ModelId("w"), POLICY.priority_class)
    wish.add(Waiter(RequestId("p"), WaiterKind.PRELOAD, 1, ModelId("w"), (ModelId("w"),), 1_000_000, 0.0))
    assert POLICY.rank(queue(999.0, priority=2), 1_000.0) < POLICY.rank(wish, 1_000.0)


# --- switching ------------------------------------------------------------------------------------------------------


def test_a_busy_resident_stays_its_minimum_residency_whatever_is_due() -> None:
    one = resident(stays_until=500.0, batch_until=600.0)
    assert POLICY.takes_at(queue(*[0.0] * 50, priority=0), one, 100.0) == 500.0


def test_a_deadline_is_the_latest_for_one_whose_residency_is_over() -> None:
    dear = resident(rate=100.0, batch_until=1e9)
    assert POLICY.takes_at(queue(10.0), dear, 20.0) == 70.0
    assert POLICY.takes_at(queue(10.0, priority=0), dear, 12.0) == 15.0


@given(
    st.lists(st.floats(0, 90), min_size=1, max_size=9),
    st.integers(0, 2),
    st.floats(0, 10),
    st.floats(0, 300),
    st.booleans(),
)
def test_a_place_is_never_taken_before_residency_nor_kept_once_that_is_over_and_somebody_is_late(
    arrived: list[float], priority: int, rate: float, stays_until: float, busy: bool
) -> None:
    now, cold = 100.0, queue(*sorted(arrived), priority=priority)
    one = resident(rate=rate, stays_until=stays_until, batch_until=stays_until + 50.0, is_busy=busy)
    at = POLICY.takes_at(cold, one, now)
    assert at <= max(now, stays_until, cold.late_at)
    assert not busy or at >= stays_until


def test_switching_pays_sooner_for_more_who_wait_and_later_for_a_dearer_resident() -> None:
    now, short = 100.0, resident(reload_s=1.0)
    lone, many = queue(now, swap_s=1.0), queue(*[now] * 4, swap_s=1.0)
    lone_at = POLICY.takes_at(lone, short, now)
    assert POLICY.takes_at(many, short, now) < lone_at < lone.deadline_at
    for dearer in ({"rate": 2.0}, {"drain_s": 3.0}, {"reload_s": 2.0}):
        assert POLICY.takes_at(lone, replace(short, **dearer), now) > lone_at, dearer  # type: ignore[arg-type]
    assert POLICY.takes_at(queue(now, swap_s=2.0), short, now) > lone_at


def test_switching_has_been_paid_for_when_it_happens() -> None:
    """By then all who wait have waited at least as long as the newcomer's own way in."""
    now = 100.0
    for waiters in (1, 2, 5, 10):
        cold = queue(*[now] * waiters, swap_s=1.0)
        at = POLICY.takes_at(cold, resident(reload_s=1.0), now)
        assert cold.waited_s(at) >= cold.swap_s and at < cold.deadline_at


def test_nobody_who_only_wishes_ever_pays() -> None:
    wish = Queue(ModelId("w"), POLICY.priority_class)
    wish.add(Waiter(RequestId("p"), WaiterKind.PRELOAD, 1, ModelId("w"), (ModelId("w"),), 1_000_000, 0.0))
    assert POLICY.takes_at(wish, resident(batch_until=inf), 1e6) == inf


def test_the_batch_is_over_when_others_were_overtaken_often_enough_since_its_end() -> None:
    dear, cold, now = resident(rate=100.0, batch_until=50.0), queue(40.0), 55.0
    assert POLICY.takes_at(cold, replace(dear, passed_since=49.0), now) == cold.deadline_at, (
        "some grants were the batch's"
    )
    assert POLICY.takes_at(cold, replace(dear, passed_since=50.0), now) == now
    assert POLICY.takes_at(queue(52.0), replace(dear, passed_since=50.0), now) == 112.0, "it was not there yet"
    assert POLICY.takes_at(cold, replace(dear, passed_since=inf), 45.0) == 50.0, "none may overtake: at its end"


def test_an_idle_resident_that_is_hardly_asked_for_goes_at_once() -> None:
    now = 100.0
    assert POLICY.takes_at(queue(now), resident(is_busy=False, last_used=99.0, rate=0.001), now) <= now


def test_an_idle_resident_in_demand_lingers_but_no_longer_than_bringing_it_back_takes() -> None:
    now = 100.0
    wanted = resident(is_busy=False, last_used=now, rate=2.0)
    at = POLICY.takes_at(queue(now), wanted, now)
    assert now + 0.5 * SWAP_S < at <= now + SWAP_S
    assert POLICY.takes_at(queue(now), replace(wanted, last_used=now - SWAP_S), now) <= now


def test_an_idle_resident_of_a_higher_class_keeps_its_residency() -> None:
    now = 100.0
    for priority, at in ((0, 200.0), (1, now), (2, now)):
        one = resident(is_busy=False, stays_until=200.0, priority=priority, rate=0.0)
        assert max(now, POLICY.takes_at(queue(now), one, now)) == at


# --- worth ----------------------------------------------------------------------------------------------------------


def test_losing_one_is_worse_the_more_it_is_asked_for_and_the_longer_it_takes_to_bring_back() -> None:
    idle = resident(is_busy=False, rate=1.0)
    base = POLICY.loss(idle, 0.0)
    assert POLICY.loss(replace(idle, rate=2.0), 0.0) > base < POLICY.loss(replace(idle, reload_s=60.0), 0.0)
    assert POLICY.loss(replace(idle, rate=0.0), 0.0) == 0.0


def test_of_busy_ones_that_which_will_have_ended_first_is_the_lesser_loss() -> None:
    assert POLICY.loss(resident(drain_s=1.0), 0.0) < POLICY.loss(resident(drain_s=9.0), 0.0)


def test_the_model_asked_for_least_leaves_and_what_was_asked_for_long_ago_counts_less() -> None:
    world = World([model("often", 4_000), model("seldom", 4_000), model("new", 4_000)])
    ready(world, "often", "seldom")
    for number in range(9):
        world.arrive(f"r{number}", "often", takes_s=0.0)
    world.run(5.0)
    assert [one.model for one in evicted(world)] == ["seldom"]
    world.run(3_600.0)
    for number in range(3):
        world.arrive(f"s{number}", "seldom", takes_s=0.0)
    assert [one.model for one in evicted(world)] == ["often"], "an hour ago it was asked for more often"


def evicted(world: World) -> tuple[Resident, ...]:
    plan = world.scheduler.explain(world.asking("?", "new"))
    assert isinstance(plan, Swap)
    return plan.evict
