"""The gateway: makes its parts, gives each the others that it needs, and opens, reloads and closes them.

Owns the order of the parts, and how long a shutdown may take. What a part is, it knows by `config/part.py` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from greenroom.access.key_ring import KeyRing
from greenroom.access.limits import Limiter, make_shared_limits
from greenroom.access.usage_store import make_usage
from greenroom.api.asgi import AsgiBridge
from greenroom.api.edges import Edges
from greenroom.api.front import Door
from greenroom.api.listing import Listing, ModelStatuses
from greenroom.api.management import Docs, Management, empty_app
from greenroom.api.reports.clients import ClientRoutes, LimitRoutes
from greenroom.api.reports.configuration import ConfigRoutes, RemoteRoutes
from greenroom.api.reports.history import HistoryRoutes, sample
from greenroom.api.reports.memory import Gpus
from greenroom.api.reports.snapshot import BUILD
from greenroom.api.reports.streams import Streams
from greenroom.api.reports.usage import UsageRoutes
from greenroom.api.reports.watching import Watching
from greenroom.base.detached import run_detached
from greenroom.config import limits, loader
from greenroom.config.diff import Changes, diff, refuse_restart
from greenroom.config.limits import is_named, limits_of
from greenroom.config.part import GatewayState, Part
from greenroom.config.problems import open_door
from greenroom.config.schema import Config
from greenroom.core.events import ShutdownAsked
from greenroom.core.model import DeviceId
from greenroom.errors import ConfigError
from greenroom.features.governance.gate import make_gate
from greenroom.features.governance.governed import GovernedRoutes
from greenroom.features.governance.governed_models import GovernedModels
from greenroom.features.jobs.jobs import Jobs
from greenroom.features.jobs.routes import AsyncRequests, JobRoutes
from greenroom.features.leases.routes import LeaseRoutes
from greenroom.features.leases.sharing import make_leasing
from greenroom.features.library.download_routes import DownloadRoutes
from greenroom.features.library.downloads import Downloads
from greenroom.features.library.ollama_routes import OllamaRoutes
from greenroom.features.library.routes import LibraryRoutes
from greenroom.features.operations.capabilities import CapabilityRoutes
from greenroom.features.operations.llama_routes import LlamaCppRoutes, LlamaSwapRoutes
from greenroom.features.operations.load_routes import LoadRoutes
from greenroom.features.operations.loads import Loads
from greenroom.features.operations.moves import OperatorMoves
from greenroom.features.operations.routes import Caches, Operating
from greenroom.features.pictures.answers import PictureAnswers, PictureRoutes
from greenroom.features.pictures.store import make_pictures
from greenroom.features.planning.explain_routes import Explaining
from greenroom.features.planning.queue_routes import QueueRoutes
from greenroom.features.planning.simulate_routes import Simulating
from greenroom.features.versions.routes import VersionRoutes
from greenroom.features.versions.state_watcher import DesiredStateWatcher
from greenroom.features.versions.store import VersionStore
from greenroom.features.versions.updates import Updates
from greenroom.http.body import BodyBudget
from greenroom.http.limits import limits_for
from greenroom.library.library import Library
from greenroom.library.roots import Roots
from greenroom.process import orphans
from greenroom.process.state_dir import StateDir
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.engine_figures import EngineFigures
from greenroom.runtime.loop import AsyncEffects, Tickets
from greenroom.runtime.memory.book import MemoryNeedsStore
from greenroom.runtime.memory.devices import DeviceNames
from greenroom.runtime.memory.memory import Memory
from greenroom.runtime.memory.needs import Needs, warn
from greenroom.runtime.memory.probes import first_look
from greenroom.runtime.memory.readings import Probe, Reading
from greenroom.runtime.models import Models
from greenroom.runtime.moves.mover import Mover
from greenroom.runtime.observer import Hub, Observer
from greenroom.runtime.operations.files import OperationFiles
from greenroom.runtime.operations.table import JobLimits, OperationTable
from greenroom.runtime.record.recording import EventRecorder
from greenroom.runtime.rejections import RejectionErrors
from greenroom.runtime.remote.remote import Remote
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.shell import Shell
from greenroom.runtime.slots import LiveSlots
from greenroom.runtime.timeouts import STOP_MAX_S, TIMEOUTS, Timeouts
from greenroom.runtime.workers.hosted_slots import HostedSlots
from greenroom.serving.part import RequestsPart
from greenroom.serving.tasks import Tasks, model_facts
from greenroom.telemetry.history import History
from greenroom.telemetry.logs import get_logger
from greenroom.telemetry.logs import setup as setup_logs
from greenroom.telemetry.metrics import Metrics

_log = get_logger("app")

# Thresholds of the garbage collector; the first is 700 by default.
GC_THRESHOLDS = (20_000, 20, 20)
# The longest wait for the last writes to disk.
WRITE_MAX_S: Final = 10.0


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
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        """`seen` is the first reading of the probe. Raises ConfigError if the client of a store is not installed."""
        self.path = path
        self._reread = reread
        self.started_at, self.clock = time.time(), asyncio.get_running_loop().time
        self.began = self.clock()
        # `shut_down` was called a second time; further calls change nothing.
        self._hurries = False
        self.closed = asyncio.Event()
        self._shutdown: asyncio.Task[None] | None = None
        self.state_dir, self.state = state_dir, GatewayState(config)
        self.versions = VersionStore(state_dir.path, self.state)
        self.keys = KeyRing(lambda: self.edges.use_changed_keys(), config.server)
        shell = self.shell = self._make_shell(seen, timeouts)
        self.slots, self.hosted_slots, self.metrics = shell.slots, shell.hosted_slots, shell.metrics
        self.observer, self.hub, self.operation_table = shell.observer, shell.hub, shell.table
        self.memory = Memory(shell, probe, seen)
        self.memory_watch = self.memory.watch
        self.leasing = make_leasing(shell, self.memory_watch, self.device_names)
        self.memory.owners.lease_pids, self.sharing = self.leasing.owners, self.leasing.sharing
        self.remote = Remote(shell)
        self.spending = self.remote.spending
        self.mover = Mover(shell, self.memory, self.leasing.grants, self.spending)
        self.hosted_moves = self.mover.hosted
        self.tickets = Tickets(self.loop)
        self.effects.connect(
            self.loop,
            self.mover,
            self.tickets.open,
            RejectionErrors(shell, self.mover.failures, self.memory.slot_memory, self.leasing),
            self.leasing.room,
        )
        self.operations = OperatorMoves(self.effects, self.mover, shell, self.memory.slot_memory)
        self.library = Library(Roots(config.roots), state_dir.path, on_gpu=bool(self.memory.needs.gpus))
        self.models = Models(shell, self.memory, self.mover, self.library)
        self.learned, self.resolver = self.models.learned, self.models.resolver
        self.downloads = Downloads(shell, self.library)
        self.loads = Loads(shell, self.resolver, self.downloads, self.operations)
        self.updates = Updates(shell, self.versions, self.models.known, self.downloads, self.operations, self.tickets)
        self.state_watcher = DesiredStateWatcher(self.updates, self.state)
        self.governance, self.usage = make_gate(shell), make_usage(shell)
        self.shared_limits = make_shared_limits(shell)
        self._make_front()
        self.parts = self._in_order()

    def _make_front(self) -> None:
        """Make what answers requests, and the door before it: the last, because routes are given all other parts."""
        shell, shared_limits = self.shell, self.shared_limits
        self.limiter = Limiter() if shared_limits is None else Limiter(shared_limits.window)
        bodies = self.bodies = BodyBudget(limits_for(self.config.server), str(self.state_dir.path))
        self.pictures = make_pictures(shell)
        self.tasks = Tasks(model_facts(self.catalog), lambda: self.remote.fallback.is_allowed)
        self.requests = RequestsPart(
            shell,
            self.memory_watch,
            self.resolver,
            self.tasks,
            self.tickets,
            self.limiter,
            None if self.usage is None else self.usage.counts,
            PictureAnswers(self.pictures, bodies, self.state),
        )
        self.inference, self.activity = self.requests.inference, self.requests.activity
        self.jobs = Jobs(shell, self.inference, self.requests.edge_state, bodies, self.keys)
        self.figures = EngineFigures(shell, self.hosted_moves)
        self.history = History(lambda: sample(self))
        management = make_management(self)
        bridge, later = AsgiBridge(management), AsyncRequests(self.jobs, bodies, self.inference)
        self.door = Door(self.inference, bridge, management, later)
        self.edges = Edges(shell, self.requests, bodies, self.keys, self.limiter, bridge, self.door)
        self.edge, self.metrics_edge = self.edges.edge, self.edges.metrics_edge

    def _in_order(self) -> tuple[Part, ...]:
        """The parts as they open and begin. They close in the reverse order, those that write data at last."""
        parts = (
            self.governance,
            self.memory,
            self.requests,
            self.keys,
            # Ports are taken before files are opened: a failed start must not push out those of an earlier run.
            self.edges,
            self.shared_limits,
            self.operation_table,
            self.remote,
            self.versions,
            self.pictures,
            self.usage,
            self.requests.activity_file,
            # The events last: only they rename an earlier file.
            self.events_file,
            # Leases of an earlier run come before any model: their memory is in use.
            self.leasing,
            self.library,
            self.models,
            self.learned,
            self.memory.needs,
            self.jobs,
            self.downloads,
            self.updates,
            self.state_watcher,
            self.loads,
            self.figures,
            self.history,
        )
        return tuple(part for part in parts if part is not None)

    def _make_shell(self, seen: Reading, timeouts: Timeouts) -> Shell:
        config, server, path = self.config, self.config.server, self.state_dir.path
        names = self.device_names = DeviceNames(seen.gpus)
        needs = Needs(MemoryNeedsStore(path, warn), {DeviceId(gpu.uuid): gpu.name for gpu in seen.gpus})
        catalog = self.catalog = Catalog(needs, names.expected, lambda name: self.versions.of(name).current)
        with_aliases, slots = server.metrics_aliases is not None, LiveSlots()
        metrics = Metrics(catalog.is_known, self._is_named, catalog.is_adhoc, with_aliases=with_aliases)
        observer = Observer(Hub(begins_after=int(time.time()) * 1_000_000), metrics)
        effects = self.effects = AsyncEffects(slots, observer)
        events_file = self.events_file = EventRecorder(Path(server.record_events)) if server.record_events else None
        seen_effects = effects if events_file is None else events_file.watching(effects)
        scheduler = limits.make_scheduler(config.scheduler.implementation, seen_effects)
        loop = self.loop = SchedulerLoop(scheduler, self.clock, events_file)
        table = OperationTable(OperationFiles(path / "jobs"), lambda: JobLimits.of(self.config), observer.hub)
        return Shell(self.state, loop, catalog, slots, HostedSlots(), table, observer, self.state_dir, timeouts)

    def _is_named(self, tenant: str) -> bool:
        return is_named(self.config, tenant) or tenant in self.keys.keys.tenants

    @property
    def config(self) -> Config:
        return self.state.config

    @property
    def is_starting(self) -> bool:
        return self.state.is_starting

    @property
    def is_draining(self) -> bool:
        return self.state.is_draining

    @property
    def is_catching_up(self) -> bool:
        return self.state_watcher.is_catching_up

    # --- start ----------------------------------------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        config: Config,
        path: Path | None = None,
        reread: Callable[[], Config] | None = None,
        timeouts: Timeouts = TIMEOUTS,
    ) -> App:
        """Clean up after an earlier run, then serve. Raises ConfigError, StateDirBusy or OSError.

        `reread` returns the configuration at a reload; without it the file at `path` is read.
        """
        _expect_usable(config)
        state_dir = StateDir.open(config.state_dir)
        try:
            if ended := await orphans.sweep(state_dir.prefix, spare=frozenset()):
                _log.warning("ended what an earlier run left", processes=ended)
            probe, seen = await first_look(config)
            app = cls(config, path, state_dir, reread, probe, seen, timeouts)
            await app._open()
        except BaseException:
            state_dir.close()
            raise
        app.catalog.fill(config)
        for part in app.parts:
            part.begin()
        # Everything made so far stays, and requests leave no cycles: the collector finds little, and with its default
        # thresholds takes a quarter of the time of a request.
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        # Not before: a client that connected meanwhile has waited, and asks for models that are known now.
        await app.edges.accept()
        if app.sharing is not None:
            await app.sharing.open()
        app.state.is_starting = False
        _log.info("serving", address=app.edge.addresses[0], models=len(app.catalog), build=BUILD)
        return app

    async def _open(self) -> None:
        """Open all parts. What was opened before one that fails is closed."""
        opened: list[Part] = []
        try:
            for part in self.parts:
                await part.open()
                opened.append(part)
        except BaseException:
            await self._close(opened)
            raise

    # --- reload ---------------------------------------------------------------------------------------------------

    async def reread(self) -> Config:
        """The configuration as a reload would take it. Changes nothing. Raises ConfigError."""
        return await run_detached(self._reread or self._read_file, "read the configuration")

    async def reload(self) -> Changes:
        """Read the file again and apply what changed. Raises ConfigError, and then nothing has changed."""
        async with self.state.changing:
            config = await self.reread()
            changes = diff(self.config, config)
            refuse_restart(changes)
            _expect_usable(config)
            drafts = [await part.draft(config, changes) for part in self.parts]
            self.state.config = config
            setup_logs(config.log.level.value, config.log.format.value)
            for apply in drafts:
                apply()
            told = {name: list(getattr(changes, name)) for name in TOLD_CHANGES}
            _log.info("reloaded", **{name: len(ids) for name, ids in told.items()})
            self.hub.publish("reload", told)
            return changes

    def _read_file(self) -> Config:
        if self.path is None:
            raise ConfigError("This gateway was started without a configuration file; there is nothing to reload.")
        return loader.load(self.path, to_serve=True).config

    # --- shutdown -------------------------------------------------------------------------------------------------

    def shut_down(self) -> None:
        """Start the shutdown: running answers may finish within `drain_s`. A second call cuts them."""
        if self._hurries:
            return
        self._hurries = self.is_draining
        drain_s = 0.0 if self._hurries else self.config.server.drain_s
        _log.info("shutting down", drain_s=drain_s)
        self.state.is_draining = True
        self.hub.publish("shutdown", {"drain_s": drain_s})
        self.loop.post(ShutdownAsked(self.clock(), drain_s))
        if self._shutdown is None:
            self._shutdown = asyncio.get_running_loop().create_task(self._finish(), name="shutdown")

    async def _finish(self) -> None:
        """Wait until nothing runs, then close all parts. Ends, whatever is broken."""
        with contextlib.ExitStack() as at_last:
            at_last.callback(self.closed.set)
            at_last.callback(self.state_dir.close)
            idle_s = self.config.server.drain_s + STOP_MAX_S
            await _in_time(self._finished(idle_s), "requests", idle_s + 5.0)
            await self._close(self.parts)
            self.effects.close()

    async def _finished(self, within_s: float) -> None:
        """Wait until nothing runs any more, but not too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.loop.until(lambda: all(slot.lease is not None for slot in self.loop.view.slots.values()))
                await self.inference.finished()
                await self.mover.finished()

    async def _close(self, parts: Sequence[Part]) -> None:
        """Those that talk to others one by one, then those that write data, all at once: a disk may hang."""
        close_s = self.shell.timeouts.close_s
        for part in reversed(parts):
            if not part.writes:
                await _in_time(part.close(), part.name or type(part).__name__, close_s)
        writing = [part for part in parts if part.writes]
        await asyncio.gather(*(_in_time(part.close(), type(part).__name__, WRITE_MAX_S) for part in writing))


