"""Leases in a shared store whose holders have died on this machine: found at once, long before they lapse.

Owns one watched process for each lease of this machine. Where a holder cannot be seen nothing is promised: its lease
lapses when it is not renewed. Never gives anything back itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from greenroom.leases.records import Lease
from greenroom.runtime.leases.holders import Holders


class DeadHolders:
    def __init__(self, on_death: Callable[[], None]) -> None:
        self._on_death = on_death
        self._holders = Holders()
        self._watched: dict[str, int] = {}
        # The ids of leases whose holders have ended.
        self.found: set[str] = set()

    def watch(self, leases: Iterable[Lease]) -> None:
        """These are all there are; those that are only waited for are not held by anybody."""
        now = {lease.id: lease for lease in leases if lease.holder is not None and lease.state != "waiting"}
        for id in [id for id, token in self._watched.items() if id not in now or now[id].token != token]:
            self._forget(id)
        for id, lease in now.items():
            if id not in self._watched and lease.holder is not None:
                self._watched[id] = lease.token
                self._holders.watch(id, lease.holder, partial(self._ended, id))

    def _ended(self, id: str) -> None:
        # Its file descriptor would call again at once.
        self._holders.forget(id)
        if id in self._watched:
            self.found.add(id)
            self._on_death()

    def _forget(self, id: str) -> None:
        del self._watched[id]
        self.found.discard(id)
        self._holders.forget(id)

    def close(self) -> None:
        self._holders.close()
