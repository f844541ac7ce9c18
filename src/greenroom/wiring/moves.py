"""Moves, leases and remote models: what carries moves out, what grants their memory, what their failures mean.

Owns how these are made and joined, and whether leases and what remote models cost are kept by this gateway itself or in
a store that it shares with other gateways.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from greenroom.config.live import GatewayState
from greenroom.config.schema import Config
from greenroom.errors import ConfigError
from greenroom.features.leases.entry import LeasableMemory
from greenroom.features.leases.journal import JournalWriter
from greenroom.features.leases.local import LocalLeasing
from greenroom.features.leases.making_room import MakingRoom
from greenroom.features.leases.sharing import SharedLeasing, Sharing
from greenroom.leases.records import holder_of
from greenroom.leases.shared.store import Membership, SharedStore
from greenroom.process.proc import PortRange
from greenroom.process.state_dir import StateDir
from greenroom.runtime.memory.slot_memory import HostedMemory
from greenroom.runtime.moves.admission import AlwaysGranted, Cleanup, Grants, MemoryGrants, ModelRoots
from greenroom.runtime.moves.hosted_moves import HostedMoves
from greenroom.runtime.moves.load_errors import HostedErrors, LoadErrors, LostSlots
from greenroom.runtime.moves.mover import Mover, RemoteMoves
from greenroom.runtime.moves.opening import SlotOpener
from greenroom.runtime.moves.process_moves import ProcessMoves
from greenroom.runtime.remote.fallback import CloudFallback
from greenroom.runtime.remote.spending import Spending
from greenroom.runtime.workers.pool import WorkerPool
from greenroom.wiring.common import CommonParts, MemoryParts

if TYPE_CHECKING:
    from greenroom.runtime.remote.shared import SharedRemote


@dataclass(frozen=True, slots=True)
class LeaseParts:
    own: LocalLeasing
    """The leases kept here; none if a store is shared."""
    leasing: LocalLeasing | SharedLeasing
    """Serves the lease API."""
    sharing: Sharing | None = None

    @property
    def room(self) -> LocalLeasing | MakingRoom:
        """Takes the scheduler's decisions on leases."""
        return self.own if self.sharing is None else self.sharing.room

    @property
    def grants(self) -> Grants:
        """Asked by moves before they take memory."""
        return AlwaysGranted() if self.sharing is None else self.sharing.slots

    def begin(self) -> None:
        """Enter the leases of an earlier run, or wait for the store: that memory is in use."""
        if self.sharing is None:
            self.own.restore()
        else:
            self.sharing.begin()


def wire_leases(common: CommonParts, memory: MemoryParts, config: Config) -> LeaseParts:
    """Raises ConfigError if the client of the shared store is not installed."""
    leasable, wait_max_s = LeasableMemory(common.loop, common.device_names, memory.watch), config.leases.wait_max_s
    journal = JournalWriter(common.state_dir.path)
    own = LocalLeasing(common.loop, journal, leasable, common.hub, wait_max_s=wait_max_s)
    if config.leases.store is None:
        return LeaseParts(own, own)
    store = _open_store(config, config.leases.store)
    name = f"{common.state_dir.id}.{common.state_dir.run}"
    member = Membership(store, name, config.leases.ttl_s, holder_of(os.getpid()))
    sharing = Sharing(member, common.loop, memory.watch, common.hub)
    leasing = SharedLeasing(store, wait_max_s=wait_max_s, memory=leasable, sharing=sharing)
    return LeaseParts(own, leasing, sharing)


def _open_store(config: Config, url: str) -> SharedStore:
    """The store at this address. Raises ConfigError if its client is not installed."""
    try:
        # Imported only if used: it is slow to import.
        from greenroom.features.leases.renewer import RenewerProcess
        from greenroom.leases.shared.redis_store import RedisStore
    except ImportError as error:
        raise ConfigError("leases.store needs the client of Redis: pip install 'greenroom[redis]'.") from error
    host, ttl_s = config.leases.host or os.uname().nodename, config.leases.ttl_s
    return RedisStore(url, host, ttl_s=ttl_s, renewer=RenewerProcess(url, host, ttl_s))


