"""Accounts of tenants: no credit for idleness, weights, settled estimates, and no tenant is remembered for ever."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.events import Limits
from greenroom.core.model import TenantId
from greenroom.core.policy.default import ALIKE_S
from greenroom.core.queue.waiter import CLEARLY_MORE, SWEEP_MIN, WEIGHT_MIN, Accounts
from tests.core.queue.test_order import ready
from tests.core.world import Fate, World, model

A, B, C = (TenantId(name) for name in "abc")


def served(accounts: Accounts, tenant: TenantId, slot_s: float) -> None:
    """One request from arrival to end, whose estimate was right."""
    accounts.join(tenant)
    accounts.serve(tenant, slot_s)
    accounts.leave(tenant)


def test_a_tenant_is_charged_what_it_used() -> None:
    accounts = Accounts()
    accounts.join(A)
    accounts.serve(A, 3.0)
    assert accounts.served_s(A) == 3.0
    accounts.charge(A, 1.5)
    assert accounts.served_s(A) == 4.5


def test_an_estimate_that_was_too_high_is_given_back() -> None:
    accounts = Accounts()
    accounts.join(A)
    accounts.serve(A, 10.0)
    accounts.charge(A, 2.0 - 10.0)
    assert accounts.served_s(A) == 2.0


def test_a_tenant_with_twice_the_weight_is_charged_half() -> None:
    accounts = Accounts()
    accounts.weights = {A: 2.0}
    for tenant in (A, B):
        accounts.join(tenant)
        accounts.serve(tenant, 6.0)
    assert (accounts.served_s(A), accounts.served_s(B)) == (3.0, 6.0)


def test_a_weight_of_nothing_is_a_very_small_one() -> None:
    accounts = Accounts()
    accounts.weights = {A: 0.0}
    accounts.join(A)
    accounts.serve(A, 1.0)
    assert accounts.served_s(A) == pytest.approx(1.0 / WEIGHT_MIN)


def test_a_tenant_back_from_idle_starts_where_the_others_are() -> None:
    accounts = Accounts()
    served(accounts, A, 1.0)
    for _ in range(10):
        served(accounts, B, 5.0)
    accounts.join(A)
    assert accounts.served_s(A) == accounts.level_s == 45.0, "where b stood when it was last served"
    accounts.join(C)
    assert accounts.served_s(C) == 45.0, "and so does a newcomer"


def test_a_tenant_back_before_the_others_caught_up_still_owes_the_rest() -> None:
    accounts = Accounts()
    served(accounts, A, 50.0)
    accounts.join(B)
    accounts.serve(B, 1.0)
    accounts.join(A)
    assert accounts.served_s(A) == 50.0 > accounts.served_s(B)


def test_a_waiting_tenant_keeps_its_account_while_others_are_served() -> None:
    """It waits for a model that is not there; others are served by one that is. It gains on them all the time."""
    accounts = Accounts()
    accounts.join(A)
    for _ in range(5):
        served(accounts, B, 4.0)
    accounts.join(C)
    assert accounts.served_s(A) == 0.0 < accounts.served_s(C) == 16.0


def test_a_second_request_of_an_active_tenant_changes_nothing() -> None:
    accounts = Accounts()
    accounts.join(A)
    served(accounts, B, 9.0)
    served(accounts, B, 9.0)
    accounts.join(A)
    assert accounts.served_s(A) == 0.0
    accounts.leave(A)
    assert accounts.served_s(A) == 0.0, "it is still there"


def test_the_level_never_falls() -> None:
    accounts = Accounts()
    served(accounts, A, 8.0)
    served(accounts, A, 8.0)
    accounts.join(B)
    accounts.join(A)
    level_s = accounts.level_s
    accounts.charge(A, -16.0)
    accounts.serve(A, 1.0)
    assert accounts.level_s == level_s == 8.0


def test_an_idle_account_is_forgotten_when_the_others_have_passed_it() -> None:
    accounts = Accounts()
    served(accounts, A, 10.0)
    assert len(accounts) == 1
    accounts.join(B)
    accounts.serve(B, 20.0)
    accounts.serve(B, 20.0)
    accounts.leave(B)
    accounts.sweep()
    assert len(accounts) == 1, "a stood at 10 and b was served at 20"
    assert accounts.served_s(A) == accounts.level_s == 20.0


def test_an_account_that_went_on_after_it_was_idle_is_kept_until_it_is_passed_again() -> None:
    accounts = Accounts()
    served(accounts, A, 10.0)
    served(accounts, A, 30.0)
    accounts.join(B)
    accounts.serve(B, 15.0)
    accounts.serve(B, 1.0)
    accounts.leave(B)
    accounts.sweep()
    assert accounts.level_s == 25.0, "b joined where a was served last, at 10"
    assert len(accounts) == 2 and accounts.served_s(A) == 40.0
    served(accounts, B, 30.0)
    served(accounts, B, 0.0)
    accounts.sweep()
    assert accounts.level_s == 56.0 and accounts.served_s(A) == 56.0 and len(accounts) == 0


def test_an_account_is_not_forgotten_while_its_tenant_is_active() -> None:
    accounts = Accounts()
    served(accounts, A, 1.0)
    accounts.join(A)
    for _ in range(3):
        served(accounts, B, 5.0)
    assert accounts.served_s(A) == 1.0


def test_tenants_that_come_once_are_not_remembered_for_ever() -> None:
    accounts = Accounts(idle_max=50)
    for number in range(1_000):
        served(accounts, TenantId(f"once-{number}"), 1.0 + number % 7)
        assert len(accounts) <= 2 * 50 + SWEEP_MIN
    assert accounts.served_s(A) == accounts.level_s > 0.0


@given(
    st.lists(
        st.tuples(st.sampled_from([A, B, C]), st.sampled_from(["join", "serve", "settle", "leave"]), st.floats(0, 9)),
        max_size=80,
    )
)
def test_whatever_happens_idle_tenants_have_no_credit_and_are_forgotten_when_passed(
    steps: list[tuple[TenantId, str, float]],
) -> None:
    accounts, active = Accounts(), dict.fromkeys((A, B, C), 0)
    for tenant, what, slot_s in steps:
        level_s = accounts.level_s
        if what == "join":
            accounts.join(tenant)
            if not active[tenant]:
                assert accounts.served_s(tenant) >= level_s, "no credit for idleness"
            active[tenant] += 1
        elif active[tenant] and what == "serve":
            accounts.serve(tenant, slot_s)
        elif active[tenant] and what == "settle":
            accounts.charge(tenant, -slot_s)
        elif active[tenant]:
            accounts.leave(tenant)
            active[tenant] -= 1
        assert accounts.level_s >= level_s
    for tenant in (A, B, C):
        for _ in range(active[tenant]):
            accounts.leave(tenant)
    accounts.join(A)
    accounts.charge(A, 1e6)
    accounts.serve(A, 0.0)
    accounts.leave(A)
    accounts.sweep()
    assert len(accounts) == 0


def test_a_tenant_alone_may_ask_for_half_of_a_slots_time_and_a_little_more_apart() -> None:
    accounts = Accounts()
    assert accounts.pause_s(A, ()) == 0.0, "nothing is known of its answers"
    accounts.join(A)
    accounts.serve(A, 99.0)
    accounts.settle(A, 10.0, 99.0)
    assert accounts.served_s(A) == 10.0
    assert accounts.pause_s(A, ()) == accounts.pause_s(A, (A,)) == pytest.approx(CLEARLY_MORE * 20.0)


def test_what_an_answer_usually_uses_is_learned() -> None:
    accounts = Accounts()
    accounts.settle(A, 10.0, 0.0)
    accounts.settle(A, 20.0, 0.0)
    assert 10.0 < accounts.pause_s(A, ()) / (2 * CLEARLY_MORE) < 20.0


def test_tenants_that_flood_a_model_share_it_by_weight() -> None:
    accounts = Accounts()
    accounts.weights = {A: 2.0}
    floods = [A, B, C]
    for tenant in floods:
        accounts.settle(tenant, 10.0, 0.0)

    def share(tenant: TenantId, sharing: int) -> float:
        return CLEARLY_MORE * 10.0 / accounts.pause_s(tenant, floods[:sharing])

    assert [share(A, sharing) for sharing in (1, 2, 3)] == pytest.approx([2 / 3, 2 / 3, 2 / 4])
    assert [share(B, sharing) for sharing in (0, 2, 3)] == pytest.approx([1 / 2, 1 / 3, 1 / 4])


def test_what_answers_use_is_forgotten_with_the_account() -> None:
    accounts = Accounts()
    accounts.join(A)
    accounts.settle(A, 10.0, 10.0)
    accounts.leave(A)
    accounts.sweep()
    assert accounts.pause_s(A, ()) == 0.0


# --- in the scheduler -----------------------------------------------------------------------------------------------


def grants_by_tenant(world: World, first: int) -> dict[str, int]:
    """How many of the first so many grants each tenant had."""
    calls = [world.calls_by_id[name] for name in world.granted() if world.calls_by_id[name].tenant][:first]
    return {tenant: sum(call.tenant == tenant for call in calls) for tenant in sorted({call.tenant for call in calls})}


def contended(weights: Mapping[TenantId, float], takes_s: Mapping[str, float]) -> World:
    """One model, one at a time; every tenant has forty requests waiting."""
    world = World([model("m")], limits=Limits(tenant_weights=weights))
    ready(world, "m")
    world.arrive("busy", "m", takes_s=1.0)
    for tenant, each_s in takes_s.items():
        for number in range(40):
            world.arrive(f"{tenant}-{number}", "m", takes_s=each_s, tenant=tenant)
    world.run()
    return world


def test_equal_tenants_take_turns() -> None:
    world = contended({}, {"a": 1.0, "b": 1.0})
    assert grants_by_tenant(world, 40) == {"a": 20, "b": 20}


def test_shares_follow_the_weights() -> None:
    world = contended({A: 3.0}, {"a": 1.0, "b": 1.0})
    counts = grants_by_tenant(world, 40)
    assert 27 <= counts["a"] <= 32


def test_shares_are_of_time_and_not_of_requests() -> None:
    """b's answers take four times as long: while both wait it has a quarter as many."""
    world = contended({}, {"a": 1.0, "b": 4.0})
    counts = grants_by_tenant(world, 40)
    assert 6 <= counts["b"] <= 10


