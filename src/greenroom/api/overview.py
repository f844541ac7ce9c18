"""What routes of the management API are given of the gateway beside its `Shell`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from greenroom.access.key_ring import KeyRing
from greenroom.config.diff import Changes
from greenroom.config.schema import Config
from greenroom.errors import ShuttingDown
from greenroom.http.edge import Edge
from greenroom.leases.records import Lease
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.moves.mover import Mover
from greenroom.runtime.shell import Shell
from greenroom.telemetry.activity import Activity


def refuse_while_draining(shell: Shell) -> None:
    """Raises ShuttingDown."""
    if shell.is_draining:
        raise ShuttingDown("The gateway is shutting down and takes no more orders.", retry_after_s=5.0)


class LeaseStore(Protocol):
    """The lease store that this gateway shares with others."""

    failure: str | None
    since: float

    @property
    def grace_left_s(self) -> float: ...

    @property
    def slots_without_lease(self) -> int: ...


class LeaseTable(Protocol):
    def known(self) -> Sequence[Lease]:
        """Leases of programs and, where a store is shared, of slots."""
        ...


class Overview(Protocol):
    """The gateway as its pages show it."""

    shell: Shell
    memory_watch: MemoryWatch
    activity: Activity
    started_at: float
    """Wall clock, for people."""
    began: float
    """The same moment by the scheduler's clock, which is never set."""
    edge: Edge
    keys: KeyRing
    mover: Mover
    path: Path | None
    """The configuration's file; None where the gateway was started without one."""

    @property
    def leasing(self) -> LeaseTable: ...

    @property
    def sharing(self) -> LeaseStore | None:
        """None where this gateway keeps leases itself."""
        ...

    @property
    def is_catching_up(self) -> bool:
        """Until what the file of the desired state said at the start was tried."""
        ...

    async def reread(self) -> Config:
        """The configuration as a reload would take it. Changes nothing. Raises ConfigError."""

    async def reload(self) -> Changes:
        """Read the configuration again and apply what changed. Raises ConfigError, and then nothing has changed."""
