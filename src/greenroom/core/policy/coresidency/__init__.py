"""Which models may be ready together, as rules beside memory.

Owns the question that every set of rules answers, and how rules are compiled. Rules are plain records, so that events
can carry and replay them. Nothing here knows about memory, time or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from greenroom.core.model import Group as Group
from greenroom.core.model import Matrix as Matrix
from greenroom.core.model import ModelId
from greenroom.core.model import Rules as Rules
from greenroom.core.policy.coresidency.groups import ByGroup
from greenroom.core.policy.coresidency.matrix import ByMatrix


class Coresidency(Protocol):
    def leavers(
        self, newcomer: ModelId, present: Sequence[ModelId], staying: frozenset[ModelId]
    ) -> frozenset[ModelId] | None:
        """The models of `present` that must leave so that the newcomer may come.

        Models in `staying` cannot leave now: the answer never names them, and is None if the newcomer cannot come while
        they are there. The newcomer itself never has to leave, whether it is present or not.
        """
        ...


def coresidency_under(rules: Rules) -> Coresidency:
    """The coresidency that follows these rules. Raises ValueError if they contradict themselves."""
    return ByMatrix(rules) if isinstance(rules, Matrix) else ByGroup(rules)
