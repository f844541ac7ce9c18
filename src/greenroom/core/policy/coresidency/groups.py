"""Groups: models that take turns, groups that evict others, groups that others cannot evict.

A rule applies when a model comes; once ready, a model forbids nothing. So a model of an exclusive group comes alone,
and a model of a group that is not exclusive may still join it later.
"""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.core.model import Group as Group
from greenroom.core.model import ModelId

THE_REST = Group("(default)", ())


class ByGroup:
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
