"""Leases in Redis or Valkey, for gateways, hosts and programs that share GPUs.

Owns the connection, the waiting, and the translation of redis-py's exceptions and of refusals into errors of ours. The
scripts decide, each in one atomic step and by Redis' own clock; this file never reads a lease in order to write it.
Every operation may be repeated with the same id, for instance after a lost answer. Imported only if such a store is
configured.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import redis.exceptions as redis_errors

from greenroom.base.redis_link import HOLDS_SOMETHING_ELSE, connected, shown
from greenroom.config import kinds
from greenroom.errors import BadRequest, ConfigError, LeaseDenied, LeaseLost, LeaseUnknown, StoreDown
from greenroom.leases.records import HOST, PROGRAM_ID_MAX, Lease, LeaseAsk, is_program_id, taken
from greenroom.leases.shared import stored
from greenroom.leases.shared.stored import PublishReply, Reply, SlotAsk, Stored

OUTAGE_RETRY_AFTER_S = 1.0
# Errors by class. The first match counts, so special classes come first.
_BY_CLASS: tuple[tuple[type[Exception], str], ...] = (
    (redis_errors.BusyLoadingError, "is still loading its data"),
    (redis_errors.AuthenticationError, "does not accept the name or the password"),
    (redis_errors.AuthorizationError, "does not accept the name or the password"),
    (redis_errors.NoPermissionError, "does not permit this user to run its scripts"),
    (redis_errors.ReadOnlyError, "is a replica and cannot be written to"),
    (redis_errors.OutOfMemoryError, "has used up its maxmemory"),
    (redis_errors.MaxConnectionsError, "has no connection left for us"),
    (redis_errors.TimeoutError, "does not answer in time"),
    (redis_errors.ConnectionError, "cannot be reached"),
    (OSError, "cannot be reached"),
)
# Errors by the code with which they begin, or which they contain if a script failed.
_BY_WORD = (
    ("NOREPLICAS", "has too few replicas to write to"),
    ("NOAUTH", "wants a password"),
    ("WRONGPASS", "does not accept the name or the password"),
    ("NOPERM", "does not permit this user to run its scripts"),
    ("READONLY", "is a replica and cannot be written to"),
    ("LOADING", "is still loading its data"),
    ("MASTERDOWN", "is a replica that has lost its primary"),
    ("CLUSTERDOWN", "is a cluster that is down"),
    ("MOVED", "is a cluster; give the address of the node that holds this host's keys"),
    ("MISCONF", "cannot save to its disk and refuses to write"),
    ("OOM", "has used up its maxmemory"),
    ("BUSY", "is busy with a script that does not end"),
    ("WRONGTYPE", HOLDS_SOMETHING_ELSE),
)


def translated(error: Exception, url: str) -> StoreDown:
    """The error to raise instead. The text of Redis' error is not passed on: it may quote what was sent."""
    where = shown(url)
    for kind, meaning in _BY_CLASS:
        if isinstance(error, kind):
            return _down(where, meaning)
    # An error inside a script has the script's name before or after the code.
    words = str(error).replace(":", " ").replace("-", " ").split()
    for word, meaning in _BY_WORD:
        if word in words:
            return _down(where, meaning)
    # Data that no gateway wrote, or a fault of a script.
    return _down(where, f"refused a script: {' '.join(words[:12])}")


def _down(where: str, meaning: str) -> StoreDown:
    return StoreDown(f"the lease store at {where} {meaning}", retry_after_s=OUTAGE_RETRY_AFTER_S)


@contextmanager
def cancels_heard() -> Iterator[None]:
    """Raise CancelledError at the end if this task was cancelled inside, even if the block swallowed it."""
    task = asyncio.current_task()
    assert task is not None, "only tasks can be cancelled"
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


REFUSAL_RETRY_AFTER_S = 5.0
TAKEN = "taken"
_WHY = {
    "grace": "the lease store is new or has lost its data; earlier holders come first for a moment",
    "line": "others wait for these GPUs and come first",
    "full": "the lease store holds as many leases as it may",
    "memory": "so much is not free",
}


