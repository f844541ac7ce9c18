"""Leases over HTTP: memory for programs that are not models. Asked for, renewed, looked at, given back.

Owns how leases are requested and shown, and the permissions: a key without `admin` sees and ends only leases of its own
tenant. The scheduler decides which are granted. A caller that leaves while it waits gives up; a caller that leaves
before it is answered holds no lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections import Counter
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Annotated, Literal, cast

from fastapi import Query
from pydantic import ConfigDict, Field
from starlette.requests import Request

from greenroom.access.keys import Permission, cap, parse_priority
from greenroom.api.asgi import caller_of
from greenroom.api.declared import NEVER, NeededOperation, Routes, SignedCall, delete, get, post
from greenroom.api.views import FromList, GovernedOrder, Order, Priority, View
from greenroom.base.names import public_name
from greenroom.config.kinds import MIB_MAX, SECONDS_MAX, Label
from greenroom.core.view import SlotFacts
from greenroom.errors import BadRequest, GreenroomError, LeaseDenied, TooManyOfKey
from greenroom.features.leases.local import LEASES_MAX, LocalLeasing
from greenroom.features.leases.sharing import SharedLeasing
from greenroom.leases.records import PROGRAM_ID, PROGRAM_ID_MAX, Holder, Lease, LeaseAsk, holder_of
from greenroom.runtime.shell import Shell

# A process id has at most 22 bits; a start time counts hundredths of a second.
_PID_MAX = 2**22
_NUMBER_MAX = 2**63 - 1
# More GPUs than any machine has.
GPUS_MAX = 1_024

LeaseName = Annotated[str, Field(min_length=1, max_length=128, pattern=PROGRAM_ID)]
# Without the prefix of a tenant's ids in the store.
LeaseInPath = Annotated[str, Field(min_length=1, max_length=PROGRAM_ID_MAX, pattern=PROGRAM_ID)]
_Seconds = Annotated[float, Field(ge=0, le=SECONDS_MAX, allow_inf_nan=False)]


class HolderView(View):
    """The process that holds a lease. If the gateway can see it, its end frees the memory at once."""

    model_config = ConfigDict(strict=True)

    host: Annotated[str, Field(max_length=256)]
    pid: Annotated[int, Field(ge=1, le=_PID_MAX)]
    start_ticks: Annotated[int, Field(ge=0, le=_NUMBER_MAX)]
    """When it started, in ticks since boot: field 22 of /proc/PID/stat."""
    pid_ns: Annotated[int, Field(ge=0, le=_NUMBER_MAX)]
    """The inode of /proc/PID/ns/pid: process ids differ inside a container."""


class LeaseOrder(GovernedOrder):
    """Memory on GPUs for a program that is not a model."""

    mib: Annotated[int, Field(ge=1, le=MIB_MAX)]
    """On each GPU."""
    gpus: Annotated[int, Field(ge=1, le=GPUS_MAX)] = 1
    """The number of different GPUs, all or nothing."""
    name: Label = "lease"
    """A name for people."""
    devices: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=GPUS_MAX), FromList] = ()
    """Only on these (gpu0, or a UUID or its beginning); on any when not given."""
    priority: Priority = "normal"
    """high, normal, low or a number. Decides what it may evict, and its place in the queue."""
    preemptible: bool = False
    """Whether it may be recalled for something more urgent."""
    grace_s: _Seconds = 30.0
    """How long the holder may stay after a recall."""
    ttl_s: Annotated[float, Field(ge=1, le=3_600, allow_inf_nan=False)] | None = None
    """The lease is lost if it is not renewed for this long; the gateway's leases.ttl_s when not given."""
    wait_s: _Seconds = 0.0
    """How long to wait; the answer comes when the lease is held. 0 takes only free memory and evicts nothing."""
    pid: Annotated[int, Field(ge=1, le=_PID_MAX)] | None = None
    """The holder's process id on this machine; its end frees the memory at once."""
    holder: HolderView | None = None
    """The holder, if it may run on another machine or in a container, where process ids differ."""
    id: LeaseName | None = None
    """The lease's id. Asking again with the same id, holder and memory returns the same lease; anything else with that
    id is refused. Generated when not given."""


