"""What routes of the management API are given beside the `Shell`: the parts that the pages of state show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from greenroom.access.key_ring import KeyRing
from greenroom.core.model import ModelId
from greenroom.errors import GreenroomError, ShuttingDown
from greenroom.http.edge import Edge
from greenroom.leases.records import Lease
from greenroom.runtime.memory.watch import MemoryWatch
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


class Failures(Protocol):
    @property
    def failures(self) -> Mapping[ModelId, GreenroomError]:
        """Why the last load of a model failed, if it did."""
        ...


class Overview(Protocol):
    """What the pages of state show."""

    shell: Shell
    memory_watch: MemoryWatch
    activity: Activity
    started_at: float
    """Wall clock, for people."""
    edge: Edge
    keys: KeyRing

    @property
    def mover(self) -> Failures: ...

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
