"""Who may be on stage together, as rules beside memory.

Owns the question every set of rules answers, and the way from rules as written to the one who answers. The rules are
plain records, so that they can travel in events and be replayed. Nothing here knows of memory, time or requests.
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
        """Who of `present` must leave so that the newcomer may come.

        Those of `present` who are also `staying` cannot leave now: the answer never names them, and is None when the
        newcomer cannot come while they are there. The newcomer itself never has to leave, be it present or not.
        """
        ...


def coresidency_under(rules: Rules) -> Coresidency:
    """The one who answers by these rules. Raises ValueError if they contradict themselves."""
    return ByMatrix(rules) if isinstance(rules, Matrix) else ByGroup(rules)
