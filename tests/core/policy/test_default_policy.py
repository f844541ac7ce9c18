"""The default policy by itself: order, when a busy model is closed for another, and what a resident is worth."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.decide.plan import Swap
from greenroom.core.events import Limits
from greenroom.core.model import ModelId, RequestId, SlotId, TenantId, Tier
from greenroom.core.policy.default import ALIKE_S, BoundedFirstCome
from greenroom.core.policy.swapper import ByMemory, Resident
from greenroom.core.queue.waiter import Accounts
from greenroom.core.queue.waitlist import FLOODS_FROM, Queue, Waiter, WaiterKind
from tests.core.queue.test_order import ready
from tests.core.world import World, model

LIMITS = Limits(lift_s=60.0, deadlines_s=(5.0, 120.0, 480.0))
POLICY = BoundedFirstCome(LIMITS, ByMemory())
LIFT_S = LIMITS.lift_s
# The resident's drain, the newcomer's swap and answer, and the resident's reload: ten times that is the due time.
AWAY_S, DUE_S = 1.0 + 10.0 + 1.0 + 8.0, 200.0


def waiter(sequence: int, arrived: float, priority: int = 1, tenant: str = "") -> Waiter:
    name, wanted = RequestId(f"w{sequence}"), ModelId("m")
    return Waiter(name, WaiterKind.REQUEST, sequence, wanted, (wanted,), priority, arrived, TenantId(tenant))


def queue(*arrived: float, priority: int = 1, tenant: str = "", swap_s: float = 10.0) -> Queue:
    result = Queue(ModelId("m"), POLICY.priority_class)
    for number, at in enumerate(arrived):
        result.add(waiter(number, at, priority, tenant))
    result.swap_s, result.service_s = swap_s, 1.0
    return result


def flooded(oldest: float, aged_from: float, priority: int = 1) -> Queue:
    """The queue of a tenant that asked too fast: its next request came then, but counts as if it had come later."""
    result = queue(*[oldest] * FLOODS_FROM, priority=priority, tenant="flood")
    accounts = Accounts()
    accounts.settle(TenantId("flood"), used_s=1e6, estimate_s=0.0)
    result.remove(result.heads()[0], accounts, served_at=aged_from)
    assert (result.oldest, result.aged_from) == (oldest, aged_from)
    return result


def preload_queue() -> Queue:
    result = Queue(ModelId("w"), POLICY.priority_class)
    result.add(Waiter(RequestId("p"), WaiterKind.PRELOAD, 1, ModelId("w"), (ModelId("w"),), 1_000_000, 0.0))
    return result


def resident(**more: object) -> Resident:
    """Busy, and nothing waits for it. One request does not outweigh those that will come for it."""
    one = Resident(
        slot=SlotId("s"),
        model=ModelId("r"),
        gives_mib={},
        leaves_to=Tier.COLD,
        priority=1,
        last_used=0.0,
        is_busy=True,
        is_fixed=False,
        rate=2.0,
        reload_s=8.0,
        drain_s=1.0,
    )
    return replace(one, **more)  # type: ignore[arg-type]


def is_taken(cold: Queue, one: Resident, now: float) -> bool:
    return POLICY.takes_at(cold, one, now) <= now


# --- classes --------------------------------------------------------------------------------------------------------


def test_priorities_beyond_the_named_ones_count_as_the_nearest() -> None:
    high, low = POLICY.priority_class(0), POLICY.priority_class(2)
    assert POLICY.priority_class(-5) is high and POLICY.priority_class(99) is low
    assert [POLICY.priority_class(priority).deadline_s for priority in (0, 1, 2)] == [5.0, 120.0, 480.0]


# --- order within a queue -------------------------------------------------------------------------------------------


def in_turn(*waiters: tuple[Waiter, float]) -> list[int]:
    """Their sequence numbers, in the order in which they go; each with what its tenant was served."""
    return [one.sequence for one, served_s in sorted(waiters, key=lambda both: POLICY.turn(*both, 1_000.0))]


def test_requests_go_by_age_whatever_their_tenants_were_served() -> None:
    rich, poor = waiter(2, 100.0), waiter(1, 100.1)
    assert in_turn((rich, 99.0), (poor, 0.0)) == [2, 1]


def test_tenants_that_flood_a_model_take_turns_by_what_they_were_served_and_then_by_arrival() -> None:
    rich, poor, later = waiter(1, 1.0), waiter(2, ALIKE_S), waiter(3, 1.0)
    rich.is_flood = poor.is_flood = later.is_flood = True
    assert in_turn((rich, 5.0), (later, 1.0), (poor, 1.0)) == [2, 3, 1]
    other = waiter(4, ALIKE_S - 0.1)
    assert in_turn((rich, 0.0), (other, 9.0)) == [4, 1], "one that does not flood is not pushed back"


@pytest.mark.parametrize("classes", [1, 2])
def test_a_class_counts_as_so_much_age(classes: int) -> None:
    low, urgent = waiter(1, 0.0, priority=classes), waiter(2, classes * LIFT_S - ALIKE_S, priority=0)
    assert in_turn((low, 0.0), (urgent, 9.0)) == [2, 1]
    urgent = waiter(2, classes * LIFT_S + ALIKE_S, priority=0)
    assert in_turn((low, 9.0), (urgent, 0.0)) == [1, 2]


def test_a_request_that_counts_as_younger_goes_by_that() -> None:
    fast, other = waiter(1, 100.0), waiter(2, 130.0)
    fast.aged_from = 160.0
    assert in_turn((fast, 0.0), (other, 0.0)) == [2, 1]


@given(st.integers(-2, 4), st.integers(-2, 4), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e3))
def test_no_request_is_overtaken_for_ever(
    mine: int, other: int, arrived: float, later_s: float, served_s: float
) -> None:
    first = waiter(1, arrived, mine)
    second = waiter(2, arrived + max(0, mine - other) * LIFT_S + ALIKE_S + 0.001 + later_s, other)
    assert POLICY.turn(first, served_s, second.arrived) < POLICY.turn(second, 0.0, second.arrived)


# --- order between models -------------------------------------------------------------------------------------------


def test_cold_models_go_by_the_age_of_their_oldest_request_however_many_wait() -> None:
    oldest, many, dear = queue(9.0), queue(10.0, 10.0, 10.0), queue(11.0, swap_s=99.0)
    urgent, low = queue(10.0 + LIFT_S - 0.5, priority=0), queue(0.0, priority=2)
    ranked = sorted([many, low, dear, urgent, oldest], key=lambda some: POLICY.rank(some, 100.0))
    assert ranked == [oldest, urgent, many, dear, low]


def test_models_that_are_only_to_be_preloaded_come_last() -> None:
    assert POLICY.rank(queue(999.0, priority=2), 1_000.0) < POLICY.rank(preload_queue(), 1_000.0)


# --- switching ------------------------------------------------------------------------------------------------------


def test_an_idle_resident_gives_way_at_once() -> None:
    wanted = resident(is_busy=False, last_used=99.9, rate=99.0, priority=0, owes=9, queue=queue(0.0))
    assert POLICY.takes_at(queue(100.0, priority=2), wanted, 100.0) == 100.0


def test_a_busy_resident_is_closed_when_it_would_be_away_for_its_share_of_the_time() -> None:
    assert POLICY.takes_at(queue(50.0), resident(), 60.0) == 50.0 + DUE_S
    assert not is_taken(queue(50.0), resident(), 49.9 + DUE_S) and is_taken(queue(50.0), resident(), 50.0 + DUE_S)


@pytest.mark.parametrize("longer", [{"drain_s": 2.0}, {"reload_s": 9.0}])
def test_a_second_more_of_being_away_is_ten_seconds_more_of_waiting(longer: dict[str, float]) -> None:
    assert POLICY.takes_at(queue(50.0), resident(**longer), 60.0) == 60.0 + DUE_S
    assert POLICY.takes_at(queue(50.0, swap_s=11.0), resident(), 60.0) == 60.0 + DUE_S


def test_the_share_of_the_time_is_that_of_the_limits() -> None:
    often = BoundedFirstCome(Limits(away_share=0.5, deadlines_s=(1.0, 1.0, 1.0)), ByMemory())
    assert often.takes_at(queue(50.0, swap_s=3.0, priority=2), resident(), 60.0) == 530.0, "its queue has its deadline"
    cold = Queue(ModelId("m"), often.priority_class)
    cold.add(waiter(1, 50.0))
    cold.swap_s, cold.service_s = 10.0, 1.0
    assert often.takes_at(cold, resident(), 60.0) == 50.0 + 2 * AWAY_S


def test_no_busy_resident_is_closed_before_the_deadline_of_the_class() -> None:
    quick = resident(drain_s=0.0, reload_s=0.0)
    for priority, deadline_s in ((1, 120.0), (2, 480.0)):
        cold = queue(50.0, priority=priority, swap_s=0.0)
        assert POLICY.takes_at(cold, quick, 60.0) == 50.0 + deadline_s


def test_a_queue_of_a_higher_class_than_the_last_request_closes_a_resident_at_its_deadline() -> None:
    own = queue(0.0, priority=1)
    for priority, above in ((1, 5.0), (0, DUE_S)):
        one = resident(priority=priority, queue=None)
        assert POLICY.takes_at(queue(50.0, priority=0), one, 51.0) == 50.0 + above
    assert POLICY.takes_at(queue(50.0, priority=0), resident(queue=own), 51.0) == 55.0, "whatever less urgent waits"


def test_a_resident_is_as_urgent_as_its_most_urgent_waiter() -> None:
    """Otherwise models with requests of several classes would close each other after every request under overload."""
    now, one = 100 * DUE_S, resident(priority=1, owes=3, service_s=1.0, queue=queue(60.0, priority=0))
    assert POLICY.takes_at(queue(50.0, priority=0), one, 70.0) == 50.0 + DUE_S
    assert POLICY.takes_at(queue(50.0, priority=0), one, now) == now + 3.0, "those that waited have their turn first"


def test_a_preload_never_closes_a_busy_resident() -> None:
    assert POLICY.takes_at(preload_queue(), resident(), 1e6) == inf
    assert POLICY.takes_at(preload_queue(), resident(queue=queue(9.0)), 1e6) == inf


# --- those that wait against those that would have to ---------------------------------------------------------------


def test_a_busy_resident_is_closed_when_those_that_wait_outweigh_those_that_will_come_meanwhile() -> None:
    """Of two a second for 20 seconds, each waits 10 seconds on average: 400 in all."""
    assert POLICY.takes_at(queue(50.0, 50.0, 50.0), resident(), 60.0) == pytest.approx(50.0 + 400.0 / 3)
    assert POLICY.takes_at(queue(50.0, 60.0, 70.0), resident(), 70.0) == pytest.approx(60.0 + 400.0 / 3)


def test_many_that_wait_close_no_busy_resident_before_the_deadline() -> None:
    assert POLICY.takes_at(queue(*[50.0] * 100), resident(), 60.0) == 50.0 + 120.0


def test_those_that_wait_for_the_resident_weigh_as_much() -> None:
    """Five that wait for 20 seconds weigh 100 seconds more."""
    rare = resident(rate=1.0, queue=queue(*[55.0] * 5))
    assert POLICY.takes_at(queue(50.0, 50.0), rare, 60.0) == 50.0 + (200.0 + 100.0) / 2


def test_a_resident_that_is_used_half_of_the_time_makes_others_wait_for_twice_as_long_until_it_has_caught_up() -> None:
    half = resident(rate=1.0, service_s=2.0, at_once=4)
    assert POLICY.takes_at(queue(50.0, 50.0, 50.0), half, 60.0) == pytest.approx(50.0 + 2 * 200.0 / 3)


def test_a_resident_that_cannot_keep_up_is_closed_at_the_latest_time_however_many_wait() -> None:
    full = resident(rate=2.0, service_s=2.0, at_once=1, queue=queue(*[0.0] * 99))
    assert POLICY.takes_at(queue(*[50.0] * 9), full, 60.0) == 50.0 + DUE_S


# --- what waits for the resident too ----------------------------------------------------------------------------------


def test_requests_that_waited_when_the_resident_came_have_their_turn_first() -> None:
    """However long the cold queue has been due. It is asked for again when they should have been served."""
    now, own = 100 * DUE_S, queue(500.0)
    assert is_taken(queue(0.0), resident(owes=0, queue=own), now)
    assert POLICY.takes_at(queue(0.0), resident(owes=1, queue=own, service_s=1.0), now) == now + 1.0


def test_nothing_is_closed_for_a_queue_that_is_not_due_though_requests_have_just_come() -> None:
    assert POLICY.takes_at(queue(0.0), resident(queue=queue(DUE_S - 2.0)), DUE_S - 2.0) == DUE_S


def test_a_queue_that_is_due_is_asked_for_again_after_the_turns_owed_or_a_moment() -> None:
    now, own = DUE_S + 10.0, queue(1.0)
    owing = resident(owes=12, queue=own, service_s=2.0, at_once=4)
    assert POLICY.takes_at(queue(0.0), owing, now) == now + 6.0
    assert now < POLICY.takes_at(queue(0.0), replace(owing, service_s=0.0), now) < now + 1.0


# --- a tenant that floods -------------------------------------------------------------------------------------------


def test_a_tenant_that_floods_the_resident_delays_others_by_the_time_in_which_the_resident_serves_nothing() -> None:
    now, floods = 500.0, resident(queue=flooded(400.0, 500.0), drain_s=7.0)
    gone_s = 10.0 + 1.0 + 8.0
    assert is_taken(queue(now - gone_s, tenant="other"), floods, now)
    assert not is_taken(queue(now - gone_s + 0.1, tenant="other"), floods, now)


def test_a_flood_that_waited_when_the_resident_came_has_no_turn_before_others() -> None:
    cold = queue(500.0 - AWAY_S, tenant="other")
    assert is_taken(cold, resident(owes=300, queue=flooded(400.0, 500.0)), 500.0)


def test_a_tenant_floods_when_its_next_request_counts_as_younger_by_more_than_the_time_away() -> None:
    now, cold = 500.0, queue(400.0, tenant="other")
    for younger_s, taken in ((AWAY_S, False), (AWAY_S + 0.1, True)):
        assert is_taken(cold, resident(queue=flooded(now - younger_s, now)), now) is taken


def test_a_tenant_cannot_use_its_own_flood_to_close_a_resident_sooner() -> None:
    now = 500.0
    assert not is_taken(queue(now - AWAY_S, tenant="flood"), resident(queue=flooded(400.0, now)), now)


def test_a_flood_of_a_higher_class_delays_others_by_a_lift_for_each_step() -> None:
    """As in the queue of one model, where a class counts as so much age."""
    floods = resident(priority=0, queue=flooded(400.0, 500.0, priority=0))
    for priority, step_s in ((0, 0.0), (1, LIFT_S), (2, 2 * LIFT_S)):
        cold = queue(450.0, priority=priority, tenant="other")
        assert POLICY.takes_at(cold, floods, 500.0) == 450.0 + step_s + AWAY_S - 1.0


def test_a_flood_delays_others_no_longer_than_any_other_traffic() -> None:
    floods = resident(priority=-9, queue=flooded(400.0, 500.0, priority=-9))
    assert POLICY.takes_at(queue(450.0, tenant="other"), floods, 500.0) == 450.0 + DUE_S


# --- worth ----------------------------------------------------------------------------------------------------------


@given(st.floats(0.0, 1e6), st.floats(0.001, 1e4), st.floats(0, 10), st.floats(0, 100))
def test_of_idle_residents_the_one_used_longest_ago_is_the_least_loss(
    used: float, later_s: float, rate: float, reload_s: float
) -> None:
    now = used + later_s + 1.0
    old = resident(is_busy=False, last_used=used, rate=rate, reload_s=reload_s)
    assert POLICY.loss(old, now) < POLICY.loss(resident(is_busy=False, last_used=used + later_s), now)


def test_losing_a_resident_that_was_used_just_now_costs_no_more_when_the_clock_was_set_back() -> None:
    assert POLICY.loss(resident(is_busy=False, last_used=50.0), 20.0) == 1.0


def test_losing_a_busy_resident_costs_each_that_waits_its_drain_and_its_reload() -> None:
    quiet = resident(rate=0.0)
    assert POLICY.loss(quiet, 0.0) == 9.0
    assert POLICY.loss(replace(quiet, queue=queue(0.0, 0.0)), 0.0) == 27.0
    assert POLICY.loss(replace(quiet, drain_s=3.0, reload_s=7.0), 0.0) == 10.0


def test_requests_that_will_come_while_a_busy_resident_is_away_wait_half_of_that_time() -> None:
    assert POLICY.loss(resident(rate=2.0), 0.0) == 9.0 * (1 + 2.0 * 9.0 / 2)


def test_the_model_that_was_not_used_for_longest_leaves() -> None:
    world = World([model("often", 4_000), model("seldom", 4_000), model("new", 4_000)])
    ready(world, "often", "seldom")
    for number in range(9):
        world.arrive(f"r{number}", "often", takes_s=0.0)
    world.run(5.0)
    assert [one.model for one in evicted(world)] == ["seldom"]
    world.arrive("s", "seldom", takes_s=0.0)
    world.run(5.0)
    assert [one.model for one in evicted(world)] == ["often"], "however often it was used before"


def evicted(world: World) -> tuple[Resident, ...]:
    plan = world.scheduler.view.explanation(world.asking("?", "new")).plan
    assert isinstance(plan, Swap)
    return plan.evict
