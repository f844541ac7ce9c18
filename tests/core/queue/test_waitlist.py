"""Queues and their sums: whatever comes and goes, they say what a count from scratch would say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from greenroom.core.events import Limits
from greenroom.core.model import ModelId, MoveKind, RequestId, TenantId
from greenroom.core.policy.default import BoundedFirstCome
from greenroom.core.policy.swapper import ByMemory
from greenroom.core.queue.index import FLOWS_FEW, REFRESHED_AT_ONCE_MAX, REFRESHED_BY_FIRST, TURNS_FRESH_S
from greenroom.core.queue.waiter import Accounts
from greenroom.core.queue.waitlist import (
    FLOODS_FROM,
    NUMBERS_PER_LIST,
    PriorityClass,
    Queue,
    Waiter,
    WaiterKind,
    Waitlist,
)

M, N = ModelId("m"), ModelId("n")
POLICY = BoundedFirstCome(Limits(lift_s=60.0, deadlines_s=(5.0, 120.0, 480.0)), ByMemory())


def waiter(
    sequence: int,
    *,
    arrived: float = 0.0,
    priority: int = 1,
    tenant: str = "",
    kind: WaiterKind = WaiterKind.REQUEST,
    models: tuple[ModelId, ...] = (M,),
) -> Waiter:
    name = RequestId(f"w{sequence}")
    return Waiter(name, kind, sequence, models[0], models, priority, arrived, TenantId(tenant))


def charged(usual_s: float, *tenants: str) -> Accounts:
    """Accounts in which an answer of these tenants usually uses so much; of the one without a name if none is named."""
    accounts = Accounts()
    for tenant in tenants or ("",):
        accounts.settle(TenantId(tenant), usual_s, 0.0)
    return accounts


IDLE = Accounts()


def queue_of(*waiters: Waiter) -> Queue:
    queue = Queue(M, POLICY.priority_class)
    for one in waiters:
        queue.add(one)
    return queue


def flooded_by(*waiters: Waiter) -> Queue:
    """These, and so many more of the same tenant that it floods the model."""
    more = [waiter(900 + number, arrived=900.0) for number in range(FLOODS_FROM)]
    return queue_of(*waiters, *more)


# --- one queue ------------------------------------------------------------------------------------------------------


def test_a_flow_keeps_the_order_of_arrival_even_for_one_that_comes_back() -> None:
    first, second, third = (waiter(number) for number in range(3))
    queue = queue_of(first, second, third)
    queue.remove(first, IDLE, None)
    assert queue.heads() == [second]
    queue.add(first)
    assert list(queue) == [first, second, third] and queue.heads() == [first]


def test_every_kind_priority_and_tenant_has_a_flow_of_its_own() -> None:
    others = [waiter(1, priority=0), waiter(2, tenant="t"), waiter(3, kind=WaiterKind.OP)]
    queue = queue_of(waiter(0), *others)
    assert queue.heads() == [queue.heads()[0], *others]


def test_a_served_waiter_that_was_no_head_renews_the_age_of_its_flow() -> None:
    """With many flows the times of heads are kept, and must follow."""
    many = [waiter(number, tenant=f"t{number}") for number in range(FLOWS_FEW + 4)]
    alone, behind, *others = (waiter(50 + number, priority=2) for number in range(2 * len(many)))
    queue = queue_of(*many, alone, behind, *others)
    queue.remove(many[0], IDLE, None)
    assert queue.lift_at == alone.aged_from + POLICY.priority_class(1).lift_s
    queue.remove(behind, charged(100.0), 100.0)
    # The others of priority 1 still age from 0.
    assert (queue.lift_at, alone.aged_from) == (POLICY.priority_class(1).lift_s, 100.0)
    for one in many[1:]:
        queue.remove(one, IDLE, None)
    assert queue.aged_from == 100.0


def test_operations_that_want_the_model_asleep_are_queued_apart() -> None:
    op = waiter(1, kind=WaiterKind.OP)
    op.wants = MoveKind.PREPARE
    queue = queue_of(op)
    assert (queue.waiting, queue.heads(), queue.asking()) == (1, [op], [op])
    assert queue.first(turn, 0.0) is None and queue.deadline_at == inf
    queue.add(waiter(2))
    assert list(queue) == [op, queue.first(turn, 0.0)]
    queue.remove(op, IDLE, None)
    assert queue.waiting == 1 and queue.asking() == []


def test_operations_and_preloads_are_listed_as_asking_for_the_model() -> None:
    request, op, preload = waiter(1), waiter(2, kind=WaiterKind.OP), waiter(3, kind=WaiterKind.PRELOAD)
    queue = queue_of(request, op, preload)
    assert queue.asking() == [op, preload]
    queue.remove(op, IDLE, None)
    queue.remove(preload, IDLE, None)
    assert queue.asking() == [] and list(queue) == [request]


def turn(one: Waiter) -> tuple[float, ...]:
    return (one.priority, one.sequence)


def test_flows_that_have_ended_are_passed_over_within_the_same_moment() -> None:
    waiters = [waiter(number, tenant=f"t{number}") for number in range(3 * FLOWS_FEW)]
    queue = queue_of(*waiters)
    for one in waiters:
        assert queue.first(turn, 0.0) is one
        queue.remove(one, IDLE, 0.0)
    assert queue.first(turn, 0.0) is None


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2 * FLOWS_FEW)), min_size=1, max_size=60),
    st.lists(st.tuples(st.sampled_from(["first", "any", "come"]), st.integers(0, 99), st.floats(0, 2.0)), max_size=60),
)
def test_the_first_is_whose_turn_it_is_however_many_flows_there_are(
    people: list[tuple[int, int]], steps: list[tuple[str, int, float]]
) -> None:
    waiters = [
        waiter(number, priority=priority, tenant=f"t{tenant}") for number, (priority, tenant) in enumerate(people)
    ]
    queue, now, numbers = queue_of(*waiters), 0.0, count(len(people))
    for what, number, passes_s in steps:
        now += passes_s
        assert queue.first(turn, now) is min(waiters, key=turn, default=None)
        if what == "come" or not waiters:
            waiters.append(waiter(next(numbers), tenant=f"new{number}"))
            queue.add(waiters[-1])
        else:
            gone = min(waiters, key=turn) if what == "first" else waiters[number % len(waiters)]
            waiters.remove(gone)
            queue.remove(gone, IDLE, now)
    assert queue.first(turn, now) is min(waiters, key=turn, default=None)


def test_a_preload_has_neither_deadline_nor_age() -> None:
    queue = queue_of(waiter(0, kind=WaiterKind.PRELOAD, priority=1_000_000))
    assert queue.waiting == 1
    assert (queue.deadline_at, queue.oldest, queue.lift_at, queue.aged_from) == (inf, inf, inf, inf)


def test_the_first_deadline_is_not_always_that_of_the_first_to_come() -> None:
    queue = queue_of(waiter(0, arrived=0.0, priority=2), waiter(1, arrived=50.0, priority=0))
    assert (queue.oldest, queue.deadline_at) == (0.0, 55.0)
    queue.remove(queue.heads()[1], IDLE, None)
    assert queue.deadline_at == 480.0


def test_a_question_about_one_more_leaves_the_queue_as_it_is() -> None:
    queue, more = queue_of(waiter(0, arrived=10.0)), waiter(1, arrived=20.0, priority=0)
    asked = queue.joined_by(more, (2.0, 1.0, 4))
    assert (asked.waiting, asked.deadline_at, asked.lift_at) == (2, 25.0, 20.0)
    assert (asked.oldest, asked.aged_from) == (10.0, 10.0)
    assert (queue.waiting, queue.deadline_at, queue.lift_at) == (1, 130.0, 70.0)


def test_a_question_about_one_more_knows_from_when_the_first_ages() -> None:
    queue = flooded_by(waiter(0, arrived=10.0), waiter(1, arrived=20.0))
    queue.remove(queue.heads()[0], charged(10.0), 50.0)
    assert queue.joined_by(waiter(2, arrived=60.0), (2.0, 1.0, 4)).aged_from == 32.0
    assert queue.joined_by(waiter(2, arrived=30.0, tenant="t"), (2.0, 1.0, 4)).aged_from == 30.0


@pytest.mark.parametrize(
    ("served_at", "usual_s", "aged_from"),
    [
        pytest.param(100.0, 10.0, 22.0, id="a pause after the one before"),
        pytest.param(100.0, 90.0, 100.0, id="from its turn on at the latest"),
        pytest.param(100.0, 2.0, 5.0, id="it asks slowly enough"),
        pytest.param(None, 10.0, 5.0, id="the one before has left without being served"),
    ],
)
def test_a_request_after_one_that_was_served_counts_as_younger_if_its_tenant_asks_too_fast(
    served_at: float | None, usual_s: float, aged_from: float
) -> None:
    first, second = waiter(0, arrived=0.0), waiter(1, arrived=5.0)
    queue = flooded_by(first, second)
    assert (queue.aged_from, queue.lift_at) == (0.0, 60.0)
    queue.remove(first, charged(usual_s), served_at)
    assert (second.aged_from, queue.aged_from, queue.lift_at) == (aged_from, aged_from, aged_from + 60.0)
    assert (queue.oldest, queue.deadline_at) == (5.0, 125.0), "only its age counts less"


def test_the_first_counts_as_younger_at_once_when_one_behind_it_was_served() -> None:
    first, second = waiter(0), waiter(1)
    queue = flooded_by(first, second)
    queue.remove(second, charged(90.0), 100.0)
    assert (first.aged_from, queue.aged_from, queue.lift_at) == (100.0, 100.0, 160.0)


def test_pauses_add_up_over_requests_that_come_together() -> None:
    waiters = [waiter(number, arrived=0.0) for number in range(4)]
    queue = flooded_by(*waiters)
    for number in range(3):
        queue.remove(waiters[number], charged(10.0), 500.0)
    assert waiters[3].aged_from == 66.0


def test_other_tenants_do_not_count_as_younger() -> None:
    first, second, other = waiter(0), waiter(1), waiter(2, tenant="t")
    queue = flooded_by(first, second, other)
    queue.remove(first, charged(10.0), 50.0)
    assert (second.aged_from, other.aged_from, queue.aged_from) == (22.0, 0.0, 0.0)


@pytest.mark.parametrize(("more", "aged_from"), [(FLOODS_FROM - 1, 22.0), (FLOODS_FROM, 33.0)])
def test_a_tenant_may_ask_less_often_the_more_tenants_flood_the_model(more: int, aged_from: float) -> None:
    """One that floods has at least so many requests waiting."""
    waiters = [waiter(number) for number in range(FLOODS_FROM + 1)]
    numbers = iter(range(50, 99))
    for tenant, requests in (("t", FLOODS_FROM), ("u", more)):
        waiters += [waiter(next(numbers), tenant=tenant) for _ in range(requests)]
    queue = queue_of(*waiters)
    queue.remove(waiters[0], charged(10.0), 500.0)
    assert waiters[1].aged_from == pytest.approx(aged_from)


@pytest.mark.parametrize(("own", "tenants"), [(FLOODS_FROM, 2), (FLOODS_FROM, 7), (FLOODS_FROM, 2 * FLOODS_FROM)])
def test_a_tenant_that_has_no_more_than_half_of_what_waits_is_one_of_a_crowd(own: int, tenants: int) -> None:
    waiters = [waiter(number) for number in range(own)]
    others = [waiter(50 + number, tenant=f"t{number % tenants}") for number in range(max(own, tenants))]
    queue = queue_of(*waiters, *others)
    queue.remove(waiters[0], charged(10.0), 500.0)
    assert waiters[1].aged_from == 0.0 and not waiters[1].is_flood


def test_few_requests_are_no_flood_though_they_are_all_that_waits() -> None:
    waiters = [waiter(number) for number in range(FLOODS_FROM - 1)]
    queue_of(*waiters).remove(waiters[0], charged(10.0), 500.0)
    assert waiters[1].aged_from == 0.0 and not waiters[1].is_flood


def test_a_tenant_no_longer_floods_when_few_of_its_requests_are_left() -> None:
    own = [waiter(number) for number in range(FLOODS_FROM + 1)]
    others = [
        waiter(50 + 10 * tenant + number, tenant=f"t{tenant}") for tenant in (0, 1) for number in range(FLOODS_FROM)
    ]
    queue = queue_of(*own, *others)
    queue.remove(others[0], IDLE, None)
    queue.remove(own[0], charged(10.0), 500.0)
    assert own[1].aged_from == pytest.approx(22.0), "only one other"


def test_those_ahead_are_those_before_it_in_its_flow_and_as_many_in_each_other_that_is_not_less_urgent() -> None:
    own = [waiter(number) for number in range(4)]
    other = [waiter(number, tenant="t") for number in range(4, 6)]
    low = [waiter(number, priority=2) for number in range(6, 9)]
    queue = queue_of(*own, *other, *low)
    assert [queue.ahead_of(one) for one in own] == [1, 3, 4, 5]
    assert queue.ahead_of(waiter(99, tenant="new")) == 2, "the first of each lane"
    assert queue.ahead_of(low[0]) == 2


def test_operators_and_preloads_are_not_ahead_because_no_answer_is_for_them() -> None:
    own = waiter(3)
    queue = queue_of(waiter(1, kind=WaiterKind.OP), waiter(2, kind=WaiterKind.PRELOAD), own)
    assert queue.ahead_of(own) == 0


# --- all of them ----------------------------------------------------------------------------------------------------


def test_queues_come_and_go_with_their_waiters() -> None:
    waitlist = Waitlist(POLICY.priority_class)
    assert not waitlist and waitlist.of(M) == [] and waitlist.count(M) == 0
    waitlist.add(waiter(1))
    assert waitlist and "w1" in waitlist and waitlist.count(M) == 1 and waitlist["w1"] is waitlist.get("w1")
    assert waitlist.remove("w1", IDLE) is not None and waitlist.remove("w1", IDLE) is None
    assert not waitlist.queues and not waitlist and waitlist.get("w1") is None


def test_the_same_waiter_cannot_be_added_twice() -> None:
    waitlist = Waitlist(POLICY.priority_class)
    waitlist.add(waiter(1))
    with pytest.raises(AssertionError, match="w1 waits already"):
        waitlist.add(waiter(1))


def test_positions_are_by_priority_and_arrival_and_count_callers_only() -> None:
    waitlist = Waitlist(POLICY.priority_class)
    op, normal, urgent = waiter(1, kind=WaiterKind.OP), waiter(2), waiter(3, priority=0)
    for one in (op, normal, urgent):
        waitlist.add(one)
    assert waitlist.depth == 2
    assert (waitlist.position(urgent), waitlist.position(normal), waitlist.position(waiter(9))) == (1, 2, 3)
    waitlist.remove("w3", IDLE)
    assert waitlist.depth == 1 and waitlist.position(normal) == 1


def test_positions_go_on_from_one_list_of_callers_to_the_next() -> None:
    waitlist = Waitlist(POLICY.priority_class)
    numbers = (3, NUMBERS_PER_LIST - 1, NUMBERS_PER_LIST, 5 * NUMBERS_PER_LIST)
    callers = [
        waiter(number, priority=priority) for priority in (0, 1) for number in (n + 2 * priority for n in numbers)
    ]
    for one in reversed(callers):
        waitlist.add(one)
    assert [waitlist.position(one) for one in callers] == [1, 2, 3, 4, 5, 6, 7, 8]
    waitlist.remove(callers[2].id, IDLE)
    assert [waitlist.position(one) for one in callers[3:]] == [3, 4, 5, 6, 7]


def test_a_waiter_for_several_models_is_listed_with_choice() -> None:
    waitlist = Waitlist(POLICY.priority_class)
    waitlist.add(waiter(1, models=(M, N)))
    waitlist.add(waiter(2))
    assert list(waitlist.with_choice) == ["w1"] and N not in waitlist.queues
    waitlist.remove("w1", IDLE)
    assert not waitlist.with_choice


def test_a_changed_priority_class_applies_to_waiters_already_queued() -> None:
    waitlist = Waitlist(POLICY.priority_class)
    for number in range(4):
        waitlist.add(waiter(number, arrived=10.0, models=(M, N) if number == 3 else (M,)))
    waitlist.reclassify(lambda priority: PriorityClass(1.0, 3.0))
    queue = waitlist.queues[M]
    assert (queue.deadline_at, queue.lift_at) == (11.0, 13.0)
    assert [one.id for one in waitlist] == ["w0", "w1", "w2", "w3"] and list(waitlist.with_choice) == ["w3"]
    assert waitlist.depth == 4 and waitlist.position(waitlist["w3"]) == 4


def test_another_standing_does_not_make_a_flow_older_than_it_is() -> None:
    waitlist = Waitlist(POLICY.priority_class)
    for number in range(FLOODS_FROM):
        waitlist.add(waiter(number, arrived=float(number)))
    waitlist.remove("w0", charged(10.0), served_at=100.0)
    lift_at = waitlist.queues[M].lift_at
    waitlist.reclassify(POLICY.priority_class)
    assert waitlist.queues[M].lift_at == lift_at == 82.0


# --- from scratch ---------------------------------------------------------------------------------------------------

people: st.SearchStrategy[dict[str, object]] = st.builds(
    dict,
    arrived=st.integers(0, 300).map(float),
    priority=st.integers(-1, 3),
    tenant=st.sampled_from(["", "t", "u"]),
    kind=st.sampled_from([WaiterKind.REQUEST, WaiterKind.REQUEST, WaiterKind.OP, WaiterKind.PRELOAD]),
    models=st.sampled_from([(M,), (N,), (M, N)]),
)


def agree(queue: Queue, waiters: Sequence[Waiter]) -> None:
    """Its sums are those of a count from scratch."""
    callers = [one for one in waiters if one.kind is not WaiterKind.PRELOAD]
    stands = {one.id: POLICY.priority_class(one.priority) for one in callers}
    assert queue.waiting == len(waiters) and list(queue) == sorted(waiters, key=lambda one: one.sequence)
    assert queue.oldest == min((one.arrived for one in callers), default=inf)
    assert queue.deadline_at == min((one.arrived + stands[one.id].deadline_s for one in callers), default=inf)
    # A flow ages as its first waiter does, which may be younger than its next: it was renewed when one was served.
    firsts = {(one.kind, one.priority, one.tenant): one for one in sorted(callers, key=lambda one: -one.sequence)}
    assert queue.aged_from == min((one.aged_from for one in firsts.values()), default=inf)
    lifts = (one.aged_from + one.priority * stands[one.id].lift_s for one in firsts.values())
    assert queue.lift_at == min(lifts, default=inf)


@settings(deadline=None)
@example([{"arrived": 0.0, "priority": 0}] * 3, [(0, 400.0, 15.0)])
@given(
    st.lists(people, max_size=30),
    st.lists(
        st.tuples(st.integers(0, 29), st.none() | st.just(400.0), st.sampled_from([0.0, 15.0, 900.0])), max_size=25
    ),
)
def test_whatever_comes_and_goes_the_sums_are_those_of_a_count_from_scratch(
    coming: list[dict[str, object]], going: list[tuple[int, float | None, float]]
) -> None:
    waitlist, there = Waitlist(POLICY.priority_class), {}
    # Times do not go back while people come: a lane's first is its oldest.
    for number, person in enumerate(sorted(coming, key=lambda one: str(one["arrived"]).zfill(8))):
        one = waiter(number, **person)  # type: ignore[arg-type]
        there[one.id] = one
        waitlist.add(one)
    for number, served_at, usual_s in going:
        left = there.pop(RequestId(f"w{number}"), None)
        assert waitlist.remove(f"w{number}", charged(usual_s, "", "t"), served_at) is left
    for model in (M, N):
        here = [one for one in there.values() if one.model == model]
        assert (model in waitlist.queues) == bool(here) and waitlist.count(model) == len(here)
        if here:
            agree(waitlist.queues[model], here)
    callers = sorted(
        (one for one in there.values() if one.kind is WaiterKind.REQUEST), key=lambda one: (one.priority, one.sequence)
    )
    assert [waitlist.position(one) for one in callers] == list(range(1, len(callers) + 1))
    assert set(waitlist.with_choice) == {one.id for one in there.values() if len(one.candidates) > 1}


def test_a_kept_order_notices_tenants_served_meanwhile_and_waiters_gone() -> None:
    served = dict.fromkeys((f"t{number:02}" for number in range(2 * FLOWS_FEW)), 0.0)
    waiters = [waiter(number, tenant=tenant) for number, tenant in enumerate(served)]
    queue = queue_of(*waiters)

    def turn(one: Waiter) -> tuple[float, ...]:
        return (served[one.tenant], float(one.sequence))

    assert queue.first(turn, 0.0) is waiters[0]
    served["t00"] = 5.0
    assert queue.first(turn, 0.0) is waiters[1], "the first was charged since"
    queue.remove(waiters[1], IDLE, None)
    assert queue.first(turn, 0.0) is waiters[2], "the next has left"


@pytest.mark.parametrize("flows", [REFRESHED_AT_ONCE_MAX, 2 * REFRESHED_AT_ONCE_MAX])
def test_a_kept_order_notices_lifted_tenants_after_a_while(flows: int) -> None:
    lifted: set[str] = set()
    waiters = [waiter(number, tenant=f"t{number:03}") for number in range(flows)]
    queue = queue_of(*waiters)

    def turn(one: Waiter) -> tuple[float, ...]:
        return (0.0 if one.tenant in lifted else 1.0, float(one.sequence))

    assert queue.first(turn, 0.0) is waiters[0]
    lifted.add(waiters[-1].tenant)
    assert queue.first(turn, 0.0) is waiters[0], "it is not looked at again at once"
    turns = 1 if flows <= REFRESHED_AT_ONCE_MAX else flows // REFRESHED_BY_FIRST
    seen = [queue.first(turn, TURNS_FRESH_S) for _ in range(turns)]
    assert seen[-1] is waiters[-1]


def test_the_times_of_many_flows_are_those_of_their_firsts_however_often_these_change() -> None:
    preload = waiter(0, kind=WaiterKind.PRELOAD, priority=1_000_000)
    oldest = waiter(1, arrived=1.0, tenant="patient")
    waiters = [waiter(number, arrived=float(number), tenant=f"t{number % 20}") for number in range(2, 400)]
    queue = queue_of(preload, oldest, *waiters)
    for gone in waiters[:350]:
        queue.remove(gone, IDLE, None)
        assert queue.oldest == 1.0
    queue.remove(oldest, IDLE, None)
    left = waiters[350].arrived
    assert (queue.oldest, queue.deadline_at, queue.lift_at) == (left, left + 120.0, left + 60.0)
