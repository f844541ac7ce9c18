"""Leases of other programs where GPUs are shared: asked of this gateway, kept in the shared store.

Owns the names of devices and the last look at memory before a lease is handed over. The store decides which lease is
granted, and orders gateways to make room.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from greenroom.core.model import Claim, DeviceId
from greenroom.errors import LeaseDenied, LeaseUnknown, StoreDown
from greenroom.leases.records import Lease, LeaseAsk
from greenroom.leases.shared.store import SharedStore
from greenroom.runtime.leases.refusals import DeviceNamed, devices_meant

# The last owner of memory may take this long to stop using it.
ROOM_S = 10.0


class SharedLeasing:
    """`room_for` waits until memory is really free and returns what is missing; `known` are all leases in the store,
    as they were last read."""

    lists_slots = True

    def __init__(
        self,
        store: SharedStore,
        *,
        wait_max_s: float,
        device_named: DeviceNamed,
        room_for: Callable[[Claim, float], Awaitable[Claim]],
        known: Callable[[], Sequence[Lease]],
    ) -> None:
        self.known = known
        self._store = store
        self._wait_max_s = wait_max_s
        self._device_named = device_named
        self._room_for = room_for

    async def acquire(self, ask: LeaseAsk, asker: str = "") -> Lease:
        devices, call = devices_meant(ask, self._device_named), asker or secrets.token_hex(8)
        ask = replace(ask, wait_s=min(ask.wait_s, self._wait_max_s), devices=devices)
        lease = await self._store.acquire(ask, call)
        try:
            missing = await self._room_for({DeviceId(device): mib for device, mib in lease.claim.items()}, ROOM_S)
        except BaseException:
            await self._take_back(lease.id, call)
            raise
        if missing:
            await self._take_back(lease.id, call)
            said = ", ".join(f"{mib:,} MiB on {device}" for device, mib in missing.items())
            raise LeaseDenied(
                f"{ask.name} was granted memory that another process still uses: {said}.", retry_after_s=ROOM_S
            )
        return lease

    async def unheard(self, id: str, asker: str) -> None:
        await self._store.unheard(id, asker)

    async def _take_back(self, id: str, asker: str) -> None:
        """Give back a lease that the caller is not told of. If the store is down, the lease expires there."""
        with contextlib.suppress(StoreDown):
            await self.unheard(id, asker)

    async def renew(self, id: str, token: int) -> Lease:
        return await self._store.renew(id, token)

    async def release(self, id: str, token: int | None = None) -> None:
        await self._store.release(id, token)

    async def leases(self) -> list[Lease]:
        return await self._store.leases()

    async def find(self, id: str) -> Lease:
        found = [lease for lease in await self._store.leases() if lease.id == id]
        if not found:
            raise LeaseUnknown(f"There is no lease {id}. GET /api/v1/leases lists those there are.")
        return found[0]

    async def close(self) -> None:
        """Nothing to do: `Sharing` closes the store."""
