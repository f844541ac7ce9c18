"""Translates leases to and from the JSON of the Lua scripts. Owns this JSON. Two limits of Lua's JSON shape it: an
empty list and an empty map look the same, so replies contain no lists; numbers keep 14 digits, so tokens are text."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import msgspec

from greenroom.leases.records import Holder, Lease, LeaseAsk
from greenroom.leases.shared.store import PublishReply, SlotAsk

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