class LeaseView(View):
    id: str
    name: str
    kind: Literal["program", "slot"]
    """slot: a model of this gateway. It is neither renewed nor released here."""
    state: Literal["held", "pending", "waiting"]
    token: int
    """Grows with every grant, also across restarts: a lower token is outdated."""
    claim: dict[str, int]
    """MiB by device."""
    cuda_visible_devices: str
    priority: int
    preemptible: bool
    ttl_s: float
    expires_in_s: float
    """Renew it before this time has passed."""
    recall_in_s: float | None
    """Seconds left after a recall; below zero it is overdue. null: not recalled."""
    overdue: bool
    holder: HolderView | None


class LeaseList(View):
    leases: list[LeaseView]
    """Leases of programs in order of request, then models that hold memory."""


class RenewOrder(Order):
    token: Annotated[int, Field(ge=0, le=_NUMBER_MAX)]


PATH = "/api/v1/leases"
_ONE = PATH + "/{lease_id}"

Token = Annotated[int | None, Query(ge=0, le=2**63 - 1, description="Only if it was granted with this token.")]


class _CallerLeft(LeaseDenied):
    """Ends the call; its caller is gone."""


def _lease(call: SignedCall) -> NeededOperation | None:
    """A lease that does not wait takes free memory only; any other may evict models, and the scheduler says which."""
    wait_s = call.fields.get("wait_s", 0)
    takes_free = isinstance(wait_s, int | float) and not isinstance(wait_s, bool) and wait_s == 0
    return None if takes_free else NeededOperation("model-unload", None, unbound=("id", "pid", "holder"))