@dataclass(frozen=True, slots=True)
class RemoteParts:
    spending: Spending
    fallback: CloudFallback
    # None where no store is shared with other gateways.
    shared: SharedRemote | None

    async def open(self) -> None:
        """Read the files, then hear what other gateways have to tell. Raises ConfigError."""
        self.spending.open()
        self.fallback.open()
        if self.shared is not None:
            await self.shared.open()

    async def close(self) -> None:
        try:
            if self.shared is not None:
                await self.shared.close()
        finally:
            await self.spending.close()


def wire_remote(state_dir: StateDir, gateway: GatewayState) -> RemoteParts:
    """Raises ConfigError if the client of the shared store is not installed."""
    spending, fallback = Spending(state_dir.path), CloudFallback(state_dir.path)
    url = gateway.config.limits.store or gateway.config.leases.store
    if url is None:
        return RemoteParts(spending, fallback, None)
    try:
        # Imported only if used: it is slow to import.
        from greenroom.runtime.remote.shared import SharedRemote
    except ImportError as error:
        raise ConfigError("limits.store needs the client for Redis: pip install 'greenroom[redis]'") from error
    # By a name that stays over restarts: its sums of today are counted once.
    shared = SharedRemote(url, state_dir.id, spending, fallback, gateway)
    return RemoteParts(spending, fallback, shared)


@dataclass(frozen=True, slots=True)
class MoveParts:
    workers: WorkerPool
    hosted: HostedMoves
    mover: Mover
    roots: ModelRoots


def wire_moves(common: CommonParts, memory: MemoryParts, leases: LeaseParts, spending: Spending) -> MoveParts:
    config = common.gateway.config
    cleanup, roots, ports = Cleanup(), ModelRoots(config), config.ports
    errors = LoadErrors(common.state_dir, common.catalog, common.loop)
    lost = LostSlots(errors, common.observer, memory.watch, common.loop)
    workers, hosted = _hosted(common, memory, leases, cleanup, lost, config, roots)
    processes = ProcessMoves(
        common.catalog,
        common.slots,
        common.state_dir,
        PortRange(ports.first, ports.last),
        memory.slot_memory,
        MemoryGrants(leases.grants, cleanup, memory.slot_memory),
        lost,
        roots,
    )
    mover = Mover(
        common.catalog,
        processes,
        hosted,
        RemoteMoves(common.slots, common.gateway, spending),
        memory.slot_memory,
        errors,
        common.observer,
        memory.watch,
        common.loop,
    )
    return MoveParts(workers, hosted, mover, roots)


def _hosted(
    common: CommonParts,
    memory: MemoryParts,
    leases: LeaseParts,
    cleanup: Cleanup,
    lost: LostSlots,
    config: Config,
    roots: ModelRoots,
) -> tuple[WorkerPool, HostedMoves]:
    times = common.timeouts
    hosted_memory = HostedMemory(common.loop, common.hosted_slots, memory.watch, timeouts=times.memory)
    workers = WorkerPool(
        common.state_dir,
        common.observer,
        lambda worker, exit: hosted.on_worker_lost(worker, exit),
        keeps_spare=config.memory.spare_worker,
        timeouts=times.workers,
    )
    common.hosted_slots.workers = workers.workers
    opener = SlotOpener(
        common.slots,
        common.state_dir,
        workers,
        common.observer,
        hosted_memory,
        HostedErrors(hosted_memory, memory.slot_memory),
        roots,
    )
    hosted = HostedMoves(
        common.hosted_slots,
        common.slots,
        opener,
        hosted_memory,
        MemoryGrants(leases.grants, cleanup, hosted_memory),
        lost,
        common.observer,
        common.loop,
    )
    return workers, hosted
