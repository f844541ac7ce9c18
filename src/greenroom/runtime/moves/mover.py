"""Carries moves out. Every move is an owned task that ends in exactly one `MoveDone`, whatever happens to it.

Owns these tasks and what their errors mean to the scheduler. `process_moves.py` and `hosted_moves.py` do the work: for
engines with a process for each slot, and for slots that live in workers. Never decides what moves: the scheduler did.

`RemoteMoves` is for remote models: a load reads the account's key and the certificates, an unload closes the
connections. It connects to nothing: a provider that is down fails the requests that ask it, and a slot stays ready.
"""

from __future__ import annotations

import asyncio
import ssl

import greenroom
from greenroom.base.detached import run_detached
from greenroom.config.part import GatewayState
from greenroom.config.problems import is_empty_folder
from greenroom.config.schema import Remote
from greenroom.config.sections.remotes import read_remote_key
from greenroom.core.events import MoveDone
from greenroom.core.model import Claim, Move, MoveId, MoveKind, Outcome, SlotId
from greenroom.engines.base import RemoteEngine
from greenroom.errors import EngineMissing, GreenroomError, LoadFailed, LoadOutOfMemory, StoreDown, UnusableModel
from greenroom.http.remote import RemoteEndpoint, RemoteLimits, RemotePool
from greenroom.process.proc import PortRange
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.memory import Memory
from greenroom.runtime.memory.slot_memory import HostedMemory
from greenroom.runtime.moves.admission import Cleanup, Grants, MemoryGrants, ModelRoots, NoGrant
from greenroom.runtime.moves.hosted_moves import HostedMoves, SeenMove
from greenroom.runtime.moves.load_errors import HostedErrors, LoadErrors
from greenroom.runtime.moves.opening import SlotOpener
from greenroom.runtime.moves.process_moves import ProcessMoves
from greenroom.runtime.remote.spending import Spending
from greenroom.runtime.shell import Shell
from greenroom.runtime.slots import LiveSlot, LiveSlots
from greenroom.runtime.workers.pool import WorkerPool
from greenroom.telemetry.logs import get_logger

_log = get_logger("moves")


class Outdated(Exception):
    """The model has another revision by now; this one is no longer wanted."""


