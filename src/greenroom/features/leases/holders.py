"""Holders of leases: whether their processes live, and whether they leave when they are recalled.

Owns one pidfd for each local process, so that its end is noticed at once. A process that cannot be watched (another
machine, another pid namespace) loses its lease when it is not renewed in time. Never signals a process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from greenroom.features.leases.making_room import Heartbeat
from greenroom.leases import records as holders
from greenroom.leases.records import Holder, Lease
from greenroom.runtime.observer import Hub
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.telemetry.logs import get_logger


class Holders:
    def __init__(self) -> None:
        self._watched: dict[str, int] = {}

    def watch(self, lease: str, holder: Holder, on_end: Callable[[], None]) -> None:
        """Call `on_end` when this process has ended, at once or later; never where it cannot be watched."""
        if not holders.is_here(holder):
            return
        try:
            pidfd = os.pidfd_open(holder.pid)
        except ProcessLookupError:
            asyncio.get_running_loop().call_soon(on_end)
            return
        except OSError:
            # An old kernel, or no more descriptors: the lease still expires if it is not renewed.
            return
        # Checked after the pidfd is open: until then the pid could be reused.
        if not holders.is_alive(holder):
            os.close(pidfd)
            asyncio.get_running_loop().call_soon(on_end)
            return
        self._watched[lease] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, on_end)

    def forget(self, lease: str) -> None:
        pidfd = self._watched.pop(lease, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        for lease in list(self._watched):
            self.forget(lease)


class DeadHolders:
    """Finds leases in a shared store that are held by ended processes of this machine."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._holders = Holders()
        self._watched: dict[str, int] = {}
        # The ids of leases of ended holders.
        self.found: set[str] = set()

    def watch(self, leases: Iterable[Lease]) -> None:
        """Watch the holders of these leases, which are all there are. Waiting ones are not held yet."""
        now = {lease.id: lease for lease in leases if lease.holder is not None and lease.state != "waiting"}
        for id in [id for id, token in self._watched.items() if id not in now or now[id].token != token]:
            self._forget(id)
        for id, lease in now.items():
            if id not in self._watched and lease.holder is not None:
                self._watched[id] = lease.token
                self._holders.watch(id, lease.holder, partial(self._ended, id))

    def _ended(self, id: str) -> None:
        # A pidfd stays readable and would call again at once.
        self._holders.forget(id)
        if id in self._watched:
            self.found.add(id)
            self._heartbeat.hurry()

    def _forget(self, id: str) -> None:
        del self._watched[id]
        self.found.discard(id)
        self._holders.forget(id)

    def close(self) -> None:
        self._holders.close()


_log = get_logger("leases")


@dataclass(slots=True)
class Recalled:
    name: str
    token: int
    deadline: float
    is_overdue: bool = False


class Recalls:
    """Reports holders in a shared store that were asked to leave, and again if they stay too long. The store recalls;
    the holder learns of it when it renews. It is never made to leave."""

    def __init__(self, loop: SchedulerLoop, hub: Hub) -> None:
        self._loop = loop
        self._hub = hub
        self._recalled: dict[str, Recalled] = {}

    def note(self, leases: Iterable[Lease]) -> None:
        """Take in the current leases, which are all there are, and report new recalls."""
        now = self._loop.clock()
        asked = {lease.id: lease for lease in leases if lease.recall_in_s is not None and lease.state == "held"}
        known = self._recalled
        self._recalled = {id: one for id, one in known.items() if id in asked and asked[id].token == one.token}
        for id, lease in asked.items():
            if id not in self._recalled and lease.recall_in_s is not None:
                self._recalled[id] = one = Recalled(lease.name, lease.token, now + lease.recall_in_s)
                _log.info("lease recalled", lease=id, name=one.name, grace_s=round(lease.recall_in_s, 3))
                deadline = round(time.time() + lease.recall_in_s, 3)
                self._hub.publish("recall", {"lease": id, "name": one.name, "deadline": deadline})

    def look(self) -> None:
        """Report holders that are past their deadline."""
        now = self._loop.clock()
        for id, one in self._recalled.items():
            if not one.is_overdue and one.deadline <= now:
                one.is_overdue = True
                _log.warning("lease is overdue: its holder was asked to leave and stays", lease=id, name=one.name)
                self._hub.publish("lease_overdue", {"lease": id, "name": one.name})
