"""Wiring: a configuration becomes a running gateway. The only file that names every concrete class.

Owns start, reload and shutdown. Everything else is handed what it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable
from pathlib import Path

from greenroom.config import loader, plugins
from greenroom.config.diff import Changes, diff, refuse_restart
from greenroom.config.limits import limits_of
from greenroom.config.problems import open_door
from greenroom.config.schema import Config, Server
from greenroom.core.events import ConfigChanged, ShutdownAsked
from greenroom.core.model import ModelId
from greenroom.core.scheduler import Scheduler
from greenroom.errors import ConfigError
from greenroom.memory.devices import devices
from greenroom.process import orphans
from greenroom.process.ports import PortRange
from greenroom.process.state_dir import StateDir
from greenroom.proxy.edge import Edge
from greenroom.proxy.hosts import HostRule
from greenroom.proxy.limits import KIB, MIB, EdgeLimits
from greenroom.runtime import build
from greenroom.runtime.catalog import Catalog
from greenroom.runtime.effects import AsyncEffects
from greenroom.runtime.learned import LearnedTimes
from greenroom.runtime.loop import SchedulerLoop
from greenroom.runtime.mover import Mover
from greenroom.runtime.observer import Observer
from greenroom.runtime.operations import Operations
from greenroom.runtime.recording import ActivityRecorder, EventRecorder
from greenroom.runtime.rejections import Rejections
from greenroom.runtime.slots import Slots
from greenroom.runtime.tickets import Desk
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
# Allocations before each generation is looked at; the first is 700 by default.
GC_THRESHOLDS = (20_000, 20, 20)


class App:
    """One gateway. `start` it, wait for `closed`, or `reload` and `shut_down` it."""

    def __init__(
        self, config: Config, path: Path | None, state_dir: StateDir, reread: Callable[[], Config] | None = None
    ) -> None:
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
        self.desk = Desk(self.post, self.clock)
        ports = PortRange(config.ports.first, config.ports.last)
        self.mover = Mover(self.catalog, self.slots, state_dir, ports, self.observer, self.post, self.clock)
        rejections = Rejections(self.mover.failures, lambda: self.is_draining)
        self.effects.connect(self.post, self.mover, self.desk.open, rejections)
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

    def _wire_server(self, server: Server) -> None:
        self.tenants = Tenants()
        self._activity_file = ActivityRecorder(Path(server.record_activity)) if server.record_activity else None
        reader = AskReader(self.catalog, self.tenants, lambda: self.settings.heartbeat)
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
        self.edge = Edge(
            admit=self.door.admit, handle=self.door.handle, refuse=self.door.refuse, limits=_limits(server)
        )
        self._open_door(server)

    def _open_door(self, server: Server) -> None:
        self.door.keys = Keys(server.api_keys)
        self.door.hosts = HostRule((server.host, *server.allowed_hosts), server.allowed_origins)

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
            app = cls(config, path, state_dir, reread)
            await app._open(config.server)
        except BaseException:
            state_dir.close()
            raise
        app._begin()
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
        self.post(
            ConfigChanged(
                self.clock(),
                models=specs,
                devices=devices(self.config),
                limits=limits_of(self.config),
                learned=self.learned.recall(spec.id for spec in specs),
            )
        )
        self.learned.start()
        # Everything made so far stays, and requests leave no cycles: the collector has little to find and, with its
        # usual thresholds, would take a quarter of the time of a request.
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        _log.info("serving", address=self.edge.addresses[0], models=len(self.catalog), build=build.NAME)

    # --- reload ---------------------------------------------------------------------------------------------------

    async def reload(self) -> Changes:
        """Read the file again and apply what changed. Raises ConfigError, and then nothing has changed."""
        async with self._reloading:
            config = await asyncio.to_thread(self._reread or self._read_file)
            changes = diff(self.config, config)
            refuse_restart(changes)
            _refuse_open_door(config)
            plugins.require(limits_of(config))
            self._apply(config, changes)
            return changes

    def _read_file(self) -> Config:
        if self.path is None:
            raise ConfigError("This gateway was started without a configuration file; there is nothing to reload.")
        return loader.load(self.path).config

    def _apply(self, config: Config, changes: Changes) -> None:
        # First, because it looks at files and so may fail: until here nothing has changed.
        specs = self.catalog.change(config, changes)
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
                await self.loop.until(lambda: not state.slots)
                await self.inference.finished()
                await self.mover.cleared_up()
        # Streams of events and logs end by themselves once nothing more will be said.
        self.hub.close()
        await asyncio.sleep(0)
        self.management.close()
        await self.edge.close()
        self.inference.vigil.close()
        self.effects.close()
        # One turn of the loop for last bytes on their way out.
        await asyncio.sleep(0.05)
        self.edge.abort()
        await self._write_last()
        self._state_dir.close()
        self.closed.set()

    async def _write_last(self) -> None:
        """What was learned and what is being recorded; a disk that hangs does not keep us."""
        files = [file for file in (self.learned, self._activity_file, self._events_file) if file is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITE_MAX_S):
                await asyncio.gather(*(file.close() for file in files))


def _refuse_open_door(config: Config) -> None:
    if problem := open_door(config.server):
        raise ConfigError(problem)


def _limits(server: Server) -> EdgeLimits:
    return EdgeLimits(
        header_timeout_s=server.header_timeout_s,
        body_timeout_s=server.body_timeout_s,
        body_rate_min_bytes_s=server.body_rate_min_kib_s * KIB,
        keepalive_s=server.keepalive_s,
        write_timeout_s=server.write_timeout_s,
        headers_max=server.headers_max,
        header_bytes_max=server.header_bytes_max,
        request_line_max=server.request_line_max,
        connections_max=server.connections_max,
        connections_per_ip_max=server.connections_per_ip_max,
        bodies_total_max=server.bodies_memory_mib * MIB,
        spool_total_max=server.bodies_spool_mib * MIB,
    )