def test_one_that_floods_delays_another_by_one_answer() -> None:
    world = World([model("m")])
    ready(world, "m")
    for number in range(50):
        world.arrive(f"flood-{number}", "m", takes_s=1.0, tenant="flood")
    world.run(10.5)
    quiet = world.arrive("quiet", "m", takes_s=1.0, tenant="quiet")
    world.run()
    assert quiet.granted_at - quiet.arrived <= 1.0


@pytest.mark.untraced
def test_a_crowd_goes_by_age_though_one_of_it_asks_for_more_than_others() -> None:
    """Four times as much is asked for as can be served, and no tenant has most of it."""
    world = World([model("m")])
    ready(world, "m")
    calls = []
    for _ in range(20):
        for tenant in ("often", "often", *(f"t{number}" for number in range(10))):
            calls.append(world.arrive(f"{len(calls)}", "m", takes_s=20.0, tenant=tenant))
            world.run(5.0)
    world.run()
    in_turn = sorted(calls, key=lambda call: call.granted_at)
    assert all(abs(one.arrived - other.arrived) <= ALIKE_S for one, other in zip(in_turn, calls, strict=True))


def test_a_returning_tenant_has_no_credit_for_the_time_it_was_away() -> None:
    world = World([model("m")])
    ready(world, "m")
    for number in range(40):
        world.arrive(f"a-{number}", "m", takes_s=1.0, tenant="a")
    world.run(20.5)
    for number in range(20):
        world.arrive(f"b-{number}", "m", takes_s=1.0, tenant="b")
    world.run()
    together = [name[0] for name in world.granted()[22:42]]
    assert 9 <= together.count("a") <= 11, "they take turns from then on"


