"""The protocol between a gateway and the store that it shares with other gateways.

Owns these types. A swap enters the newcomer's claim as pending before it touches a victim, and victims release into it.
For a waiting program the store orders one gateway at a time to make room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from greenroom.leases.records import Holder, Lease, LeaseAsk, LeaseStore


@dataclass(frozen=True, slots=True)
class PublishReply:
    """The store's answer to a heartbeat."""

    make_room: tuple[LeaseAsk, ...]  # Waiting leases for which this gateway must make room now.
    version: int  # Changes whenever leases or devices change.
    grace_left_s: float  # Nothing new is granted for this long: the store may have lost its data.


@dataclass(frozen=True, slots=True)
class SlotAsk:
    """A slot's claim, which the scheduler has placed already."""

    id: str
    name: str
    claim: Mapping[str, int]
    priority: int = 1
    preemptible: bool = False
    grace_s: float = 30.0
    ttl_s: float = 30.0
    holder: Holder | None = None


class SharedStore(LeaseStore, Protocol):
    async def publish(self, gateway: str, devices: Mapping[str, int], prices: Mapping[str, float]) -> PublishReply:
        """Heartbeat: this gateway lives, offers so many MiB on each device, and asks these prices for freeing memory.
        Called at least once a second. A device that is gone is published with 0; one on which nothing can be freed has
        no price."""
        ...

    async def pend(self, ask: SlotAsk, victims: Sequence[str], *, gateway: str, pending_s: float) -> None:
        """Enter a swap as pending. Raises LeaseDenied if free memory and that of the victims would not be enough,
        LeaseTaken if the id is not that of a slot of this gateway."""
        ...

    async def hold(self, ask: SlotAsk, *, gateway: str, into: str | None = None) -> Lease:
        """Hold a claim that was pending, has a new size, or fits. Raises LeaseDenied with the numbers, LeaseTaken if
        the id is not that of a slot of this gateway."""
        ...

    async def acquire(self, ask: LeaseAsk, asker: str = "", kind: str = "program") -> Lease:
        """As in every store. `asker` names this call for `unheard`; `kind` is slot where a model waits."""
        ...

    async def unheard(self, id: str, asker: str) -> None:
        """The caller of this `acquire` left before its answer. Releases the lease, unless another call still has it.
        Raises StoreDown."""
        ...

    async def release(self, id: str, token: int | None = None, into: str | None = None, kind: str = "program") -> None:
        """Release it. In the same step its memory goes to `into`, or to the swap that named it a victim. A lease of
        another kind is left alone."""
        ...

    async def renew_all(self, held: Iterable[tuple[str, int]]) -> dict[str, bool]:
        """Renew many leases of slots at once, by id and token. False: no longer held."""
        ...

    async def recall(self, id: str) -> None:
        """Ask a preemptible holder to leave within its own grace time."""
        ...

    def beat(self) -> None:
        """This process runs and renews its leases itself. Without this call they are renewed for it meanwhile."""
        ...


@dataclass(frozen=True, slots=True)
class Membership:
    """One gateway as a member of a shared store: its name there, and what its leases have in common."""

    store: SharedStore
    gateway: str
    ttl_s: float
    holder: Holder | None