def refusal(name: str, wanted: str, reply: Reply, beside: Mapping[str, object], hint: str = "") -> LeaseDenied:
    message = f"{name} needs {wanted}: {_WHY.get(reply.denied or '', 'refused')}. {_room(reply)}{hint}"
    numbers = {"free_mib": reply.free, "usable_mib": reply.usable, "why": reply.denied}
    return LeaseDenied(message, retry_after_s=REFUSAL_RETRY_AFTER_S, beside={**beside, **numbers})


def program_refusal(ask: LeaseAsk, reply: Reply) -> LeaseDenied:
    """The error for a program's request. It says so if no wait could have helped."""
    if reply.denied == TAKEN:
        return taken(ask.id, "another holder's, or was asked for with another amount or other GPUs")
    wanted = f"{ask.mib:,} MiB on {ask.gpus} GPU{'s' if ask.gpus > 1 else ''}"
    most, hint = _most(ask, reply), ""
    if reply.usable and most < ask.mib:
        hint = f" Waiting does not help: without any other lease there would be {most:,} MiB on each at most."
    return refusal(ask.name, wanted, reply, {"needed_mib": ask.mib, "gpus": ask.gpus}, hint)


def _most(ask: LeaseAsk, reply: Reply) -> int:
    """MiB that each of so many GPUs could give if no lease was held. Strangers that use them now may end."""
    allowed = [mib for device, mib in reply.usable.items() if device != HOST]
    if ask.devices:
        allowed = [mib for device, mib in reply.usable.items() if device in ask.devices]
    return sorted(allowed, reverse=True)[ask.gpus - 1] if ask.gpus <= len(allowed) else 0


def _room(reply: Reply) -> str:
    if not reply.usable:
        return "No GPUs are known to the store yet: a gateway has to run on this host, or name them."
    parts = (f"{device} {reply.free[device]:,} of {reply.usable[device]:,} MiB" for device in sorted(reply.usable))
    return f"Free: {', '.join(parts)}."


# The scripts drop a waiter that is silent for 3 s.
POLL_FIRST_S = 0.02
POLL_MAX_S = 0.5
LEASES_MAX = 4_096
# Time without any operation counts up to this share of the TTL, so the store keeps a lease that much longer than its
# holder expects: see the clock in book.lua.
STEP_SHARE = 1 / 3
_MS = 1_000


def frame(ttl_s: float, grace_s: float | None = None) -> dict[str, Any]:
    """What every script is told of this store."""
    birth_grace_s = ttl_s * (1 + STEP_SHARE) if grace_s is None else grace_s
    return {
        "step_ms": int(ttl_s * STEP_SHARE * _MS),
        "birth_grace_ms": int(birth_grace_s * _MS),
        "leases_max": LEASES_MAX,
    }


class Renewer:
    """Renews leases in place of this process while this process cannot. This one renews none: a program's heartbeat is
    part of it."""

    def hold(self, lease: Stored) -> None:
        """This lease is held. Of a program: its holder was just heard of."""

    def forget(self, id: str) -> None:
        """This lease is no longer held."""

    def beat(self) -> None:
        """This process runs."""

    def close(self) -> None:
        """Renew nothing from now on."""


