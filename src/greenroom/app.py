"""The gateway: puts the parts made in `wiring/` together, starts them, reloads them and shuts them down.

Owns the order of these steps and how long a shutdown may take. Every other object is given what it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable
from pathlib import Path

from greenroom.access.key_ring import Look
from greenroom.api.reports.history import sample
from greenroom.api.reports.snapshot import BUILD
from greenroom.base.detached import run_detached
from greenroom.config import limits, loader
from greenroom.config.diff import Changes, diff, refuse_restart
from greenroom.config.limits import is_named, limits_of
from greenroom.config.live import GatewayState
from greenroom.config.problems import open_door
from greenroom.config.schema import Config, Server
from greenroom.core.events import ConfigChanged, ShutdownAsked
from greenroom.core.model import ModelId
from greenroom.errors import ConfigError
from greenroom.features.governance.gate import Rules
from greenroom.features.jobs.jobs import Jobs
from greenroom.features.library.downloads import Downloads
from greenroom.features.operations.loads import Loads
from greenroom.features.operations.moves import OperatorMoves
from greenroom.features.versions.state_watcher import DesiredStateWatcher
from greenroom.features.versions.store import VersionStore, begin_versions
from greenroom.features.versions.updates import Updates
from greenroom.features.versions.version_changes import UpdateServices
from greenroom.features.versions.warm_up import WarmUp
from greenroom.features.versions.weights import VersionWeights
from greenroom.library.library import Library
from greenroom.library.roots import Roots
from greenroom.process import orphans
from greenroom.process.state_dir import StateDir
from greenroom.runtime.catalogue import Draft
from greenroom.runtime.engine_figures import EngineFigures
from greenroom.runtime.known_models import KnownModels
from greenroom.runtime.loop import Tickets
from greenroom.runtime.memory.probes import first_look
from greenroom.runtime.memory.readings import Probe, Reading
from greenroom.runtime.record.learned import LearnedTimes
from greenroom.runtime.rejections import RejectionErrors
from greenroom.runtime.resolver import Resolver
from greenroom.runtime.timeouts import TIMEOUTS, Timeouts
from greenroom.serving.prefix_cache import PrefixSalts
from greenroom.serving.tasks import Tasks, model_facts
from greenroom.telemetry.history import History
from greenroom.telemetry.logs import get_logger
from greenroom.telemetry.logs import setup as setup_logs
from greenroom.wiring.common import MemoryParts, wire_common, wire_memory
from greenroom.wiring.front import wire_access, wire_front, wire_serving
from greenroom.wiring.moves import wire_leases, wire_moves, wire_remote
from greenroom.wiring.operations import wire_governance, wire_pictures, wire_table
from greenroom.wiring.shutdown import IDLE_MAX_S, PARTS_MAX_S, close_parts, in_time, wait_until_idle, write_last

_log = get_logger("app")

# Thresholds of the garbage collector; the first is 700 by default.
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
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        """`seen` is the first reading of the probe."""
        self.state = GatewayState(config)
        self.path = path
        self._timeouts = timeouts
        self._reread = reread
        self.started_at = time.time()
        # `shut_down` was called a second time; further calls change nothing.
        self._hurries = False
        self.closed = asyncio.Event()
        self.clock = asyncio.get_running_loop().time
        self.state_dir = state_dir
        self._reloading = asyncio.Lock()
        self._shutdown: asyncio.Task[None] | None = None
        self._wire(config, probe, seen)

    def _wire(self, config: Config, probe: Probe, seen: Reading) -> None:
        self.versions = VersionStore(self.state_dir.path)
        common = self._common = wire_common(
            self.state,
            self.state_dir,
            self.clock,
            self._is_named,
            self._timeouts,
            seen,
            lambda name: self.versions.of(name).current,
        )
        self.catalog, self.slots, self.hosted_slots = common.catalog, common.slots, common.hosted_slots
        self.hub, self.metrics, self.activity = common.hub, common.metrics, common.activity
        self.observer, self.effects = common.observer, common.effects
        self.loop, self.post = common.loop, common.loop.post
        memory = self._memory = wire_memory(common, config, probe, seen)
        self.memory_watch = memory.watch
        leases = self._leases = wire_leases(common, memory, config)
        memory.owners.lease_pids = leases.own.owners
        self.leasing, self.sharing = leases.leasing, leases.sharing
        self._remote = wire_remote(self.state_dir, self.state)
        self.spending, self.cloud_fallback = self._remote.spending, self._remote.fallback
        moves = self._moves = wire_moves(common, memory, leases, self.spending)
        self.mover, self.hosted_moves, self.flush = moves.mover, moves.hosted, moves.hosted.flush
        self.tickets = Tickets(self.loop)
        rejections = RejectionErrors(
            self.mover.failures,
            self.state,
            self.loop,
            self.catalog,
            memory.slot_memory,
            self.hosted_slots,
            self.leasing,
        )
        self.effects.connect(self.loop, self.mover, self.tickets.open, rejections, leases.room)
        self.operations = OperatorMoves(self.effects, self.mover, self.loop, self.catalog, memory.slot_memory)
        self._wire_models(config, on_gpu=bool(memory.needs.gpus))
        self.figures = EngineFigures(self.slots, self.loop, moves.hosted)
        self.history = History(lambda: sample(self))
        self.governance = wire_governance(self.state_dir, config)
        self._wire_orders()
        self._wire_front(memory)

    def _wire_orders(self) -> None:
        """Make what callers order, and what is kept of it."""
        table = self.operation_table = wire_table(self._common)
        self.pictures = wire_pictures(self._common)
        self.downloads = Downloads(table, self.library, self.state)
        self.loads = Loads(
            table,
            self.resolver,
            self.downloads,
            self.operations,
            self.state,
            self.loop,
            self.slots,
            self.hosted_slots,
        )
        self.updates = Updates(
            table,
            UpdateServices(
                gateway=self.state,
                catalog=self.catalog,
                store=self.versions,
                weights=VersionWeights(self.library, self.downloads),
                moves=self.operations,
                warm_up=WarmUp(self.tickets, self.loop),
                slots=self.slots,
                hosted_slots=self.hosted_slots,
                loop=self.loop,
                models=self.models,
                unchanging=self._reloading,
            ),
        )
        self.state_watcher = DesiredStateWatcher(self.updates, self.state)

    def _wire_front(self, memory: MemoryParts) -> None:
        """Make what answers requests, and the door before it: the last, because routes are given all other parts."""
        common, self.salts = self._common, PrefixSalts()
        access = self._access = wire_access(common, self._use_changed_keys)
        self.limiter, self.client_stats = access.limiter, access.client_stats
        self.keys, self.usage = access.keys, access.usage
        serving = wire_serving(
            common, memory, access, self.resolver, self.pictures, self.salts, self.tickets, self.tasks
        )
        self.inference, self.bodies = serving.inference, serving.bodies
        self.jobs = Jobs(
            self.operation_table, self.inference, serving.edge_state, self.bodies, self.keys, self.state, self.loop
        )
        front = self._front = wire_front(access, serving, self)
        self.door, self.edge, self.metrics_edge = front.door, front.edge, front.metrics_edge

    def _wire_models(self, config: Config, *, on_gpu: bool) -> None:
        """Make what finds models: on disk, by name, and by version."""
        self.library = Library(Roots(config.roots), self.state_dir.path, on_gpu=on_gpu)
        self.learned = LearnedTimes(self.state_dir.path, self.loop, self.catalog)
        self.models = KnownModels(self.catalog, self.loop, self.slots, self.mover.failures)
        self.resolver = Resolver(self.catalog, self.library, self.state, self.models, self.learned)
        self.library.on_removed, self.library.on_looked = self.resolver.removed, self.resolver.looked
        self.tasks = Tasks(model_facts(self.catalog), lambda: self.cloud_fallback.is_allowed)

    def _is_named(self, tenant: str) -> bool:
        return is_named(self.config, tenant) or tenant in self.door.keys.tenants

    def _use_changed_keys(self) -> None:
        self._front.use_changed_keys(self.config)

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
        _refuse_open_door(config)
        limits.require(limits_of(config))
        state_dir = StateDir.open(config.state_dir)
        try:
            if ended := await orphans.sweep(state_dir.prefix, spare=frozenset()):
                _log.warning("ended what an earlier run left", processes=ended)
            probe, seen = await first_look(config)
            app = cls(config, path, state_dir, reread, probe, seen, timeouts)
            # Before the first request can come.
            app._govern(await app.governance.draft(config.governance))
            await app._read_keys(config)
            await app._open(config.server)
        except BaseException:
            state_dir.close()
            raise
        app._begin()
        # Not before: a client that connected meanwhile has waited, and asks for models that are known now.
        await app._front.accept()
        if app.sharing is not None:
            await app.sharing.open()
        app.state.is_starting = False
        _log.info("serving", address=app.edge.addresses[0], models=len(app.catalog), build=BUILD)
        return app

    async def _read_keys(self, config: Config) -> None:
        """Read the key file. What is wrong with it prevents no start: its callers are refused until it is mended."""
        self.keys.use(config.server, await self.keys.look(config.server.key_file))

    async def _open(self, server: Server) -> None:
        """Take the ports, then open the recordings: a failed start must not push out those of an earlier run."""
        if self._access.shared_limits is not None:
            await self._access.shared_limits.open()
        try:
            await self._front.bind(server)
            self.operation_table.open()
            self.versions.open()
            await self._remote.open()
            begin_versions(self.versions, self.config, time.time())
            self.pictures.open()
            if self.usage is not None:
                await self.usage.open()
            # The events last: only they rename an earlier file.
            for file in (self._front.serving.activity_file, self._common.events_file):
                if file is not None:
                    file.open()
        except BaseException:
            await self._remote.close()
            await self._front.close()
            self._front.abort()
            raise

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

    def _begin(self) -> None:
        specs = self.catalog.fill(self.config)
        # Leases of an earlier run come before any model: their memory is in use.
        self.post(ConfigChanged(self.clock(), devices=self._memory.devices(self.config), limits=limits_of(self.config)))
        self._leases.begin()
        # The use of strangers is known before anything is loaded.
        self.memory_watch.tell_first()
        learned = self.learned.recall(spec.id for spec in specs)
        self.post(ConfigChanged(self.clock(), models=specs, learned=learned))
        self.learned.start()
        self.library.start()
        self.jobs.start()
        self.downloads.start()
        self.updates.start()
        self.state_watcher.start()
        self.memory_watch.start()
        self.figures.start()
        self.history.start()
        self.keys.follow()
        # Everything made so far stays, and requests leave no cycles: the collector finds little, and with its default
        # thresholds takes a quarter of the time of a request.
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)

    # --- reload ---------------------------------------------------------------------------------------------------

    async def reread(self) -> Config:
        """The configuration as a reload would take it. Changes nothing. Raises ConfigError."""
        return await run_detached(self._reread or self._read_file, "read the configuration")

    async def reload(self) -> Changes:
        """Read the file again and apply what changed. Raises ConfigError, and then nothing has changed."""
        async with self._reloading:
            config = await self.reread()
            changes = diff(self.config, config)
            refuse_restart(changes)
            _refuse_open_door(config)
            limits.require(limits_of(config))
            await run_detached(lambda: begin_versions(self.versions, config, time.time()), "write versions")
            rules, draft = await self.governance.draft(config.governance), await self._drafted(config, changes)
            keys = await self.keys.look(config.server.key_file)
            if keys.problem is not None and config.server.key_file != self.config.server.key_file:
                raise ConfigError(f"server.key_file: {keys.problem}. Nothing was changed")
            self._govern(rules)
            self._apply(config, changes, draft, keys)
            await self.spending.look_again()
            return changes

    async def pin(self, model: ModelId, pinned: bool) -> None:
        """Let nothing evict this model, or no longer. A reload that is under way ends first."""
        async with self._reloading:
            spec = self.catalog.pin(model, pinned)
            if spec is not None:
                self.post(ConfigChanged(self.clock(), models=(self.updates.still_held(spec),)))
                self.hub.publish("pin", {"model": model, "pinned": pinned})

    def _govern(self, rules: Rules | None) -> None:
        """Apply the rules for signed operations, drafted before; None where there are none."""
        self.governance.rules = rules
        if rules is not None:
            keys = ", ".join(f"{name} {id}" for name, id in rules.keys.ids.items())
            _log.info("operations are signed", keys=keys, rules=len(rules.section.rules))
        if rules is not None and (problem := self.governance.audit_problem):
            _log.error("the audit log was changed; see `greenroom audit verify`", problem=problem)

    async def _drafted(self, config: Config, changes: Changes) -> Draft:
        """Read headers of models in a thread: a file server that hangs must not stop running requests."""
        look_s = self._timeouts.look_at_models_s
        try:
            async with asyncio.timeout(look_s):
                return await run_detached(lambda: self.catalog.draft(config, changes), "look at models")
        except TimeoutError:
            raise ConfigError(
                f"The files of models could not be looked at within {look_s:g} s, and nothing was changed. "
                "Look whether their disk answers, and reload again."
            ) from None

    def _read_file(self) -> Config:
        if self.path is None:
            raise ConfigError("This gateway was started without a configuration file; there is nothing to reload.")
        return loader.load(self.path, to_serve=True).config

    def _apply(self, config: Config, changes: Changes, draft: Draft, keys: Look) -> None:
        specs = tuple(map(self.updates.still_held, self.catalog.take(draft)))
        self.state.config = config
        setup_logs(config.log.level.value, config.log.format.value)
        self._front.configure(config, keys)
        self.downloads.pump()
        self._moves.roots.use(config)
        self.library.use_roots(Roots(config.roots))
        removed = tuple(ModelId(model) for model in changes.removed)
        learned = self.learned.recall(ModelId(model) for model in changes.added)
        kept_before = self.memory_watch.set_aside_mib
        known = self._memory.devices(config)
        self.post(
            ConfigChanged(
                self.clock(),
                models=specs,
                removed=removed,
                devices=None if self.memory_watch.set_aside_mib == kept_before else known,
                limits=limits_of(config),
                learned=learned or None,
            )
        )
        self.resolver.reloaded()
        self.updates.start()
        self.state_watcher.reloaded()
        self.models.forget_removed()
        told = {name: list(getattr(changes, name)) for name in ("added", "changed", "relabelled", "removed", "at_once")}
        _log.info("reloaded", **{name: len(ids) for name, ids in told.items()})
        self.hub.publish("reload", told)

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
        self.post(ShutdownAsked(self.clock(), drain_s))
        if self._shutdown is None:
            self._shutdown = asyncio.get_running_loop().create_task(self._finish(), name="shutdown")

    async def _finish(self) -> None:
        """Wait until nothing runs, then close everything and write the last data. Ends, whatever is broken."""
        common, memory, leases, front = self._common, self._memory, self._leases, self._front
        with contextlib.ExitStack() as at_last:
            at_last.callback(self.closed.set)
            at_last.callback(self.state_dir.close)
            drain_s = self.config.server.drain_s
            await in_time(wait_until_idle(common, self._moves, front, drain_s), "requests", drain_s + IDLE_MAX_S)
            self.history.close()
            for part in (self.figures, self.loads, self.state_watcher, self.updates, self.downloads):
                await in_time(part.close(), type(part).__name__, common.timeouts.close_s)
            await in_time(close_parts(common, memory, leases, front), "connections", PARTS_MAX_S)
            kept = (self._remote, self.library, self.jobs, self.pictures, self.learned, memory.needs, leases.own)
            await write_last((*kept, front.serving.activity_file, common.events_file, self.governance, self.usage))


def _refuse_open_door(config: Config) -> None:
    if problem := open_door(config):
        raise ConfigError(problem)