def test_class_goes_before_fairness() -> None:
    world = World([model("m")])
    ready(world, "m")
    world.arrive("busy", "m", takes_s=5.0, tenant="a")
    world.arrive("normal", "m", takes_s=1.0, tenant="b")
    world.arrive("urgent", "m", takes_s=1.0, tenant="a", priority=0)
    world.run()
    assert world.granted()[-2:] == ["urgent", "normal"]


def test_a_tenant_that_is_alone_is_served_by_class_however_long_its_answers_take() -> None:
    """It floods nothing: there is no other tenant to share with."""
    world = World([model("m")])
    world.arrive("first", "m", takes_s=30.0)
    world.run()
    world.arrive("long", "m", takes_s=40.0)
    for name, priority in (("low", 2), ("normal-1", 1), ("normal-2", 1)):
        world.arrive(name, "m", takes_s=1.0, priority=priority)
    world.run()
    assert world.granted()[-3:] == ["normal-1", "normal-2", "low"]


def test_the_swap_is_charged_to_the_tenant_that_caused_it() -> None:
    world = World([model("m")])
    world.arrive("cause", "m", takes_s=1.0, tenant="a")
    world.arrive("b-1", "m", takes_s=1.0, tenant="b")
    world.arrive("a-2", "m", takes_s=1.0, tenant="a")
    world.arrive("b-2", "m", takes_s=1.0, tenant="b")
    world.run()
    assert world.granted() == ["b-1", "b-2", "cause", "a-2"]


def test_answers_beside_each_other_share_the_time_they_are_charged() -> None:
    world = World([model("m", concurrency=4)])
    ready(world, "m")
    before_s = world.scheduler.state.accounts.level_s
    for number in range(4):
        world.arrive(f"r-{number}", "m", takes_s=8.0, tenant="a")
    world.run()
    assert all(call.fate is Fate.SERVED for call in world.calls_by_id.values())
    used_s = world.scheduler.state.accounts.served_s(A) - before_s
    assert used_s == pytest.approx(8.0), "four answers, one slot, eight seconds"


def test_tenants_without_requests_are_forgotten() -> None:
    world = World([model("m", concurrency=2)])
    for number in range(30):
        world.arrive(f"r-{number}", "m", takes_s=1.0, tenant=f"t-{number % 5}")
    world.run()
    accounts = world.scheduler.state.accounts
    for number in range(40):
        world.arrive(f"more-{number}", "m", takes_s=1.0, tenant="last")
        world.run()
    accounts.sweep()
    assert len(accounts) <= 1