class RedisStore:
    """The leases on one host's GPUs. `ttl_s` is the longest TTL; a new store grants nothing for about as long."""

    def __init__(
        self,
        url: str,
        host: str,
        *,
        ttl_s: float = 30.0,
        grace_s: float | None = None,
        offers: Mapping[str, int] | None = None,
        renewer: Renewer | None = None,
    ) -> None:
        self.host = host
        self._url = url
        self._ttl_s = ttl_s
        self._frame = frame(ttl_s, grace_s)
        self._renewer = renewer or Renewer()
        self._offers = dict(offers or {})
        self._keys = stored.keys(host)
        if why := kinds.store_address_problem(url):
            raise ConfigError(f"the address of the lease store {why}")
        self._client = connected(url, "the lease store")
        self._scripts = {name: self._client.register_script(stored.source(name)) for name in stored.OPERATIONS}
        # Leases held through this object, so that a store that lost its data gets them again.
        self._held: dict[str, Stored] = {}
        # The highest token seen: a store that lost its data, and whose clock went back, learns it from us.
        self._highest = 0

    async def acquire(self, ask: LeaseAsk, asker: str = "", kind: str = "program") -> Lease:
        if kind == "program" and not is_program_id(ask.id):
            raise BadRequest(
                f"{ask.id!r} cannot be the id of a lease: up to {PROGRAM_ID_MAX} letters, digits and ._:@+- can.",
                param="id",
            )
        record, call = stored.of_ask(ask, self._ttl(ask.ttl_s), kind), asker or secrets.token_hex(8)
        wait_ends_at = asyncio.get_running_loop().time() + ask.wait_s
        try:
            reply = await self._wait_in_line(record, call, wait_ends_at)
        except asyncio.CancelledError:
            await self._leave(record, call)
            raise
        if reply.lease is None:
            raise program_refusal(ask, reply)
        return self._keep(reply.lease, reply.now)

    async def unheard(self, id: str, asker: str) -> None:
        await self._give_up({"id": id, "asker": asker})

    async def renew(self, id: str, token: int) -> Lease:
        reply = await self._renew(((id, token),), "program")
        if id in reply.renewed:
            self._renewer.hold(reply.renewed[id])
            return stored.lease_of(reply.renewed[id], reply.now)
        if not self._forget(id):
            raise LeaseUnknown(f"nothing is known of a lease {id} with this token")
        raise LeaseLost(f"lease {id} is lost: it was not renewed in time, or is held under another token")

    async def renew_all(self, held: Iterable[tuple[str, int]]) -> dict[str, bool]:
        reply = await self._renew(tuple(held), "slot")
        for id in reply.lost:
            self._forget(id)
        return {**dict.fromkeys(reply.renewed, True), **dict.fromkeys(reply.lost, False)}

    async def release(self, id: str, token: int | None = None, into: str | None = None, kind: str = "program") -> None:
        arguments = {"id": id, "token": None if token is None else str(token), "into": into, "kind": kind}
        await self._run("release", {key: value for key, value in arguments.items() if value is not None})
        mine = self._held.get(id)
        # A lease that an operator released is kept, so that its holder is told that it is lost rather than unknown.
        if mine is not None and mine.kind == kind and (token == int(mine.token) or (kind == "slot" and token is None)):
            self._forget(id)

    async def leases(self) -> list[Lease]:
        reply = await self._run("leases", {})
        return [stored.lease_of(reply.leases[id], reply.now) for id in sorted(reply.leases)]

    async def publish(self, gateway: str, devices: Mapping[str, int], prices: Mapping[str, float]) -> PublishReply:
        reply = await self._run("publish", {"gateway": gateway, "devices": devices, "prices": prices})
        return stored.orders_of(reply)

    async def pend(self, ask: SlotAsk, victims: Sequence[str], *, gateway: str, pending_s: float) -> None:
        record = stored.of_slot(ask, gateway, self._ttl(ask.ttl_s))
        arguments = {"lease": record, "victims": victims, "pending_ms": int(pending_s * _MS)}
        reply = await self._run("pend", arguments)
        if reply.lease is None:
            raise self._slot_refusal(ask, reply)

    async def hold(self, ask: SlotAsk, *, gateway: str, into: str | None = None) -> Lease:
        record = stored.of_slot(ask, gateway, self._ttl(ask.ttl_s))
        arguments: dict[str, Any] = {"lease": record} if into is None else {"lease": record, "into": into}
        reply = await self._run("hold", arguments)
        if reply.lease is None:
            raise self._slot_refusal(ask, reply)
        return self._keep(reply.lease, reply.now)

    async def recall(self, id: str) -> None:
        await self._run("recall", {"id": id})

    def beat(self) -> None:
        self._renewer.beat()

    async def close(self) -> None:
        self._renewer.close()
        await self._client.aclose()

    # --- how -------------------------------------------------------------------------------------------------------

    def _ttl(self, wanted_s: float) -> float:
        """At most the grace of a new store: else a holder could renew too late after the store lost its data."""
        return min(wanted_s, self._ttl_s)

    def _keep(self, record: Stored, now: float) -> Lease:
        self._held[record.id] = record
        self._renewer.hold(record)
        if len(self._held) > LEASES_MAX:
            # The oldest: its holder is gone, or it would have been released or found lost.
            self._forget(next(iter(self._held)))
        return stored.lease_of(record, now)

    def _forget(self, id: str) -> bool:
        """True if it was known."""
        self._renewer.forget(id)
        return self._held.pop(id, None) is not None

    def _slot_refusal(self, ask: SlotAsk, reply: Reply) -> Exception:
        if reply.denied == TAKEN:
            return taken(ask.id, "a program's or another gateway's")
        wanted = ", ".join(f"{mib:,} MiB on {device}" for device, mib in sorted(ask.claim.items()))
        return refusal(ask.name, wanted, reply, {"needed_mib": dict(ask.claim)})

    async def _wait_in_line(self, record: Stored, asker: str, wait_ends_at: float) -> Reply:
        """Poll until it is granted or the wait is over. A store that is down may come back in time."""
        pause_s = POLL_FIRST_S
        while True:
            left_s = wait_ends_at - asyncio.get_running_loop().time()
            try:
                said = {"lease": record, "asker": asker, "is_last": left_s <= 0, "offers": self._offers}
                reply = await self._run("acquire", said)
            except StoreDown:
                if left_s <= 0:
                    raise
            else:
                is_settled = reply.lease or reply.denied == TAKEN or left_s <= 0
                if not reply.waiting and is_settled:
                    return reply
                # A store that forgets this waiter gives it its place back.
                record.arrival = reply.arrival or record.arrival
            await asyncio.sleep(max(0.0, min(pause_s * random.uniform(0.75, 1.0), left_s)))
            pause_s = min(POLL_MAX_S, pause_s * 2)

    async def _leave(self, record: Stored, asker: str) -> None:
        """Leave the queue at once. If that fails, the store drops the silent waiter a little later."""
        try:
            await asyncio.shield(self._give_up({"id": record.id, "asker": asker, "lease": record}))
        except StoreDown:
            return

    async def _give_up(self, arguments: Mapping[str, Any]) -> None:
        reply = await self._run("release", arguments)
        if reply.released:
            self._forget(arguments["id"])

    async def _renew(self, held: Sequence[tuple[str, int]], kind: str) -> Reply:
        known = [self._renewal(id, token) for id, token in held]
        reply = await self._run("renew", {"leases": known, "kind": kind})
        for id, record in reply.renewed.items():
            self._held[id] = record
        return reply

    def _renewal(self, id: str, token: int) -> dict[str, Any]:
        record = self._held.get(id)
        if record is None or int(record.token) != token:
            return {"id": id, "token": str(token)}
        return {"id": id, "token": str(token), "record": record}

    async def _run(self, operation: str, arguments: Mapping[str, Any]) -> Reply:
        asked = {**self._frame, "floor": str(self._highest), **arguments}
        reply = stored.decode(await self._answer(operation, stored.encode(asked)))
        self._highest = max(self._highest, int(reply.last))
        return reply

    async def _answer(self, operation: str, arguments: bytes) -> bytes:
        """Run a script and return its answer. The only place that talks to Redis. Raises StoreDown."""
        with cancels_heard():
            try:
                said: bytes = await self._scripts[operation](keys=self._keys, args=[arguments])
            except (redis_errors.RedisError, OSError) as error:
                raise translated(error, self._url) from None
            return said
