"""The protocol between a gateway and the store that it shares with other gateways, and the JSON of its Lua scripts.

A swap enters the newcomer's claim as pending before it touches a victim, and victims release into it. For a waiting
program the store orders one gateway at a time to make room.

Two limits of Lua's JSON shape it: an empty list and an empty map look the same, so replies contain no lists; numbers
keep 14 digits, so tokens are text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

import msgspec

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


# --- what lies in the store -------------------------------------------------------------------------------------------

_MS = 1_000


class Stored(msgspec.Struct, omit_defaults=True):
    """One record in the store, without the fields that only the scripts need."""

    id: str
    name: str
    priority: int
    preemptible: bool
    grace_ms: int
    ttl_ms: int
    kind: str
    claim: dict[str, int] = {}
    want: dict[str, int] = {}
    mib: int = 0
    gpus: int = 0
    shares: dict[str, int] = {}
    devices: str | None = None
    arrival: int | None = None
    state: str = ""
    token: str = "0"
    lives_to: float = 0
    pends_to: float | None = None
    recall_at: float | None = None
    gateway: str = ""
    holder: Holder | None = None


class Reply(msgspec.Struct):
    now: float
    last: str
    lease: Stored | None = None
    waiting: bool = False
    arrival: int | None = None
    denied: str | None = None
    free: dict[str, int] = {}
    usable: dict[str, int] = {}
    renewed: dict[str, Stored] = {}
    lost: dict[str, bool] = {}
    released: bool = False
    leases: dict[str, Stored] = {}
    make_room: dict[str, Stored] = {}
    version: str = "0"
    grace_left_ms: float = 0


_DECODER = msgspec.json.Decoder(Reply)


def encode(arguments: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(arguments)


def decode(text: bytes) -> Reply:
    return _DECODER.decode(text)


def of_ask(ask: LeaseAsk, ttl_s: float, kind: str) -> Stored:
    return Stored(
        id=ask.id,
        name=ask.name,
        priority=ask.priority,
        preemptible=ask.preemptible,
        grace_ms=int(ask.grace_s * _MS),
        ttl_ms=int(ttl_s * _MS),
        kind=kind,
        mib=ask.mib,
        gpus=ask.gpus,
        shares=dict(ask.shares),
        devices=",".join(sorted(ask.devices)),
        holder=ask.holder,
    )


def of_slot(ask: SlotAsk, gateway: str, ttl_s: float) -> Stored:
    return Stored(
        id=ask.id,
        name=ask.name,
        priority=ask.priority,
        preemptible=ask.preemptible,
        grace_ms=int(ask.grace_s * _MS),
        ttl_ms=int(ttl_s * _MS),
        kind="slot",
        want=dict(ask.claim),
        gateway=gateway,
        holder=ask.holder,
    )


def lease_of(stored: Stored, now: float) -> Lease:
    lapses_at = stored.pends_to if stored.state == "pending" and stored.pends_to is not None else stored.lives_to
    return Lease(
        id=stored.id,
        name=stored.name,
        token=int(stored.token),
        claim=stored.claim,
        priority=stored.priority,
        preemptible=stored.preemptible,
        state=stored.state,
        ttl_s=stored.ttl_ms / _MS,
        expires_in_s=(lapses_at - now) / _MS,
        recall_in_s=None if stored.recall_at is None else (stored.recall_at - now) / _MS,
        holder=stored.holder,
        kind=stored.kind,
        gateway=stored.gateway,
    )


def orders_of(reply: Reply) -> PublishReply:
    return PublishReply(
        make_room=tuple(_ask_of(stored) for stored in reply.make_room.values()),
        version=int(reply.version),
        grace_left_s=reply.grace_left_ms / _MS,
    )


def _ask_of(stored: Stored) -> LeaseAsk:
    return LeaseAsk(
        id=stored.id,
        name=stored.name,
        mib=stored.mib,
        gpus=stored.gpus,
        shares=stored.shares,
        devices=tuple(stored.devices.split(",")) if stored.devices else (),
        priority=stored.priority,
        preemptible=stored.preemptible,
        grace_s=stored.grace_ms / _MS,
        ttl_s=stored.ttl_ms / _MS,
        holder=stored.holder,
    )


OPERATIONS = ("acquire", "renew", "release", "leases", "publish", "pend", "hold", "recall")
# In the order in which the scripts unpack them.
_KEYS = ("meta", "leases", "expiry", "usable", "taken", "line", "gateways")


def source(operation: str) -> str:
    folder = resources.files(__package__) / "lua"
    return "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in ("book", "line", operation))


def keys(host: str) -> list[str]:
    """Every key of one host; the braces put them into one slot of a cluster."""
    return [f"greenroom:{{{host}}}:{name}" for name in _KEYS]
