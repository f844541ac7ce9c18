"""What a gateway needs of a store that it shares with other gateways, beyond what every holder of a lease does.

Owns the words. A swap enters the newcomer's claim as pending before it touches a victim, and victims release into it;
for a program that waits, one gateway at a time is named to make room.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from greenroom.config.schema import Config
from greenroom.errors import ConfigError
from greenroom.leases.records import Holder, Lease, LeaseAsk, LeaseStore


@dataclass(frozen=True, slots=True)
class PublishReply:
    """What a gateway hears at each heartbeat."""

    make_room: tuple[LeaseAsk, ...]  # Those who wait, and for whom this gateway is to make room during its turn.
    version: int  # Another one than before: something about leases or devices has changed.
    grace_left_s: float  # So long nothing new is granted, because the store may have lost what it knew.


@dataclass(frozen=True, slots=True)
class SlotAsk:
    """A slot's claim: what the scheduler has already placed."""

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
        """Say that this gateway lives, how many MiB may be planned with, and what freeing memory would cost it.

        At most a second apart. A device that is gone is published with 0, one on which nothing can be freed without a
        price.
        """
        ...

    async def pend(self, ask: SlotAsk, victims: Sequence[str], *, gateway: str, pending_s: float) -> None:
        """Enter a swap. Raises LeaseDenied if what is free and what these victims hold would not be enough, LeaseTaken
        if the id is not that of a slot of this gateway."""
        ...

    async def hold(self, ask: SlotAsk, *, gateway: str, into: str | None = None) -> Lease:
        """Hold a claim that was pending, changed its size, or fits. Raises LeaseDenied with the numbers, LeaseTaken if
        the id is not that of a slot of this gateway."""
        ...

    async def acquire(self, ask: LeaseAsk, asker: str = "", kind: str = "program") -> Lease:
        """As every store does; `asker` names this call for `unheard`, `kind` is slot where a model waits."""
        ...

    async def unheard(self, id: str, asker: str) -> None:
        """This call was given up, or not heard. Gives back what it waited for or was told of, unless another was told
        of it too and has not said the same. Raises StoreDown."""
        ...

    async def release(self, id: str, token: int | None = None, into: str | None = None, kind: str = "program") -> None:
        """Give it back; in the same step its memory goes to `into`, or to the swap it was named a victim of. A lease of
        another kind stays as it is."""
        ...

    async def renew_all(self, held: Iterable[tuple[str, int]]) -> dict[str, bool]:
        """Renew many leases of slots at once: id and token of each. False: not held any more."""
        ...

    async def recall(self, id: str) -> None:
        """Ask a preemptible holder to leave within the time that it named itself."""
        ...


@dataclass(frozen=True, slots=True)
class Membership:
    """One gateway as a member of a shared store: its name there, and what its leases have in common."""

    store: SharedStore
    gateway: str
    ttl_s: float
    holder: Holder | None


def open_store(config: Config, url: str) -> SharedStore:
    """Raises ConfigError where the client of such a store is not installed."""
    try:
        # Only where it is used: it takes a while to import.
        from greenroom.leases.shared.redis_store import RedisStore
    except ImportError as error:
        raise ConfigError("leases.store needs the client of Redis: pip install 'greenroom[redis]'.") from error
    return RedisStore(url, config.leases.host or os.uname().nodename, ttl_s=config.leases.ttl_s)