class Mover:
    """`grants` are asked before memory is taken. `failures` holds the last error of each model, until it is loaded
    again."""

    def __init__(self, shell: Shell, memory: Memory, grants: Grants, spending: Spending) -> None:
        config, times, slot_memory = shell.config, shell.timeouts, memory.slot_memory
        self._catalog = shell.catalog
        self._memory = slot_memory
        self._observer = shell.observer
        self._watch = memory.watch
        self._loop = shell.loop
        self._tasks: dict[MoveId, asyncio.Task[SeenMove]] = {}
        self._aborted: set[MoveId] = set()
        cleanup = self.cleanup = Cleanup()
        failures = self.failures = LoadErrors(shell, memory.watch)
        roots, ports = ModelRoots(shell.live), PortRange(config.ports.first, config.ports.last)
        hosted_memory = HostedMemory(shell.loop, shell.hosted_slots, memory.watch, timeouts=times.memory)
        self._workers = WorkerPool(
            shell.state_dir,
            shell.observer,
            lambda worker, exit: self.hosted.on_worker_lost(worker, exit),
            keeps_spare=config.memory.spare_worker,
            timeouts=times.workers,
        )
        shell.hosted_slots.workers = self._workers.workers
        opener = SlotOpener(shell, self._workers, hosted_memory, HostedErrors(hosted_memory, slot_memory), roots)
        self.hosted = HostedMoves(shell, opener, hosted_memory, MemoryGrants(grants, cleanup, hosted_memory), failures)
        admission = MemoryGrants(grants, cleanup, slot_memory)
        self._processes = ProcessMoves(shell, ports, slot_memory, admission, failures, roots)
        self._remote = RemoteMoves(shell.slots, shell.live, spending)

    def start(self, move: Move) -> None:
        """Begin this move. It ends in a `MoveDone`."""
        name = f"{move.kind.value} {move.model} {move.id}"
        task = asyncio.get_running_loop().create_task(self._carry_out(move), name=name)
        self._tasks[move.id] = task
        began = self._loop.clock()
        # A callback rather than a `finally`: a task cancelled before its first step never enters its body.
        task.add_done_callback(lambda task: self._ended(move, task, began))

    def abort(self, move: MoveId) -> None:
        """Cancel this move, once: a second cancel would interrupt the clean-up after the first."""
        if move in self._tasks and move not in self._aborted:
            self._aborted.add(move)
            self._tasks[move].cancel()

    @property
    def moving(self) -> int:
        """How many moves are under way."""
        return len(self._tasks)

    async def finished(self) -> None:
        """Wait until nothing is left of engines that crashed, then end the workers. Keepers have deadlines."""
        await self.cleanup.finished()
        await self._workers.close()

    # --- the end of a move ------------------------------------------------------------------------------------------

    def _ended(self, move: Move, task: asyncio.Task[SeenMove], began: float) -> None:
        del self._tasks[move.id]
        self._aborted.discard(move.id)
        result = SeenMove()
        if task.cancelled():
            outcome = Outcome.ABORTED
        elif (error := task.exception()) is None:
            outcome, result = Outcome.DONE, task.result()
        else:
            outcome = self._outcome_of(move, error)
        took_s = self._loop.clock() - began if result.took_s is None else result.took_s
        self._observer.moved(move, outcome, round(took_s, 3))
        self._tell(move, MoveDone(self._loop.clock(), move.id, outcome, result.seen, took_s=result.took_s))
        if move.slot in self.hosted.table.there:
            self.hosted.reconcile(move.slot)

    def _outcome_of(self, move: Move, error: BaseException) -> Outcome:
        """What this error means to the scheduler. The error of a failed move is kept for callers that are rejected."""
        if isinstance(error, Outdated):
            return Outcome.ABORTED
        if isinstance(error, NoGrant | StoreDown):
            _log.info("no grant", model=move.model, slot=move.slot, kind=move.kind.value, why=str(error))
            return Outcome.STORE_DOWN if isinstance(error, StoreDown) else Outcome.NO_LEASE
        if not isinstance(error, GreenroomError):
            _log.error("move broke", model=move.model, kind=move.kind.value, error=repr(error))
            error = LoadFailed(f"{move.model} could not be moved: {error!r}")
        self.failures.keep(move.model, error)
        _log.warning(f"{move.kind.value} failed", model=move.model, slot=move.slot, error=error.message)
        return Outcome.NO_MEMORY if isinstance(error, LoadOutOfMemory) else Outcome.FAILED

    def _tell(self, move: Move, done: MoveDone) -> None:
        """Post the end of a move. A raised need is known before the scheduler plans a retry, and is stored after it."""
        entry = self._catalog.revision(move.model, move.revision)
        ran_out = done.outcome is Outcome.NO_MEMORY
        if entry is not None and ran_out:
            self._memory.running_out(move, entry)
        self._watch.post_and_look(done)
        if entry is not None and ran_out:
            self._memory.ran_out(move, entry)
        elif entry is not None and done.outcome is Outcome.DONE and move.kind is MoveKind.LOAD:
            self._memory.remember(move.slot, entry)

    # --- the work ---------------------------------------------------------------------------------------------------

    async def _carry_out(self, move: Move) -> SeenMove:
        if move.kind in (MoveKind.LOAD, MoveKind.PREPARE):
            result = await self._bring(move, self._current(move))
        elif move.slot in self.hosted.table.there:
            result = await self._move_hosted(move)
        else:
            result = SeenMove(await self._move_other(move))
        if move.kind in (MoveKind.LOAD, MoveKind.PREPARE, MoveKind.WAKE):
            self.failures.pop(move.model, None)
        return result

    def _current(self, move: Move) -> Entry:
        entry = self._catalog.revision(move.model, move.revision)
        if entry is None:
            raise Outdated(f"{move.model} has changed since this {move.kind.value} was decided.")
        return entry

    async def _bring(self, move: Move, entry: Entry) -> SeenMove:
        """Load or prepare a new slot, as its engine says."""
        engine = entry.engine
        if isinstance(engine, RemoteEngine):
            await self._remote.load(move, entry)
            return SeenMove()
        if entry.config.path is not None and is_empty_folder(entry.config.path):
            raise UnusableModel(f"{entry.id} could not be loaded: the folder {entry.config.path} is empty.")
        if (why := engine.missing(entry.config)) is not None:
            public = f"{entry.id} could not be loaded: its engine is not installed here."
            raise EngineMissing(f"{entry.id} could not be loaded: {why}.", public=public)
        if engine.hosted is True:
            bring = self.hosted.prepare if move.kind is MoveKind.PREPARE else self.hosted.load
            return await bring(move, entry, engine)
        assert move.kind is MoveKind.LOAD, "only workers prepare"
        return SeenMove(await self._processes.load(move, entry, engine))

    async def _move_hosted(self, move: Move) -> SeenMove:
        if move.kind is MoveKind.UNLOAD:
            await self.hosted.unload(move)
            return SeenMove()
        if move.kind is MoveKind.SLEEP:
            return await self.hosted.sleep(move)
        self._current(move)
        return await self.hosted.wake(move)

    async def _move_other(self, move: Move) -> Claim | None:
        """Move the slot of a process or of a remote model. Returns what it was seen to use."""
        if self._remote.has(move.slot):
            assert move.kind is MoveKind.UNLOAD, "a remote model does not sleep"
            self._remote.unload(move)
            return None
        if move.kind is MoveKind.UNLOAD:
            await self._processes.unload(move)
            return None
        if move.kind is MoveKind.SLEEP:
            return await self._processes.sleep(move)
        self._current(move)
        return await self._processes.wake(move)


