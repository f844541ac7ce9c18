"""What the management API needs of a running gateway: tables to read and operations to call.

A protocol only. `app.py` passes in the real gateway, tests a small one with real tables; neither is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from greenroom.api.declared import Routes
from greenroom.errors import ShuttingDown

if TYPE_CHECKING:
    from greenroom.access.key_ring import KeyRing
    from greenroom.access.limits import Limiter
    from greenroom.access.requestors import Requestors
    from greenroom.access.usage_store import UsageStore
    from greenroom.config.diff import Changes
    from greenroom.config.schema import Config
    from greenroom.core.model import ModelId, SlotId
    from greenroom.features.governance.gate import GovernanceGate
    from greenroom.features.jobs.jobs import Jobs
    from greenroom.features.leases.local import LocalLeasing
    from greenroom.features.leases.sharing import SharedLeasing, Sharing
    from greenroom.features.library.downloads import Downloads
    from greenroom.features.operations.loads import Loads
    from greenroom.features.operations.moves import OperatorMoves
    from greenroom.features.pictures.store import PictureStore
    from greenroom.features.versions.updates import Updates
    from greenroom.http.edge import Edge
    from greenroom.library.library import Library
    from greenroom.runtime.catalogue import Catalog, Entry
    from greenroom.runtime.loop import Tickets
    from greenroom.runtime.memory.watch import MemoryWatch
    from greenroom.runtime.moves.mover import Mover
    from greenroom.runtime.observer import Hub, Observer
    from greenroom.runtime.remote.fallback import CloudFallback
    from greenroom.runtime.remote.spending import Spending
    from greenroom.runtime.resolver import Resolver
    from greenroom.runtime.scheduler_loop import SchedulerLoop
    from greenroom.runtime.slots import LiveSlots
    from greenroom.serving.prefix_cache import CacheSalts
    from greenroom.serving.tasks import Tasks
    from greenroom.telemetry.activity import Activity
    from greenroom.telemetry.history import History
    from greenroom.telemetry.metrics import Metrics


class Gateway(Protocol):
    """Everything is read afresh at each request: a reload replaces the configuration as a whole."""

    path: Path | None
    """The configuration file; None without one."""
    started_at: float
    """Wall clock, for people."""
    clock: Callable[[], float]
    """The scheduler's clock."""
    catalog: Catalog
    resolver: Resolver
    library: Library
    tasks: Tasks
    slots: LiveSlots
    loop: SchedulerLoop
    tickets: Tickets
    mover: Mover
    memory_watch: MemoryWatch
    leasing: LocalLeasing | SharedLeasing
    sharing: Sharing | None
    """The lease store that this gateway shares with others; None where it keeps leases itself."""
    operations: OperatorMoves
    loads: Loads
    downloads: Downloads
    updates: Updates
    jobs: Jobs
    pictures: PictureStore
    hub: Hub
    observer: Observer
    metrics: Metrics
    history: History
    activity: Activity
    usage: UsageStore | None
    """None where none is kept."""
    edge: Edge
    keys: KeyRing
    limiter: Limiter
    requestors: Requestors
    governance: GovernanceGate
    spending: Spending
    cloud_fallback: CloudFallback
    salts: CacheSalts
    """By which engines keep prefixes apart that take a salt."""

    @property
    def config(self) -> Config: ...

    @property
    def is_draining(self) -> bool: ...

    @property
    def is_starting(self) -> bool:
        """Until models can be asked for."""
        ...

    @property
    def is_catching_up(self) -> bool:
        """Until what the file of the desired state said at the start was tried."""
        ...

    def must_fetch(self, model: str) -> bool:
        """True if a load of this model would begin with a download."""
        ...

    async def flush(self, slot: SlotId, tenant: str | None, tag: str | None) -> tuple[int, int]:
        """Empty this slot's prefix cache, or a tenant's or tag's part. Returns tokens removed and bytes freed.

        Raises EngineFault, in bounded time.
        """
        ...

    async def reread(self) -> Config:
        """The configuration as a reload would take it. Changes nothing. Raises ConfigError."""
        ...

    async def pin(self, model: ModelId, pinned: bool) -> None:
        """Let nothing evict this model, or no longer."""
        ...

    async def reload(self) -> Changes:
        """Read the configuration again. Raises ConfigError, and then nothing has changed."""
        ...


def refuse_while_draining(gateway: Gateway) -> None:
    """Raises ShuttingDown."""
    if gateway.is_draining:
        raise ShuttingDown("The gateway is shutting down and takes no more orders.", retry_after_s=5.0)


def expect_movable(gateway: Gateway, entry: Entry) -> None:
    """Raises UpdateInProgress for a version that does not serve yet."""
    if (name := entry.spec.version_of) is not None:
        raise gateway.updates.moves_only(entry.id, name)


class GatewayRoutes(Routes):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
