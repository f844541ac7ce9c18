"""The gateway: puts the parts made in `wiring/` together, starts them, reloads them and shuts them down.

Owns the order of these steps and how long a shutdown may take. Every other object is given what it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from greenroom.config import limits, loader
from greenroom.config.diff import Changes, diff, refuse_restart
from greenroom.config.limits import is_named, limits_of
from greenroom.config.problems import open_door
from greenroom.config.schema import Config, Server
from greenroom.core.events import ConfigChanged, ShutdownAsked
from greenroom.core.model import ModelId
from greenroom.errors import ConfigError
from greenroom.http import edge
from greenroom.process import orphans
from greenroom.process.state_dir import StateDir
from greenroom.runtime.catalogue import Draft
from greenroom.runtime.detached import run_detached
from greenroom.runtime.memory.probes import first_look
from greenroom.runtime.memory.readings import Probe, Reading
from greenroom.runtime.operations.moves import OperatorMoves
from greenroom.runtime.record.learned import LearnedTimes
from greenroom.runtime.tickets import Tickets
from greenroom.runtime.timeouts import TIMEOUTS, Timeouts
from greenroom.telemetry.logs import get_logger
from greenroom.telemetry.logs import setup as setup_logs
from greenroom.wiring.common import CommonParts, MemoryParts, wire_common, wire_memory
from greenroom.wiring.front import FrontParts, wire_front
from greenroom.wiring.moves import LeaseParts, MoveParts, wire_leases, wire_moves, wire_rejections

# Whether the hot path is Python or machine code.
BUILD: Final = "pure" if edge.__file__.endswith(".py") else "compiled"
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
        self.config = config
        self.path = path
        self._timeouts = timeouts
        self._reread = reread
        self.started_at = time.time()
        self.is_draining = False
        # `shut_down` was called a second time; further calls change nothing.
        self._hurries = False
        self.closed = asyncio.Event()
        self.clock = asyncio.get_running_loop().time
        self.state_dir = state_dir
        self._reloading = asyncio.Lock()
        self._shutdown: asyncio.Task[None] | None = None
        self._wire(config, probe, seen)

    def _wire(self, config: Config, probe: Probe, seen: Reading) -> None:
        common = self._common = wire_common(
            config.server,
            self.state_dir,
            self.clock,
            lambda tenant: is_named(self.config, tenant),
            self._timeouts,
        )
        self.catalog, self.slots, self.hosted_slots = common.catalog, common.slots, common.hosted_slots
        self.hub, self.metrics, self.activity = common.hub, common.metrics, common.activity
        self.observer, self.effects = common.observer, common.effects
        self.loop, self.post = common.loop, common.post
        memory = self._memory = wire_memory(common, config, probe, seen)
        self.memory_watch = memory.watch
        leases = self._leases = wire_leases(common, memory, config)
        memory.owners.lease_pids = leases.own.owners
        self.leasing, self.sharing = leases.leasing, leases.sharing
        moves = self._moves = wire_moves(common, memory, leases, config, lambda: self.config.model_roots)
        self.mover, self.hosted_moves, self.flush = moves.mover, moves.hosted, moves.hosted.flush
        self.tickets = Tickets(self.post, self.clock)
        rejections = wire_rejections(common, moves, lambda: self.is_draining)
        self.effects.connect(self.post, self.mover, self.tickets.open, rejections, leases.room)
        self.operations = OperatorMoves(
            self.effects,
            self.mover,
            self.post,
            self.clock,
            self.catalog.engine_of,
            common.state.green_room_shortfall,
        )
        self.learned = LearnedTimes(self.state_dir.path, self.loop.scheduler.learned, self.catalog)
        front = self._front = wire_front(common, memory, self.tickets, self)
        self.inference, self.door, self.edge = front.inference, front.door, front.edge
        self.jobs, self.operation_table = front.jobs, front.operations

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
            await app._open(config.server)
        except BaseException:
            state_dir.close()
            raise
        app._begin()
        if app.sharing is not None:
            await app.sharing.open()
        _log.info("serving", address=app.edge.addresses[0], models=len(app.catalog), build=BUILD)
        return app

    async def _open(self, server: Server) -> None:
        """Listen, then open the recordings: a failed start must not push out those of an earlier run."""
        await self.edge.listen(host=server.host, port=server.port)
        try:
            self._front.operations.open()
            # The events last: only they rename an earlier file.
            for file in (self._front.activity_file, self._common.events_file):
                if file is not None:
                    file.open()
        except BaseException:
            await self.edge.close()
            self.edge.abort()
            raise

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
        self.jobs.start()
        self.memory_watch.start()
        # Everything made so far stays, and requests leave no cycles: the collector finds little, and with its default
        # thresholds takes a quarter of the time of a request.
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
            limits.require(limits_of(config))
            self._apply(config, changes, await self._drafted(config, changes))
            return changes

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

    def _apply(self, config: Config, changes: Changes, draft: Draft) -> None:
        specs = self.catalog.take(draft)
        self.config = config
        setup_logs(config.log.level.value, config.log.format.value)
        self._front.configure(config)
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
        self.slots.forget_logs(frozenset(config.models))
        for model in removed:
            self.mover.failures.pop(model, None)
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
        self.is_draining = True
        self.hub.publish("shutdown", {"drain_s": drain_s})
        self.post(ShutdownAsked(self.clock(), drain_s))
        if self._shutdown is None:
            self._shutdown = asyncio.get_running_loop().create_task(self._finish(), name="shutdown")

    async def _finish(self) -> None:
        """Wait until nothing runs, then close everything and write the last data."""
        common, memory, leases, front = self._common, self._memory, self._leases, self._front
        await _wait_until_idle(common, self._moves, front, self.config.server.drain_s)
        await _close(common, memory, leases, front)
        await _write_last((self.jobs, self.learned, memory.needs, leases.own, front.activity_file, common.events_file))
        self.state_dir.close()
        self.closed.set()


def _refuse_open_door(config: Config) -> None:
    if problem := open_door(config.server):
        raise ConfigError(problem)


# After the drain engines have their own time to stop; nothing may delay the exit longer than this.
STOP_MAX_S = 60.0
# The time that event streams have to send their last events.
LAST_EVENTS_S = 0.05
# The longest wait for the last writes to disk.
WRITE_MAX_S = 10.0


class File(Protocol):
    def close(self) -> Awaitable[None]: ...


async def _wait_until_idle(common: CommonParts, moves: MoveParts, front: FrontParts, drain_s: float) -> None:
    """Wait until nothing runs any more, but not too long."""
    state = common.state
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s + STOP_MAX_S):
            await common.loop.until(lambda: all(slot.lease is not None for slot in state.slots.values()))
            await front.inference.finished()
            await moves.mover.cleaned_up()
            await moves.workers.close()


async def _close(common: CommonParts, memory: MemoryParts, leases: LeaseParts, front: FrontParts) -> None:
    """Close everything but the files; parts that talk to peers first."""
    close_s = common.timeouts.close_s
    if leases.sharing is not None:
        await _in_time(leases.sharing.close(), "the lease store", close_s)
    # Streams of events and logs end by themselves once the hub is closed, after their last events.
    common.hub.close()
    await asyncio.sleep(LAST_EVENTS_S)
    front.management.close()
    await _in_time(front.edge.close(), "the listening socket", close_s)
    front.inference.sweep.close()
    front.prefetch.close()
    common.effects.close()
    await _in_time(memory.watch.close(), "the memory watch", close_s)
    # A moment for the last bytes to leave.
    await asyncio.sleep(0.05)
    front.edge.abort()


async def _in_time(closing: Awaitable[None], what: str, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            await closing
    except TimeoutError:
        _log.warning("not closed in time and left behind", what=what)


async def _write_last(files: Sequence[File | None]) -> None:
    """Close files that have data to write; a disk that hangs does not delay the exit beyond `WRITE_MAX_S`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WRITE_MAX_S):
            await asyncio.gather(*(file.close() for file in files if file is not None))