class LeaseRoutes(Routes):
    def __init__(self, shell: Shell, leasing: LocalLeasing | SharedLeasing) -> None:
        self._shell = shell
        self._leasing = leasing
        # The ids of leases that are being asked for.
        self._asked: Counter[str] = Counter()

    @post(PATH, needs=Permission.LEASE, signed=_lease, status_code=201)
    async def acquire_lease(self, request: Request, order: LeaseOrder) -> LeaseView:
        """Get memory for another program. Held until it is released, its holder ends, or it is not renewed."""
        ask, count = self._ask(request, order), self._shell.metrics.lease_asked
        own = own_prefix(request)
        self._expect_share(own, ask.id)
        self._asked[ask.id] += 1
        try:
            with _called_as_asked(own):
                lease = await self._while_listened_to(request, ask)
        except _CallerLeft:
            count("given_up")
            raise
        except GreenroomError:
            count("denied")
            raise
        finally:
            self._asked -= Counter((ask.id,))
        count("granted")
        return shown(lease, own)

    def _expect_share(self, own: str, id: str) -> None:
        """For one more lease of this tenant. Raises TooManyOfKey. An admin's key may have all."""
        if not own:
            return
        others = {*(lease.id for lease in self._leasing.known()), *self._asked} - {id}
        if sum(one.startswith(own) for one in others) >= LEASES_MAX // 2:
            raise TooManyOfKey(
                f"The keys of your tenant have {LEASES_MAX // 2:,} leases, as many as they may have. Release one.",
                retry_after_s=30.0,
            )

    @get(PATH, needs=Permission.LEASE)
    async def list_leases(self, request: Request) -> LeaseList:
        """Leases held or waited for, and models that hold memory; without an admin's key only the tenant's leases."""
        leasing, own = self._leasing, own_prefix(request)
        leases = [shown(lease, own) for lease in await leasing.leases() if lease.id.startswith(own)]
        if leasing.lists_slots or own:
            return LeaseList(leases=leases)
        slots = self._shell.loop.scheduler.view.slots.values()
        return LeaseList(leases=[*leases, *(_slot_shown(slot) for slot in slots if slot.lease is None)])

    @get(_ONE, needs=Permission.LEASE)
    async def show_lease(self, request: Request, lease_id: LeaseInPath) -> LeaseView:
        """One lease as it is now, also one that still waits."""
        own = own_prefix(request)
        with _called_as_asked(own):
            return shown(await self._leasing.find(own + lease_id), own)

    @delete(_ONE, needs=Permission.LEASE, signed=NEVER, status_code=204)
    async def release_lease(self, request: Request, lease_id: LeaseInPath, token: Token = None) -> None:
        """Release a lease. Releasing it again, or with a wrong token, changes nothing."""
        await self._leasing.release(own_prefix(request) + lease_id, token)

    @post(f"{_ONE}/renew", needs=Permission.LEASE, signed=NEVER)
    async def renew_lease(self, request: Request, lease_id: LeaseInPath, order: RenewOrder) -> LeaseView:
        """Renew a lease. The answer says whether it was recalled."""
        own = own_prefix(request)
        with _called_as_asked(own):
            return shown(await self._leasing.renew(own + lease_id, order.token), own)

    def _ask(self, request: Request, order: LeaseOrder) -> LeaseAsk:
        return LeaseAsk(
            id=own_prefix(request) + (order.id or f"l-{secrets.token_hex(8)}"),
            name=order.name,
            mib=order.mib,
            gpus=order.gpus,
            devices=order.devices,
            priority=_priority(request, order),
            preemptible=order.preemptible,
            grace_s=order.grace_s,
            ttl_s=order.ttl_s or self._shell.config.leases.ttl_s,
            wait_s=order.wait_s,
            holder=_holder(request, order),
        )

    async def _while_listened_to(self, request: Request, ask: LeaseAsk) -> Lease:
        leasing, call = self._leasing, secrets.token_hex(8)
        acquiring = asyncio.ensure_future(leasing.acquire(ask, call))
        # The body was read before, so the next message is the caller's disconnect.
        leaving = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((acquiring, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not leaving.done():
                return acquiring.result()
            if acquiring.done() and acquiring.exception() is None:
                # Another call with the same id may have been answered meanwhile, and its caller holds the lease.
                await leasing.unheard(ask.id, call)
            raise _CallerLeft("The caller has left.")
        finally:
            leaving.cancel()
            # Not awaited: it stops at once when it is cancelled.
            acquiring.cancel()


def own_prefix(request: Request) -> str:
    """The prefix of this caller's lease ids in the store, so that no tenant can name another tenant's lease. Empty for
    an admin's key, which names every lease by its whole id."""
    caller = caller_of(request)
    if caller.admin or caller.tenant is None:
        return ""
    return f"t{hashlib.sha256(caller.tenant.encode()).hexdigest()[:16]}."


@contextlib.contextmanager
def _called_as_asked(own: str) -> Iterator[None]:
    """Errors name leases as their caller does, without the prefix."""
    try:
        yield
    except GreenroomError as error:
        if own:
            error.message, error.public = error.message.replace(own, ""), error.public.replace(own, "")
        raise


def _priority(request: Request, order: LeaseOrder) -> int:
    """The priority asked for, or the best that the key allows: as for requests to models."""
    return cap(parse_priority(order.priority, param="priority"), caller_of(request).priority_max)


def _holder(request: Request, order: LeaseOrder) -> Holder | None:
    if order.holder is not None:
        return Holder(**order.holder.model_dump())
    if order.pid is None:
        return None
    if request.client is None or not ip_address(request.client.host).is_loopback:
        raise BadRequest("pid is for callers on the gateway's machine; give holder, or neither.", param="pid")
    holder = holder_of(order.pid)
    if holder is None:
        raise BadRequest(f"There is no process {order.pid} on the gateway's machine.", param="pid")
    return holder


def shown(lease: Lease, own: str = "") -> LeaseView:
    return LeaseView(
        id=lease.id.removeprefix(own),
        name=lease.name,
        kind=cast(Literal["program", "slot"], lease.kind),
        state=cast(Literal["held", "pending", "waiting"], lease.state),
        token=lease.token,
        claim=dict(lease.claim),
        cuda_visible_devices=lease.cuda_visible_devices,
        priority=lease.priority,
        preemptible=lease.preemptible,
        ttl_s=lease.ttl_s,
        expires_in_s=round(lease.expires_in_s, 3),
        recall_in_s=None if lease.recall_in_s is None else round(lease.recall_in_s, 3),
        overdue=lease.recall_in_s is not None and lease.recall_in_s <= 0,
        holder=None if lease.holder is None else HolderView.model_validate(lease.holder, from_attributes=True),
    )


def _slot_shown(slot: SlotFacts) -> LeaseView:
    """A model's own claim, so that one list shows all that hold memory."""
    claim = {str(device): mib for device, mib in slot.claim.items()}
    held = Lease(
        slot.id,
        public_name(slot.model),
        0,
        claim,
        slot.spec.priority,
        not slot.spec.pinned,
        "pending" if slot.planned is not None else "held",
        0.0,
        0.0,
        None,
        None,
        "slot",
    )
    return shown(held)