# --- remote models --------------------------------------------------------------------------------------------------


class RemoteMoves:
    def __init__(self, slots: LiveSlots, gateway: GatewayState, spending: Spending) -> None:
        self._slots = slots
        self._spending = spending
        self._gateway = gateway

    def has(self, slot: SlotId) -> bool:
        live = self._slots.live.get(slot)
        return live is not None and live.remote is not None

    async def load(self, move: Move, entry: Entry) -> None:
        """Make the slot of a remote model. Raises LoadFailed if its key or its certificates cannot be read."""
        name = entry.config.remote or ""
        remote = self._gateway.config.remotes.get(name)
        if remote is None:
            raise LoadFailed(f"{entry.id} could not be made ready: there is no {name} in remotes.")
        try:
            endpoint = await run_detached(lambda: endpoint_of(remote), f"key of {name}")
        except (OSError, ValueError) as error:
            raise LoadFailed(
                f"{entry.id} could not be made ready: {error}.",
                public=f"{entry.id} could not be made ready: its provider is not set up.",
            ) from error
        limits = RemoteLimits(remote.connect_timeout_s, remote.first_byte_timeout_s, remote.retries_max)
        pool = RemotePool(endpoint, limits, name=f"The remote model {entry.id}")
        now = asyncio.get_running_loop().time()
        meter = self._spending.meter(name, remote, entry.config.use_model_name or entry.id)
        self._slots.live[move.slot] = LiveSlot(move.slot, entry, None, pool, None, now, None, endpoint, meter)

    def unload(self, move: Move) -> None:
        live = self._slots.live.pop(move.slot)
        live.pool.close()


def endpoint_of(remote: Remote) -> RemoteEndpoint:
    """How this provider is called. Reads the key and the certificates. Raises OSError or ValueError."""
    key, address = read_remote_key(remote), remote.address
    tls = None
    if address.scheme == "https":
        try:
            # Checks the certificate and the name of the host.
            tls = ssl.create_default_context(cafile=remote.ca_file)
        except OSError as error:
            raise ValueError(f"the certificates in {remote.ca_file} cannot be read: {_words(error)}") from error
    return RemoteEndpoint(
        host=address.hostname or "",
        port=address.port or (443 if tls is not None else 80),
        path=address.path.rstrip("/").encode(),
        tls=tls,
        key=key,
        agent=f"greenroom/{greenroom.__version__}",
    )


def _words(error: OSError) -> str:
    return "they are no PEM" if isinstance(error, ssl.SSLError) else error.strerror or str(error)
