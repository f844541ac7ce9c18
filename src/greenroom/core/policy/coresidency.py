"""Which models may be ready together, as rules beside memory: groups, or a matrix of sets.

Owns the question that every set of rules answers, the rules of groups, and how rules are compiled. Rules are plain
records, so that events can carry and replay them. Nothing here depends on memory, time or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from greenroom.core.model import Group as Group
from greenroom.core.model import Matrix as Matrix
from greenroom.core.model import ModelId
from greenroom.core.model import Rules as Rules
from greenroom.core.policy.matrix import ByMatrix

# The group of models that are in no other.
THE_REST: Final = Group("(default)", ())


class Coresidency(Protocol):
    def leavers(
        self, newcomer: ModelId, present: Sequence[ModelId], staying: frozenset[ModelId]
    ) -> frozenset[ModelId] | None:
        """The models of `present` that must leave so that the newcomer may come.

        Models in `staying` cannot leave now: the answer never names them, and is None if the newcomer cannot come while
        they are there. The newcomer itself never has to leave, whether it is present or not.
        """
        ...


class ByGroup:
    """Models that take turns, groups that evict others, groups that others cannot evict.

    A rule applies when a model comes; once ready, a model forbids nothing. So a model of an exclusive group comes
    alone, and a model of a group that is not exclusive may still join it later.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        """Raises ValueError if a model is in two groups."""
        self._group_of: dict[ModelId, Group] = {}
        for group in groups:
            for member in group.members:
                if member in self._group_of:
                    raise ValueError(f"{member} is in group {self._group_of[member].name} and in group {group.name}")
                self._group_of[member] = group

    def leavers(
        self, newcomer: ModelId, present: Sequence[ModelId], staying: frozenset[ModelId]
    ) -> frozenset[ModelId] | None:
        leaving = frozenset(model for model in present if model != newcomer and self._sends_away(newcomer, model))
        return None if leaving & staying else leaving

    def _sends_away(self, newcomer: ModelId, model: ModelId) -> bool:
        its, other = self._group_of.get(newcomer, THE_REST), self._group_of.get(model, THE_REST)
        return its.swap if its is other else its.exclusive and not other.persistent


def coresidency_under(rules: Rules) -> Coresidency:
    """The coresidency that follows these rules. Raises ValueError if they contradict themselves."""
    return ByMatrix(rules) if isinstance(rules, Matrix) else ByGroup(rules)