TOLD_CHANGES: Final = ("added", "changed", "relabelled", "removed", "at_once")


def _expect_usable(config: Config) -> None:
    """Raises ConfigError."""
    if problem := open_door(config):
        raise ConfigError(problem)
    limits.require(limits_of(config))


async def _in_time(closing: Awaitable[None], what: str, within_s: float) -> None:
    """Wait for this end, but not longer. What fails or hangs is told and left behind: the others end all the same."""
    ending = asyncio.ensure_future(closing)
    done, _ = await asyncio.wait((ending,), timeout=within_s)
    if not done:
        # Not waited for: it may hang in its cancellation, too.
        ending.cancel()
        _log.warning("not closed in time and left behind", what=what)
    elif not ending.cancelled() and isinstance(error := ending.exception(), Exception):
        _log.failed("not closed well", error, what=what)


def make_management(gateway: App, streams: Streams | None = None) -> Management:
    """`streams` counts the streams of events and logs; by default its own."""
    app, shell = empty_app(), gateway.shell
    streams = streams or Streams(shell)
    # Their paths come before those that take any id.
    DownloadRoutes(gateway.downloads).add_to(app)
    loads = LoadRoutes(shell, gateway.models, gateway.tasks, gateway.loads)
    loads.add_to(app)
    LlamaCppRoutes(shell, gateway.tasks, loads, gateway).add_to(app)
    library = LibraryRoutes(shell, gateway.library, gateway.loads, gateway.versions, gateway)
    library.add_to(app)
    Listing(gateway, gateway.resolver, gateway.tasks).add_to(app)
    OllamaRoutes(shell, gateway.resolver, gateway.tasks, gateway.library, gateway.downloads, library, gateway).add_to(
        app
    )
    LlamaSwapRoutes(shell, gateway.loads, streams, gateway).add_to(app)
    CapabilityRoutes(shell, gateway.resolver, gateway.library, gateway.loads, gateway).add_to(app)
    Watching(gateway, streams).add_to(app)
    Operating(shell, gateway.models, gateway.tasks, gateway.loads, gateway.operations, streams, gateway).add_to(app)
    ConfigRoutes(gateway).add_to(app)
    VersionRoutes(shell, gateway.updates).add_to(app)
    QueueRoutes(shell, gateway.activity, gateway.tickets).add_to(app)
    HistoryRoutes(shell, gateway.history).add_to(app)
    LimitRoutes(gateway.limiter).add_to(app)
    Explaining(shell, gateway.resolver, gateway.tasks, gateway.memory_watch, gateway.leasing).add_to(app)
    Simulating(shell, gateway.activity).add_to(app)
    UsageRoutes(gateway.usage).add_to(app)
    ClientRoutes(shell, gateway.requests.client_stats).add_to(app)
    RemoteRoutes(shell, gateway.spending, gateway.remote.fallback).add_to(app)
    Gpus(gateway).add_to(app)
    LeaseRoutes(shell, gateway.leasing).add_to(app)
    Caches(shell, gateway.requests.salts, gateway.hosted_moves).add_to(app)
    JobRoutes(gateway.jobs, gateway.bodies).add_to(app)
    PictureRoutes(gateway.pictures).add_to(app)
    Docs(app, shell).add_to(app)
    # One of them takes any id, so it is asked last.
    ModelStatuses(gateway, gateway.tasks).add_to(app)
    models = GovernedModels(shell, gateway.resolver, gateway.library, gateway.downloads, gateway.updates, library)
    governed = GovernedRoutes(app, gateway.governance, models)
    return Management(governed, governed.routes)
