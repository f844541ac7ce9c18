"""What is said about leases, and what every store of them can do.

Owns the words. Never waits and never connects: the stores do. Devices are named as the store names them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from greenroom.core.model import cuda_name
from greenroom.errors import LeaseTaken

# The device that is no GPU.
HOST: Final = "host"
# What a program may call its lease. Those of slots have a slash, so that no program can name them.
PROGRAM_ID: Final = r"^[A-Za-z0-9._:@+-]+$"
# 128 of them are the program's; a gateway may put its tenant before.
PROGRAM_ID_MAX: Final = 160


def is_program_id(id: str) -> bool:
    return len(id) <= PROGRAM_ID_MAX and re.fullmatch(PROGRAM_ID, id) is not None


@dataclass(frozen=True, slots=True)
class Holder:
    """Which process holds a lease; a process id alone says nothing elsewhere, or later."""

    host: str
    pid: int
    start_ticks: int
    pid_ns: int


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """`mib` on each of `gpus` different GPUs, all or nothing. The same holder asking again for the same is asking once.

    A model that is split over GPUs says in `shares` how much it wants of each, and names them all.
    """

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
    gateway: str = ""  # Through which gateway it is held, where several share a store; empty: by the holder itself.

    @property
    def cuda_visible_devices(self) -> str:
        """What a program must have in that variable to see the GPUs of its lease, and no others."""
        names = (device.rpartition("/")[2] for device in sorted(self.claim))
        return ",".join(cuda_name(name) for name in names if name != HOST)


class LeaseStore(Protocol):
    async def acquire(self, ask: LeaseAsk) -> Lease:
        """Ask for memory and wait for it up to `wait_s`. Raises LeaseDenied with the numbers, LeaseTaken if the id
        names a lease of another holder, amount or device, BadRequest if it is no id, or StoreDown."""
        ...

    async def renew(self, id: str, token: int) -> Lease:
        """Say that the holder lives. Raises LeaseLost if it is not its any more, LeaseUnknown, or StoreDown."""
        ...

    async def release(self, id: str, token: int | None = None) -> None:
        """Give it back. What is not held, or not under this token, stays as it is. Raises StoreDown."""
        ...

    async def leases(self) -> list[Lease]:
        """Everything that is held or waited for. Raises StoreDown."""
        ...

    async def close(self) -> None: ...


def taken(id: str, whose: str) -> LeaseTaken:
    """The id names another lease than the one that is asked for."""
    return LeaseTaken(f"The lease {id} is {whose}; choose another id.", param="id")
