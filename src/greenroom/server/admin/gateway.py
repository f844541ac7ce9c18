"""What the management API needs of a running gateway: tables to read and operations to call.

Protocols only. `app.py` passes in the real gateway, tests a small one with real tables; neither is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from greenroom.config.diff import Changes
from greenroom.config.schema import Config
from greenroom.core.contract import Scheduler
from greenroom.core.model import ModelId, SlotId
from greenroom.errors import GreenroomError
from greenroom.http.body import BodyBudget
from greenroom.http.limits import EdgeStats
from greenroom.leases.records import Lease, LeaseAsk, LeaseStore
from greenroom.library.library import Library
from greenroom.routing.tasks import Tasks
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.loop import Tickets
from greenroom.runtime.memory.readings import Reading
from greenroom.runtime.memory.watch import MemoryLook
from greenroom.runtime.observer import Hub, Residency
from greenroom.runtime.operations.downloads import Downloads
from greenroom.runtime.operations.loads import Loads, MoveOrders
from greenroom.runtime.operations.pictures import PictureStore
from greenroom.runtime.operations.updates import Updates
from greenroom.runtime.record.usage_store import UsageStore
from greenroom.runtime.remote.fallback import CloudFallback
from greenroom.runtime.remote.spending import Spending
from greenroom.runtime.resolver import Resolver
from greenroom.runtime.slots import LiveSlots
from greenroom.server.inference.jobs.jobs import Jobs
from greenroom.server.inference.prefix_cache import CacheSalts
from greenroom.telemetry.activity import Activity
from greenroom.telemetry.history import History
from greenroom.telemetry.metrics import Metrics
from greenroom.tenancy.governance.gate import GovernanceGate
from greenroom.tenancy.key_ring import KeyRing
from greenroom.tenancy.limits import Limiter
from greenroom.tenancy.requestors import Requestors


class Loop(Protocol):
    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def failed_at(self) -> float:
        """When it last raised instead of deciding."""
        ...


class LoadFailures(Protocol):
    @property
    def failures(self) -> Mapping[ModelId, GreenroomError]:
        """Why the last load of a model failed, or how its process ended, until a load succeeds."""
        ...


class Decided(Protocol):
    @property
    def decisions(self) -> Sequence[Mapping[str, Any]]:
        """The last decisions with their reasons, newest last."""
        ...

    @property
    def residency(self) -> Residency:
        """Which model was where."""
        ...


class ManagedLeases(LeaseStore, Protocol):
    @property
    def lists_slots(self) -> bool:
        """Whether the models' own claims are among its leases."""
        ...

    def known(self) -> Sequence[Lease]:
        """All leases as of the last answer of the store. Does not ask the store."""
        ...

    async def acquire(self, ask: LeaseAsk, asker: str = "") -> Lease:
        """As in every store; `asker` identifies this call for `unheard`."""
        ...

    async def unheard(self, id: str, asker: str) -> None:
        """The caller left before its answer. Releases the lease, unless another call was answered with it."""
        ...

    async def find(self, id: str) -> Lease:
        """This lease as it is now. Raises LeaseLost, LeaseUnknown or StoreDown."""
        ...


class SharedStoreStatus(Protocol):
    """The state of the lease store that this gateway shares with others."""

    @property
    def failure(self) -> str | None:
        """Why it cannot be used at present."""
        ...

    @property
    def since(self) -> float:
        """Since when that is so, or since when it can be."""
        ...

    @property
    def grace_left_s(self) -> float:
        """For so long it grants nothing new, because it may have lost leases."""
        ...

    @property
    def slots_without_lease(self) -> int: ...


class Listening(Protocol):
    @property
    def addresses(self) -> Sequence[str]: ...

    @property
    def connections(self) -> int: ...

    @property
    def bodies(self) -> BodyBudget: ...

    @property
    def stats(self) -> EdgeStats: ...


class WatchedMemory(Protocol):
    """What the watch over memory has seen."""

    @property
    def kind(self) -> str:
        """Where the figures come from."""
        ...

    @property
    def last(self) -> MemoryLook: ...

    @property
    def failure(self) -> str | None:
        """Why it cannot look at present."""
        ...

    @property
    def sees_pids(self) -> bool: ...

    async def look_now(self) -> Reading: ...


class Gateway(Protocol):
    """Everything is read afresh at each request: a reload replaces the configuration as a whole."""

    @property
    def config(self) -> Config: ...

    @property
    def started_at(self) -> float:
        """Wall clock, for people."""
        ...

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

    @property
    def clock(self) -> Callable[[], float]:
        """The scheduler's clock."""
        ...

    @property
    def catalog(self) -> Catalog: ...

    @property
    def resolver(self) -> Resolver: ...

    @property
    def tasks(self) -> Tasks: ...

    @property
    def slots(self) -> LiveSlots: ...

    @property
    def hub(self) -> Hub: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def history(self) -> History: ...

    @property
    def activity(self) -> Activity: ...

    @property
    def tickets(self) -> Tickets: ...

    @property
    def loop(self) -> Loop: ...

    @property
    def operations(self) -> MoveOrders: ...

    @property
    def jobs(self) -> Jobs: ...

    @property
    def downloads(self) -> Downloads: ...

    @property
    def loads(self) -> Loads: ...

    @property
    def updates(self) -> Updates: ...

    @property
    def pictures(self) -> PictureStore: ...

    @property
    def usage(self) -> UsageStore | None:
        """None where none is kept."""
        ...

    @property
    def limiter(self) -> Limiter: ...

    @property
    def requestors(self) -> Requestors: ...

    @property
    def spending(self) -> Spending: ...

    @property
    def cloud_fallback(self) -> CloudFallback: ...

    @property
    def library(self) -> Library: ...

    @property
    def mover(self) -> LoadFailures: ...

    @property
    def observer(self) -> Decided: ...

    @property
    def leasing(self) -> ManagedLeases: ...

    @property
    def sharing(self) -> SharedStoreStatus | None:
        """None where this gateway keeps leases itself."""
        ...

    @property
    def memory_watch(self) -> WatchedMemory: ...

    @property
    def governance(self) -> GovernanceGate: ...

    @property
    def keys(self) -> KeyRing: ...

    def must_fetch(self, model: str) -> bool:
        """True if a load of this model would begin with a download."""
        ...

    @property
    def edge(self) -> Listening: ...

    @property
    def salts(self) -> CacheSalts:
        """By which engines keep prefixes apart that take a salt."""
        ...

    async def flush(self, slot: SlotId, tenant: str | None, tag: str | None) -> tuple[int, int]:
        """Empty this slot's prefix cache, or a tenant's or tag's part. Returns tokens removed and bytes freed.

        Raises EngineFault, in bounded time.
        """
        ...

    @property
    def path(self) -> Path | None:
        """The configuration file; None without one."""
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
