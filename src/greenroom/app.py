"""Wiring: a configuration becomes a running gateway. The only file that names every concrete class.

Owns start, reload and shutdown. Everything else is handed what it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

from greenroom.config import loader, plugins
from greenroom.config.diff import Changes, diff, refuse_restart
from greenroom.config.limits import limits_of
from greenroom.config.problems import open_door
from greenroom.config.schema import Config, Server
from greenroom.core.events import ConfigChanged, Event, ShutdownAsked
from greenroom.core.model import DeviceId, DeviceKind, ModelId
from greenroom.core.scheduler import Scheduler
from greenroom.errors import ConfigError
from greenroom.memory.book import NeedBook
from greenroom.memory.devices import DeviceNames, devices
from greenroom.memory.leases.holder import holder_of
from greenroom.memory.leases.opening import open_store
from greenroom.memory.probe import Probe, Reading
from greenroom.process import orphans
from greenroom.process.ports import PortRange
from greenroom.process.state_dir import StateDir
from greenroom.proxy.edge import Edge
from greenroom.proxy.hosts import HostRule
from greenroom.proxy.limits import limits_for
from greenroom.runtime import build
from greenroom.runtime.beside import beside
from greenroom.runtime.catalog import Catalog, Draft
from greenroom.runtime.effects import AsyncEffects
from greenroom.runtime.first_look import first_look
from greenroom.runtime.learned import LearnedTimes
from greenroom.runtime.lease_devices import leasable_mib
from greenroom.runtime.lease_log import LeaseLog
from greenroom.runtime.leasing import Leasing
from greenroom.runtime.loop import SchedulerLoop
from greenroom.runtime.memory_owners import MemoryOwners
from greenroom.runtime.memory_watch import MemoryWatch
from greenroom.runtime.mover import Mover
from greenroom.runtime.needs import Needs, warn
from greenroom.runtime.observer import Observer
from greenroom.runtime.operations import Operations
from greenroom.runtime.recording import ActivityRecorder, EventRecorder
from greenroom.runtime.rejections import Rejections
from greenroom.runtime.shared_leasing import SharedLeasing
from greenroom.runtime.sharing import Sharing
from greenroom.runtime.slot_memory import SlotMemory
from greenroom.runtime.slots import Slots
from greenroom.runtime.tickets import Desk
from greenroom.runtime.whole_file import replace_file
from greenroom.server.asgi import AsgiBridge
from greenroom.server.ask import AskReader
from greenroom.server.front import FrontDoor
from greenroom.server.inference import Inference
from greenroom.server.management import make_management
from greenroom.server.settings import Settings
from greenroom.telemetry.activity import Activity
from greenroom.telemetry.hub import Hub
from greenroom.telemetry.logs import get_logger
from greenroom.telemetry.logs import setup as setup_logs
from greenroom.telemetry.metrics import Metrics
from greenroom.tenancy.keys import Keys
from greenroom.tenancy.tenants import Tenants

_log = get_logger("app")

# After the drain, engines get their own time to stop; nothing else may hold the exit up longer than this.
STOP_MAX_S = 60.0
# The last of all: what is still to be written to disk.
WRITE_MAX_S = 10.0
# A header is read in milliseconds; thousands of models on a slow disk take seconds.
LOOK_AT_MODELS_S = 60.0
# Allocations before each generation is looked at; the first is 700 by default.
GC_THRESHOLDS = (20_000, 20, 20)


class App:
    """One gateway. `start` it, wait for `closed`, or `reload` and `shut_down` it."""

    def __init__(
        self,
        config: Config,
        path: Path | None,
        state_dir: StateDir,
        reread: Callable[[], Config] | None,
        probe: Probe,
        seen: Reading,
    ) -> None:
        """`seen` is the probe's first look."""
        self.config = config
        self.path = path
        self._reread = reread
        self.started_at = time.time()
        self.is_draining = False
        # Asked to stop a second time; further times change nothing.
        self._hurries = False
        self.closed = asyncio.Event()
        self.clock = asyncio.get_running_loop().time
        self.settings = Settings.of(config.server)
        self._state_dir = state_dir
        self._reloading = asyncio.Lock()
        self._shutdown: asyncio.Task[None] | None = None

        self.catalog, self.slots, self.hub = Catalog(), Slots(), Hub()
        self.metrics, self.activity = Metrics(self.catalog.is_known), Activity()
        self.observer = Observer(self.hub, self.metrics)
        self.effects = AsyncEffects(self.slots, self.observer, self.clock)
        self._wire_scheduler(config.server)
        self._wire_memory(probe, seen)
        self._wire_leases(config)
        self.desk = Desk(self.post, self.clock)
        ports = PortRange(config.ports.first, config.ports.last)
        self.mover = Mover(
            self.catalog,
            self.slots,
            state_dir,
            ports,
            self.observer,
            self._post_and_look,
            self.clock,
            self.slot_memory,
            None if self.sharing is None else self.sharing.slots,
        )
        rejections = Rejections(self.mover.failures, lambda: self.is_draining, self._is_ready, self._is_whole)
        leases = self._own_leases if self.sharing is None else self.sharing.room
        self.effects.connect(self.post, self.mover, self.desk.open, rejections, leases)
        self.operations = Operations(self.effects, self.mover, self.post, self.clock)
        self.learned = LearnedTimes(state_dir.path, self.loop.scheduler.learned, self.catalog)
        self._wire_server(config.server)

    def _wire_scheduler(self, server: Server) -> None:
        """Everything is posted by `post`, so that what is written down is what the scheduler was given."""
        self._events_file = EventRecorder(Path(server.record_events)) if server.record_events else None
        recorder = self._events_file
        effects = self.effects if recorder is None else recorder.watching(self.effects)
        self.loop = SchedulerLoop(Scheduler(effects, plugins.POLICIES, plugins.SWAPPERS_BY_NAME))
        self.post = self.loop.post if recorder is None else recorder.posting(self.loop.post)

    def _wire_memory(self, probe: Probe, seen: Reading) -> None:
        self.device_names = DeviceNames(seen.gpus)
        self.catalog.device_of = self.device_names.expected
        state, run = self.loop.scheduler.state, self._state_dir.identity("")
        owners = MemoryOwners(state, self.slots, lambda: self._own_leases.owners(), run)
        every_s = self.config.memory.look_every_s
        self.memory_watch = MemoryWatch(probe, owners, self.post, self.clock, every_s, seen)
        kinds = {DeviceId(gpu.uuid): gpu.name for gpu in seen.gpus}
        self.needs = self.catalog.needs = Needs(NeedBook(self._state_dir.path, replace_file, warn), kinds)
        self.slot_memory = SlotMemory(state, self.catalog, self.needs, self.memory_watch, self.post, self.clock)

    def _wire_leases(self, config: Config) -> None:
        """Kept by this gateway itself, or in a store that it shares with others."""
        self.sharing: Sharing | None = None
        self._own_leases = Leasing(
            self._post_and_look,
            self.clock,
            LeaseLog(self._state_dir.path),
            wait_max_s=config.leases.wait_max_s,
            claim_of=lambda slot: self.loop.scheduler.state.slots[slot].claim,
            free_mib=lambda: leasable_mib(self.loop.scheduler.state.ledger),
            device_named=self.device_names.id_of,
            room_for=self.memory_watch.room_for,
            tell=self.hub.publish,
        )
        self.leasing: Leasing | SharedLeasing = self._own_leases
        if config.leases.store is not None:
            self._share(config, config.leases.store)

    def _share(self, config: Config, url: str) -> None:
        store = open_store(config, url)
        self.sharing = Sharing(
            store,
            f"{self._state_dir.id}.{self._state_dir.run}",
            self.loop.scheduler.state,
            self._post_and_look,
            self.clock,
            ttl_s=config.leases.ttl_s,
            holder=holder_of(os.getpid()),
            reading=lambda: self.memory_watch.last.reading,
            look=self.memory_watch.look_now,
            nudge=self.memory_watch.nudge,
            tell=self.hub.publish,
        )
        self.leasing = SharedLeasing(
            store,
            wait_max_s=config.leases.wait_max_s,
            device_named=self.device_names.id_of,
            room_for=self.memory_watch.room_for,
        )

    def _post_and_look(self, event: Event) -> None:
        """Moves, lost engines and leases change what is used: memory is looked at soon after."""
        self.post(event)
        self.memory_watch.nudge()

    def _wire_server(self, server: Server) -> None:
        self.tenants = Tenants()
        self._activity_file = ActivityRecorder(Path(server.record_activity)) if server.record_activity else None
        reader = AskReader(
            self.catalog,
            self.tenants,
            lambda: self.settings.heartbeat,
            lambda: self.config.scheduler.keep_alive_max_s,
        )
        self.inference = Inference(
            reader,
            self.loop,
            self.desk,
            self.activity,
            self.metrics,
            lambda: self.settings,
            self.clock,
            None if self._activity_file is None else self._activity_file.add,
        )
        self.management = AsgiBridge(make_management(self))
        self.door = FrontDoor(self.inference, self.management, lambda: self.settings)
        door = self.door
        self.edge = Edge(admit=door.admit, handle=door.handle, refuse=door.refuse, limits=limits_for(server))
        self._open_door(server)

    def _open_door(self, server: Server) -> None:
        self.door.keys = Keys(server.api_keys)
        self.door.hosts = HostRule((server.host, *server.allowed_hosts), server.allowed_origins)

    def _is_ready(self, model: ModelId) -> bool:
        return any(slot.is_serving for slot in self.loop.scheduler.state.slots_of(model))

    def _is_whole(self, model: ModelId) -> bool:
        """Whether there are several GPUs and this model can be put on one of them only."""
        state = self.loop.scheduler.state
        gpus = sum(device.kind is DeviceKind.GPU for device in state.ledger.devices.values())
        return gpus > 1 and model in state.models and not state.models[model].spec.can_split

    # --- start ----------------------------------------------------------------------------------------------------

    @classmethod
    async def start(cls, config: Config, path: Path | None = None, reread: Callable[[], Config] | None = None) -> App:
        """Clear up after an earlier run, then serve. Raises ConfigError, StateDirBusy or OSError.

        `reread` gives the configuration anew at a reload; without it the file at `path` is read.
        """
        _refuse_open_door(config)
        plugins.require(limits_of(config))
        state_dir = StateDir.open(config.state_dir)
        try:
            if ended := await orphans.sweep(state_dir.prefix, spare=frozenset()):
                _log.warning("ended what an earlier run left", processes=ended)
            probe, seen = await first_look(config)
            app = cls(config, path, state_dir, reread, probe, seen)
            await app._open(config.server)
        except BaseException:
            state_dir.close()
            raise
        app._begin()
        if app.sharing is not None:
            await app.sharing.open()
        _log.info("serving", address=app.edge.addresses[0], models=len(app.catalog), build=build.NAME)
        return app

    async def _open(self, server: Server) -> None:
        """Listen, then open the recordings: a start that fails must not push out those of an earlier run."""
        await self.edge.listen(host=server.host, port=server.port)
        try:
            # The events last, because only they put something aside.
            for file in (self._activity_file, self._events_file):
                if file is not None:
                    file.open()
        except BaseException:
            await self.edge.close()
            self.edge.abort()
            raise

    def _begin(self) -> None:
        specs = self.catalog.fill(self.config)
        # Leases of an earlier run come before any model: their memory is in use.
        known = devices(self.config, self.memory_watch.last.reading)
        self.post(ConfigChanged(self.clock(), devices=known, limits=limits_of(self.config)))
        if self.sharing is None:
            self._own_leases.restore()
        else:
            self.sharing.begin()
        # And what strangers use is known before anything is loaded beside them.
        self.memory_watch.tell_first()
        learned = self.learned.recall(spec.id for spec in specs)
        self.post(ConfigChanged(self.clock(), models=specs, learned=learned))
        self.learned.start()
        self.memory_watch.start()
        # Everything made so far stays, and requests leave no cycles: the collector has little to find and, with its
        # usual thresholds, would take a quarter of the time of a request.
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)

    # --- reload ---------------------------------------------------------------------------------------------------

    async def reload(self) -> Changes:
        """Read the file again and apply what changed. Raises ConfigError, and then nothing has changed."""
        async with self._reloading:
            config = await asyncio.to_thread(self._reread or self._read_file)
            changes = diff(self.config, config)
            refuse_restart(changes)
            _refuse_open_door(config)
            plugins.require(limits_of(config))
            self._apply(config, changes, await self._drafted(config, changes))
            return changes

    async def _drafted(self, config: Config, changes: Changes) -> Draft:
        """Headers of models are read beside the loop: a file server that hangs must not stop those who are served."""
        try:
            async with asyncio.timeout(LOOK_AT_MODELS_S):
                return await beside(lambda: self.catalog.draft(config, changes), "look at models")
        except TimeoutError:
            raise ConfigError(
                f"The files of models could not be looked at within {LOOK_AT_MODELS_S:g} s, and nothing was changed. "
                "Look whether their disk answers, and reload again."
            ) from None

    def _read_file(self) -> Config:
        if self.path is None:
            raise ConfigError("This gateway was started without a configuration file; there is nothing to reload.")
        return loader.load(self.path).config

    def _apply(self, config: Config, changes: Changes, draft: Draft) -> None:
        specs = self.catalog.take(draft)
        self.config = config
        self.settings = Settings.of(config.server)
        setup_logs(config.log.level.value, config.log.format.value)
        self._open_door(config.server)
        removed = tuple(ModelId(model) for model in changes.removed)
        learned = self.learned.recall(ModelId(model) for model in changes.added)
        self.post(
            ConfigChanged(
                self.clock(), models=specs, removed=removed, limits=limits_of(config), learned=learned or None
            )
        )
        self.slots.forget_logs(frozenset(config.models))
        for model in removed:
            self.mover.failures.pop(model, None)
        told = {name: list(getattr(changes, name)) for name in ("added", "changed", "relabelled", "removed", "at_once")}
        _log.info("reloaded", **{name: len(ids) for name, ids in told.items()})
        self.hub.publish("reload", told)

    # --- shutdown -------------------------------------------------------------------------------------------------

    def shut_down(self) -> None:
        """Begin to stop: running answers may finish within `drain_s`. A second call does not wait for them."""
        if self._hurries:
            return
        self._hurries = self.is_draining
        drain_s = 0.0 if self._hurries else self.config.server.drain_s
        _log.info("shutting down", drain_s=drain_s)
        self.is_draining = True
        self.hub.publish("shutdown", {"drain_s": drain_s})
        self.post(ShutdownAsked(self.clock(), drain_s))
        if self._shutdown is None:
            self._shutdown = asyncio.get_running_loop().create_task(self._finish(), name="shutdown")

    async def _finish(self) -> None:
        """Wait until nothing runs, then let go of everything."""
        state = self.loop.scheduler.state
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.server.drain_s + STOP_MAX_S):
                await self.loop.until(lambda: all(slot.lease is not None for slot in state.slots.values()))
                await self.inference.finished()
                await self.mover.cleared_up()
        if self.sharing is not None:
            await self.sharing.close()
        # Streams of events and logs end by themselves once nothing more will be said.
        self.hub.close()
        await asyncio.sleep(0)
        self.management.close()
        await self.edge.close()
        self.inference.vigil.close()
        self.effects.close()
        await self.memory_watch.close()
        # One turn of the loop for last bytes on their way out.
        await asyncio.sleep(0.05)
        self.edge.abort()
        await self._write_last()
        self._state_dir.close()
        self.closed.set()

    async def _write_last(self) -> None:
        """What was learned and what is being recorded; a disk that hangs does not keep us."""
        files = (self.learned, self.needs, self._own_leases, self._activity_file, self._events_file)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITE_MAX_S):
                await asyncio.gather(*(file.close() for file in files if file is not None))


def _refuse_open_door(config: Config) -> None:
    if problem := open_door(config.server):
        raise ConfigError(problem)
