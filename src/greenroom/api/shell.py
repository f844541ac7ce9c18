"""What every route of the management API may use of a running gateway. Its other parts it is given by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from greenroom.access.key_ring import KeyRing
from greenroom.api.declared import Routes
from greenroom.config.schema import Config
from greenroom.core.model import ModelId
from greenroom.errors import GreenroomError, ShuttingDown
from greenroom.http.edge import Edge
from greenroom.leases.records import Lease
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.observer import Hub, Observer
from greenroom.runtime.resolver import Resolver
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import LiveSlots
from greenroom.serving.tasks import Tasks
from greenroom.telemetry.activity import Activity
from greenroom.telemetry.metrics import Metrics


class Shell(Protocol):
    """Everything is read afresh at each request: a reload replaces the configuration as a whole."""

    clock: Callable[[], float]
    """The scheduler's clock."""
    catalog: Catalog
    resolver: Resolver
    tasks: Tasks
    slots: LiveSlots
    loop: SchedulerLoop
    memory_watch: MemoryWatch
    hub: Hub
    observer: Observer
    metrics: Metrics
    activity: Activity

    @property
    def config(self) -> Config: ...

    @property
    def is_draining(self) -> bool: ...

    @property
    def is_starting(self) -> bool:
        """Until models can be asked for."""
        ...


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


class Overview(Shell, Protocol):
    """What the pages of state show beside that."""

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


class ShellRoutes(Routes):
    def __init__(self, shell: Shell) -> None:
        self._shell = shell
