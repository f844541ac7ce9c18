"""What the management API says of leases, and what can be asked for. The OpenAPI schema is generated from these.

Owns names and meaning of fields. Never reads the gateway.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from greenroom.config.kinds import MIB_MAX, SECONDS_MAX, Name, NotBool
from greenroom.leases.records import PROGRAM_ID, PROGRAM_ID_MAX
from greenroom.server.admin.priority_field import Priority
from greenroom.server.admin.views import Order, View

# A process id has at most 22 bits; a start time counts hundredths of a second.
_PID_MAX = 2**22
_NUMBER_MAX = 2**63 - 1
# More GPUs than any machine has.
GPUS_MAX = 1_024

LeaseName = Annotated[str, Field(min_length=1, max_length=128, pattern=PROGRAM_ID)]
# What a tenant's ids begin with in the store is not counted.
LeaseInPath = Annotated[str, Field(min_length=1, max_length=PROGRAM_ID_MAX, pattern=PROGRAM_ID)]
_Seconds = Annotated[float, Field(ge=0, le=SECONDS_MAX, allow_inf_nan=False), NotBool]


class HolderView(View):
    """Which process holds a lease. Where the gateway can see it, its end frees the memory at once."""

    host: Annotated[str, Field(max_length=256)]
    pid: Annotated[int, Field(ge=1, le=_PID_MAX), NotBool]
    start_ticks: Annotated[int, Field(ge=0, le=_NUMBER_MAX), NotBool]
    """When it began, in ticks since the machine did: field 22 of /proc/PID/stat."""
    pid_ns: Annotated[int, Field(ge=0, le=_NUMBER_MAX), NotBool]
    """The inode of /proc/PID/ns/pid: numbers mean something else in a container."""


class LeaseOrder(Order):
    """Memory on GPUs for a program that is not a model."""

    mib: Annotated[int, Field(ge=1, le=MIB_MAX), NotBool]
    """On each GPU."""
    gpus: Annotated[int, Field(ge=1, le=GPUS_MAX), NotBool] = 1
    """On so many different GPUs, all or nothing."""
    name: Name = "lease"
    """What it is for, for people."""
    devices: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=GPUS_MAX)] = ()
    """Only on these (gpu0, or a UUID or its beginning); on any when not given."""
    priority: Priority = "normal"
    """high, normal, low or a number: whom it makes leave, and who goes first."""
    preemptible: bool = False
    """Whether it may be asked to leave for somebody more urgent."""
    grace_s: _Seconds = 30.0
    """How long it may stay when it was asked to leave."""
    ttl_s: Annotated[float, Field(ge=1, le=3_600, allow_inf_nan=False), NotBool] | None = None
    """Lost when not renewed for so long; the gateway's leases.ttl_s when not given."""
    wait_s: _Seconds = 0.0
    """How long to wait for it; the answer comes when it is held. 0 takes what is free and makes nobody leave."""
    pid: Annotated[int, Field(ge=1, le=_PID_MAX), NotBool] | None = None
    """The process that holds it, as this machine numbers it; its end frees the memory at once."""
    holder: HolderView | None = None
    """The same for who may run elsewhere or in a container, where numbers mean something else."""
    id: LeaseName | None = None
    """Its name among leases: asking again with the same one, by the same holder and for the same memory, is asking
    once; anything else with it is refused. One is made up when not given."""


class LeaseView(View):
    id: str
    name: str
    kind: Literal["program", "slot"]
    """slot: a model of this gateway. It is neither renewed nor released here."""
    state: Literal["held", "pending", "waiting"]
    token: int
    """Grows with every grant, also over restarts: whoever shows a lower one is late."""
    claim: dict[str, int]
    """MiB by device."""
    cuda_visible_devices: str
    priority: int
    preemptible: bool
    ttl_s: float
    expires_in_s: float
    """Renew it before."""
    recall_in_s: float | None
    """It was asked to leave within so many seconds; below zero it is overdue. null: it was not asked to."""
    overdue: bool
    holder: HolderView | None


class LeaseList(View):
    leases: list[LeaseView]
    """Of programs in the order they were asked for, then models that hold memory."""


class RenewOrder(Order):
    token: Annotated[int, Field(ge=0, le=_NUMBER_MAX), NotBool]
