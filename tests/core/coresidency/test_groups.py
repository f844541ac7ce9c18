"""Groups: which models must leave for which newcomer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from greenroom.core.model import ModelId
from greenroom.core.policy.coresidency import ByGroup, Group, coresidency_under


def ids(names: str) -> tuple[ModelId, ...]:
    return tuple(ModelId(name) for name in names.split())


def leavers(company: ByGroup, newcomer: str, present: str, staying: str = "") -> set[str] | None:
    answer = company.leavers(ModelId(newcomer), ids(present), frozenset(ids(staying)))
    return None if answer is None else set(answer)


SMALL = Group("small", ids("x y"), swap=False, exclusive=False)
ALWAYS = Group("always", ids("p q"), swap=False, exclusive=False, persistent=True)
# The groups of each sentence; and newcomer, models present, those that leave (None: it cannot come), those that stay.
SENTENCES: dict[str, tuple[Sequence[Group], Sequence[tuple[str, str, str | None, str]]]] = {
    "without groups one model is ready at a time": ([], [("a", "b c", "b c", "")]),
    "a newcomer evicts nothing where no model is ready": ([], [("a", "", "", "")]),
    "a model that is there already does not send itself away": ([], [("a", "a b a", "b", ""), ("a", "a", "", "a")]),
    "members of a group that swaps take turns": (
        [Group("chat", ids("a b c"), exclusive=False)],
        [("a", "b x", "b", "")],
    ),
    "members of a group that does not swap stay together": (
        [Group("small", ids("a b c"), swap=False, exclusive=False)],
        [("a", "b c x", "", "")],
    ),
    "a newcomer of an exclusive group evicts all models outside it": (
        [Group("big", ids("a b"), swap=False), Group("small", ids("x"), exclusive=False)],
        [("a", "b x free", "x free", "")],
    ),
    "a newcomer of a group that is not exclusive joins an exclusive one": (
        [Group("big", ids("a")), Group("small", ids("x"), exclusive=False)],
        [("x", "a free", "", "")],
    ),
    "a persistent group is not sent away by others": (
        [ALWAYS, Group("g", ids("a"))],
        [("a", "p q free", "free", ""), ("free", "p a", "a", "")],
    ),
    "members of a persistent group still take turns": ([replace(ALWAYS, swap=True)], [("p", "q a", "q", "")]),
    "models in no group send each other and all groups away": ([SMALL], [("free", "x y other", "x y other", "")]),
    "a newcomer cannot load while a model it would evict must stay": (
        [SMALL],
        [("free", "x other", None, "x"), ("x", "y free", "", "y free")],
    ),
    "a model that is not ready keeps no newcomer out": ([], [("a", "b", "b", "c")]),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_those_leave_that_the_groups_send_away(sentence: str) -> None:
    groups, cases = SENTENCES[sentence]
    for newcomer, present, leave, staying in cases:
        expected = None if leave is None else set(leave.split())
        assert leavers(ByGroup(groups), newcomer, present, staying) == expected


def test_model_in_two_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="a is in group one and in group two"):
        ByGroup([Group("one", ids("a")), Group("two", ids("b a"))])


def test_coresidency_under_groups_applies_them() -> None:
    company = coresidency_under((Group("chat", ids("a b"), exclusive=False),))
    assert company.leavers(ModelId("a"), ids("b c"), frozenset()) == {"b"}
