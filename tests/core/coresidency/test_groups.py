"""Groups: which models must leave for which newcomer."""

from __future__ import annotations

import pytest

from greenroom.core.model import ModelId
from greenroom.core.policy.coresidency import ByGroup, Group, coresidency_under


def ids(names: str) -> tuple[ModelId, ...]:
    return tuple(ModelId(name) for name in names.split())


def leavers(company: ByGroup, newcomer: str, present: str, staying: str = "") -> set[str] | None:
    answer = company.leavers(ModelId(newcomer), ids(present), frozenset(ids(staying)))
    return None if answer is None else set(answer)


def test_without_groups_one_model_is_ready_at_a_time() -> None:
    assert leavers(ByGroup(()), "a", "b c") == {"b", "c"}


def test_newcomer_evicts_nothing_where_no_model_is_ready() -> None:
    assert leavers(ByGroup(()), "a", "") == set()


def test_model_that_is_there_already_does_not_send_itself_away() -> None:
    assert leavers(ByGroup(()), "a", "a b a") == {"b"}
    assert leavers(ByGroup(()), "a", "a", staying="a") == set()


def test_members_of_a_group_that_swaps_take_turns() -> None:
    company = ByGroup([Group("chat", ids("a b c"), exclusive=False)])
    assert leavers(company, "a", "b x") == {"b"}


def test_members_of_a_group_that_does_not_swap_stay_together() -> None:
    company = ByGroup([Group("small", ids("a b c"), swap=False, exclusive=False)])
    assert leavers(company, "a", "b c x") == set()


def test_newcomer_of_an_exclusive_group_evicts_all_models_outside_it() -> None:
    company = ByGroup([Group("big", ids("a b"), swap=False), Group("small", ids("x"), exclusive=False)])
    assert leavers(company, "a", "b x free") == {"x", "free"}


def test_newcomer_of_a_group_that_is_not_exclusive_joins_an_exclusive_one() -> None:
    company = ByGroup([Group("big", ids("a")), Group("small", ids("x"), exclusive=False)])
    assert leavers(company, "x", "a free") == set()


def test_persistent_group_is_not_sent_away_by_others() -> None:
    company = ByGroup([Group("always", ids("p q"), swap=False, exclusive=False, persistent=True), Group("g", ids("a"))])
    assert leavers(company, "a", "p q free") == {"free"}
    assert leavers(company, "free", "p a") == {"a"}


def test_members_of_a_persistent_group_still_take_turns() -> None:
    company = ByGroup([Group("always", ids("p q"), exclusive=False, persistent=True)])
    assert leavers(company, "p", "q a") == {"q"}


def test_models_in_no_group_send_each_other_and_all_groups_away() -> None:
    company = ByGroup([Group("small", ids("x y"), swap=False, exclusive=False)])
    assert leavers(company, "free", "x y other") == {"x", "y", "other"}


def test_newcomer_cannot_load_while_a_model_it_would_evict_must_stay() -> None:
    company = ByGroup([Group("small", ids("x y"), swap=False, exclusive=False)])
    assert leavers(company, "free", "x other", staying="x") is None
    assert leavers(company, "x", "y free", staying="y free") == set()


def test_a_model_that_is_not_ready_keeps_no_newcomer_out() -> None:
    assert leavers(ByGroup(()), "a", "b", staying="c") == {"b"}


def test_model_in_two_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="a is in group one and in group two"):
        ByGroup([Group("one", ids("a")), Group("two", ids("b a"))])


def test_coresidency_under_groups_applies_them() -> None:
    company = coresidency_under((Group("chat", ids("a b"), exclusive=False),))
    assert company.leavers(ModelId("a"), ids("b c"), frozenset()) == {"b"}
