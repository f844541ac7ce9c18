"""Holders in a shared store that were asked to leave: reported when they are asked, and when they stay too long.

Owns what was reported already. The store recalls, and the holder hears of it when it renews, at whichever gateway or in
the store itself; nobody is ever made to leave. Never asks the store: it is told what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from greenroom.leases.records import Lease
from greenroom.telemetry.logs import get_logger

_log = get_logger("leases")


@dataclass(slots=True)
class Recalled:
    name: str
    token: int
    deadline: float
    is_overdue: bool = False


class Recalls:
    def __init__(self, clock: Callable[[], float], tell: Callable[[str, Mapping[str, object]], None]) -> None:
        self._clock = clock
        self._tell = tell
        self._recalled: dict[str, Recalled] = {}

    def note(self, leases: Iterable[Lease]) -> None:
        """These are all there are."""
        now = self._clock()
        asked = {lease.id: lease for lease in leases if lease.recall_in_s is not None and lease.state == "held"}
        known = self._recalled
        self._recalled = {id: one for id, one in known.items() if id in asked and asked[id].token == one.token}
        for id, lease in asked.items():
            if id not in self._recalled and lease.recall_in_s is not None:
                self._recalled[id] = one = Recalled(lease.name, lease.token, now + lease.recall_in_s)
                _log.info("lease recalled", lease=id, name=one.name, grace_s=round(lease.recall_in_s, 3))
                self._tell("recall", {"lease": id, "name": one.name, "deadline": one.deadline})

    def look(self) -> None:
        """Who should have left by now and is there still."""
        now = self._clock()
        for id, one in self._recalled.items():
            if not one.is_overdue and one.deadline <= now:
                one.is_overdue = True
                _log.warning("lease is overdue: its holder was asked to leave and stays", lease=id, name=one.name)
                self._tell("lease_overdue", {"lease": id, "name": one.name})
