"""The records of leases, the protocol of every lease store, and the identity of holders.

Stores wait and connect; nothing here does. Devices are named as the store names them. A holder is a process, known by
host, pid namespace, pid and start time: a pid alone is not enough, since pids are reused and differ between containers.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from greenroom.core.model import LeaseId, OtherLease, cuda_name
from greenroom.errors import LeaseTaken

# The name of the device that is the host's memory.
HOST: Final = "host"
# Ids that programs may choose. Ids of slots contain a slash, so that no program can use them.
PROGRAM_ID: Final = r"^[A-Za-z0-9._:@+-]+$"
# 128 characters for the program; a gateway may put its tenant before them.
PROGRAM_ID_MAX: Final = 160


def is_program_id(id: str) -> bool:
    return len(id) <= PROGRAM_ID_MAX and re.fullmatch(PROGRAM_ID, id) is not None


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lease. A pid alone is not unique on other hosts, or later."""

    host: str
    pid: int
    start_ticks: int
    pid_ns: int


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """A request for `mib` on each of `gpus` different GPUs, all or nothing. Asking again for the same changes nothing.
    A model that is split over GPUs names them all and gives its share of each in `shares`."""

    id: str
    name: str
    mib: int
    gpus: int = 1
    devices: tuple[str, ...] = ()
    priority: int = 1
    preemptible: bool = False
    grace_s: float = 30.0
    ttl_s: float = 30.0
    wait_s: float = 0.0
    holder: Holder | None = None
    shares: Mapping[str, int] = field(default_factory=dict)

    def mib_on(self, device: str) -> int:
        return self.shares.get(device, 0) if self.shares else self.mib


@dataclass(frozen=True, slots=True)
class Lease:
    """`state` is held, pending or waiting; `kind` is program or slot. `token` grows with every grant of the store."""

    id: str
    name: str
    token: int
    claim: Mapping[str, int]
    priority: int
    preemptible: bool
    state: str
    ttl_s: float
    expires_in_s: float
    recall_in_s: float | None
    holder: Holder | None
    kind: str
    gateway: str = ""  # The gateway through which it is held in a shared store; empty: by the holder itself.

    @property
    def cuda_visible_devices(self) -> str:
        """The value of CUDA_VISIBLE_DEVICES that shows a program the GPUs of its lease and no others."""
        names = (device.rpartition("/")[2] for device in sorted(self.claim))
        return ",".join(cuda_name(name) for name in names if name != HOST)


class LeaseStore(Protocol):
    async def acquire(self, ask: LeaseAsk) -> Lease:
        """Ask for memory and wait for it up to `wait_s`. Raises LeaseDenied with the numbers, LeaseTaken if the id
        names a lease of another holder, amount or device, BadRequest for an invalid id, or StoreDown."""
        ...

    async def renew(self, id: str, token: int) -> Lease:
        """Renew it for another TTL. Raises LeaseLost if it is no longer held, LeaseUnknown, or StoreDown."""
        ...

    async def release(self, id: str, token: int | None = None) -> None:
        """Release it. A lease that is not held, or not under this token, is left alone. Raises StoreDown."""
        ...

    async def leases(self) -> list[Lease]:
        """All leases, held and waiting. Raises StoreDown."""
        ...

    async def close(self) -> None: ...


def taken(id: str, whose: str) -> LeaseTaken:
    """The error for an id that names another lease than the one that is asked for."""
    return LeaseTaken(f"The lease {id} is {whose}; choose another id.", param="id")


_PROC = Path("/proc")
_DEAD_STATES = frozenset({b"Z", b"X", b"x"})


def holder_of(pid: int) -> Holder | None:
    """The process with this pid, as this process sees it; None if there is none, or it has ended."""
    try:
        raw = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    namespace = _pid_ns(os.getpid())
    # The name in parentheses may itself hold spaces and parentheses.
    fields = raw.rpartition(b")")[2].split()
    if namespace is None or fields[0] in _DEAD_STATES:
        return None
    return Holder(os.uname().nodename, pid, int(fields[19]), namespace)


def is_here(holder: Holder) -> bool:
    """Whether the holder is in our pid namespace, so that it can be watched. Reads nothing after the first call."""
    return (os.uname().nodename, _pid_ns(os.getpid())) == (holder.host, holder.pid_ns)


@functools.lru_cache(maxsize=1)
def _pid_ns(me: int) -> int | None:
    """The pid namespace of this process. It never changes; a fork has another pid and looks again."""
    try:
        return (_PROC / "self" / "ns" / "pid").stat().st_ino
    except OSError:
        return None


def is_alive(holder: Holder) -> bool:
    """Whether this very process lives. Valid only if it `is_here`."""
    return holder_of(holder.pid) == holder


def has_ended(holder: Holder | None) -> bool:
    """Whether this process is one of those that can be watched, and lives no more."""
    return holder is not None and is_here(holder) and not is_alive(holder)


def core_id(lease: str) -> LeaseId:
    """The scheduler's id of this lease. The prefix keeps it apart from request ids: a caller may choose any id."""
    return LeaseId(f"lease:{lease}")


def lease_names(known: Iterable[Lease], others: Iterable[OtherLease], own: str = "") -> dict[LeaseId, str]:
    """What programs call their leases, here and through other gateways, by the scheduler's ids. Only those whose id in
    the store begins with `own`."""
    ours = {core_id(lease.id): lease.name for lease in known if lease.id.startswith(own)}
    return {other.id: other.holder for other in others if other.id.startswith(own)} | ours
