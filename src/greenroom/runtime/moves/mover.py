"""Carries moves out. Every move is an owned task that ends in exactly one `MoveDone`, whatever happens to it.

Owns the way from a launch to a live slot and back, for engines with a process for each slot; moves of slots that live
in workers are carried out by `hosted_moves.py`. Never decides: what moves was decided by the scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from greenroom.core.events import Event, MoveDone, SlotsLost
from greenroom.core.model import Claim, Move, MoveId, MoveKind, Outcome, SlotId, Tier
from greenroom.engines.base import HostedEngine, Launch, Listens, Place, ProcessEngine
from greenroom.errors import GreenroomError, LoadFailed, OutOfMemory, StoreDown
from greenroom.http.upstream import Address, Pool
from greenroom.process.logs import START_LINES_MAX, StartLog
from greenroom.process.ports import PortRange, is_ours, listener_pids
from greenroom.process.spawn import Child, Exit, spawn
from greenroom.process.state_dir import StateDir
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.detached import run_detached
from greenroom.runtime.memory.slot_memory import Held, SlotMemory
from greenroom.runtime.moves.admission import Cleanup, Grants, NoGrant
from greenroom.runtime.moves.hosted_moves import HostedMoves, MoveResult
from greenroom.runtime.moves.load_errors import LAST_LINES, Evidence, LoadErrors
from greenroom.runtime.moves.model_files import check_roots
from greenroom.runtime.moves.readiness import until_ready
from greenroom.runtime.observer import Observer
from greenroom.runtime.slots import LiveSlot, LiveSlots
from greenroom.telemetry.logs import get_logger

# A stranger may take the port between our choosing and the engine's binding; another port is tried this often.
PORT_TRIES = 3

_log = get_logger("moves")


class PortTaken(LoadFailed):
    """Somebody else answers on the port that was meant for the engine."""


class Outdated(Exception):
    """The model has another revision by now; nobody wants this one any more."""


class Mover:
    def __init__(
        self,
        catalog: Catalog,
        slots: LiveSlots,
        state_dir: StateDir,
        ports: PortRange,
        observer: Observer,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        memory: SlotMemory,
        grants: Grants,
        remains: Cleanup,
        hosted: HostedMoves,
        failures: LoadErrors,
        roots: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """`grants` is asked where GPUs are shared with other gateways; files of models lie below `roots`, if any."""
        self._observer = observer
        self._catalog = catalog
        self._slots = slots
        self._state_dir = state_dir
        self._ports = ports
        self._post = post
        self._clock = clock
        self._memory = memory
        self._grants = grants
        self._hosted = hosted
        self._roots = roots
        self._tasks: dict[MoveId, asyncio.Task[MoveResult]] = {}
        self._aborted: set[MoveId] = set()
        self._ports_in_use: dict[SlotId, int] = {}
        # What engines that crashed left of their trees, being ended by their keepers.
        self._remains = remains
        self.failures = failures

    def start(self, move: Move) -> None:
        name = f"{move.kind.value} {move.model} {move.id}"
        task = asyncio.get_running_loop().create_task(self._carry_out(move), name=name)
        self._tasks[move.id] = task
        began = self._clock()
        # A callback rather than a `finally`: a task cancelled before its first step never enters its body.
        task.add_done_callback(lambda task: self._ended(move, task, began))

    def abort(self, move: MoveId) -> None:
        """Once: a second cancel would interrupt the clearing up after the first."""
        if move in self._tasks and move not in self._aborted:
            self._aborted.add(move)
            self._tasks[move].cancel()

    @property
    def moving(self) -> int:
        return len(self._tasks)

    async def cleared_up(self) -> None:
        """Wait until nothing is left of engines that crashed. Each tree has its deadline in the keeper."""
        await self._remains.cleared_up()

    def _ended(self, move: Move, task: asyncio.Task[MoveResult], began: float) -> None:
        del self._tasks[move.id]
        self._aborted.discard(move.id)
        arrival = MoveResult()
        if task.cancelled():
            outcome = Outcome.ABORTED
        elif (error := task.exception()) is None:
            outcome, arrival = Outcome.DONE, task.result()
        else:
            outcome = self._setback(move, error)
        took_s = self._clock() - began if arrival.took_s is None else arrival.took_s
        self._observer.moved(move, outcome, round(took_s, 3))
        self._tell(move, MoveDone(self._clock(), move.id, outcome, arrival.seen, took_s=arrival.took_s))
        self._hosted.reconcile(move.slot)

    def _setback(self, move: Move, error: BaseException) -> Outcome:
        """What went wrong is kept for those who are told that it did."""
        if isinstance(error, Outdated):
            return Outcome.ABORTED
        if isinstance(error, NoGrant | StoreDown):
            _log.info("no grant", model=move.model, slot=move.slot, kind=move.kind.value, why=str(error))
            return Outcome.STORE_DOWN if isinstance(error, StoreDown) else Outcome.NO_LEASE
        if not isinstance(error, GreenroomError):
            _log.error("move broke", model=move.model, kind=move.kind.value, error=repr(error))
            error = LoadFailed(f"{move.model} could not be moved: {error!r}")
        self.failures.keep(move.model, error)
        _log.warning("load failed", model=move.model, slot=move.slot, error=error.message)
        return Outcome.NO_MEMORY if isinstance(error, OutOfMemory) else Outcome.FAILED

    def _tell(self, move: Move, done: MoveDone) -> None:
        """What it needs at least must be known when a retry is planned; what was raised then is kept afterwards."""
        entry = self._catalog.revision(move.model, move.revision)
        ran_out = done.outcome is Outcome.NO_MEMORY
        if entry is not None and ran_out:
            self._memory.running_out(move, entry)
        self._post(done)
        if entry is not None and ran_out:
            self._memory.ran_out(move, entry)
        elif entry is not None and done.outcome is Outcome.DONE and move.kind is MoveKind.LOAD:
            self._memory.remember(move.slot, entry)

    async def _carry_out(self, move: Move) -> MoveResult:
        """Returns what the slot was seen to use when it had arrived."""
        if self._hosted.has(move.slot):
            return await self._move_hosted(move)
        if move.kind is MoveKind.UNLOAD:
            await self._unload(move)
            return MoveResult()
        entry = self._current(move)
        engine = entry.engine
        if engine.hosted is True:
            return await self._bring_hosted(move, entry, engine)
        assert move.kind is MoveKind.LOAD, "an engine with a process for each slot cannot sleep"
        seen = await self._load(move, entry, engine)
        self.failures.pop(move.model, None)
        return MoveResult(seen)

    def _current(self, move: Move) -> Entry:
        entry = self._catalog.revision(move.model, move.revision)
        if entry is None:
            raise Outdated(f"{move.model} has changed since this {move.kind.value} was decided.")
        return entry

    async def _bring_hosted(self, move: Move, entry: Entry, engine: HostedEngine) -> MoveResult:
        bring = self._hosted.prepare if move.kind is MoveKind.PREPARE else self._hosted.load
        arrival = await bring(move, entry, engine)
        self.failures.pop(move.model, None)
        return arrival

    async def _move_hosted(self, move: Move) -> MoveResult:
        if move.kind is MoveKind.UNLOAD:
            await self._hosted.unload(move)
            return MoveResult()
        if move.kind is MoveKind.SLEEP:
            return await self._hosted.sleep(move)
        self._current(move)
        arrival = await self._hosted.wake(move)
        self.failures.pop(move.model, None)
        return arrival

    # --- load -----------------------------------------------------------------------------------------------------

    async def _load(self, move: Move, entry: Entry, engine: ProcessEngine) -> Claim | None:
        """Start the engine and wait until it answers. Raises LoadFailed, NoGrant or StoreDown, and leaves nothing."""
        if roots := self._roots():
            await run_detached(lambda: check_roots(entry, roots), f"roots of {entry.id}")
        # What a crashed engine held, memory above all, is free only when its last process has ended.
        await self._remains.cleared_up(move.claim)
        try:
            await self._grants.enter(move)
            await self._check_room(move)
            await self._grants.confirm(move.slot)
            return await self._load_granted(move, entry, engine)
        except BaseException:
            await self._grants.leave(move.slot)
            raise

    async def _check_room(self, move: Move) -> None:
        """Who lost this memory, or gave it back on paper, may still use it."""
        if missing := await self._memory.lacks(move.claim):
            said = " ".join(f"{device}={mib}" for device, mib in missing.items())
            raise NoGrant(f"memory is free on paper only, missing_mib: {said}")

    async def _load_granted(self, move: Move, entry: Entry, engine: ProcessEngine) -> Claim | None:
        for attempt in range(1, PORT_TRIES):
            try:
                return await self._load_once(move, entry, engine, attempt)
            except PortTaken as error:
                _log.warning("port taken", model=move.model, attempt=attempt, error=error.message)
        return await self._load_once(move, entry, engine, PORT_TRIES)

    async def _load_once(self, move: Move, entry: Entry, engine: ProcessEngine, attempt: int) -> Claim | None:
        place = self._place(move, entry, engine)
        try:
            launch = engine.launch(move.model, entry.config, place)
            child, seen = await self._ready_child(move, entry, launch, place, attempt)
        except BaseException:
            self._give_back(move.slot, place.socket)
            raise
        pool = Pool(_address(place), name=f"The engine of {entry.id}")
        live = LiveSlot(move.slot, entry, child, pool, place.socket)
        self._slots.live[move.slot] = live
        child.on_exit(lambda exit: self._on_exit(live, exit))
        return seen

    async def _ready_child(
        self, move: Move, entry: Entry, launch: Launch, place: Place, attempt: int
    ) -> tuple[Child, Claim | None]:
        evidence, log = Evidence(), StartLog(self._slots.log(move.model))
        identity = self._state_dir.identity(f"{move.slot}.{attempt}")
        try:
            child = await spawn(launch.command, identity=identity, log=log)
        except LoadFailed as error:
            raise LoadFailed(
                f"{entry.id} could not be loaded: {error.message}.",
                public=f"{entry.id} could not be loaded: its program could not be started.",
                details=error.details,
            ) from error
        try:
            await self._until_ready(child, launch, place, entry)
            return child, await self._memory.look(move.slot)
        except BaseException as error:
            # Also when this move was aborted: the tree and its memory must be gone before the move has ended.
            held = self._memory.held_by(move.slot)
            await child.stop(entry.config.stop_timeout_s)
            await self._memory.back(move.slot, held)
            lines = log.tail(START_LINES_MAX)
            if isinstance(error, LoadFailed) and (complaint := evidence.of_no_memory(child, lines)):
                raise self._memory.shortage(move, entry, complaint, error.details or "") from error
            raise

    def _place(self, move: Move, entry: Entry, engine: ProcessEngine) -> Place:
        gpus = self._memory.gpus_for(entry, move.claim)
        if engine.listens is Listens.SOCKET:
            # A name of its own for every slot, and slots are never used again: no leftover can be in the way.
            return Place(move.claim, socket=str(self._state_dir.run_dir / f"{move.slot}.sock"), gpus=gpus)
        port = self._ports.pick(set(self._ports_in_use.values()))
        self._ports_in_use[move.slot] = port
        return Place(move.claim, port=port, gpus=gpus)

    async def _until_ready(self, child: Child, launch: Launch, place: Place, entry: Entry) -> None:
        """The process is watched, not only the port: a dying engine may still answer."""
        ended = asyncio.ensure_future(child.wait())
        ready = asyncio.ensure_future(self._answers(launch, place))
        try:
            await asyncio.wait((ended, ready), timeout=entry.config.load_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                self._check_port_was_free(child, place, entry)
                raise _failed(entry, child, f"the engine ended while loading ({ended.result()})")
            if not ready.done():
                raise _failed(entry, child, f"it was not ready after {entry.config.load_timeout_s:g} s")
            ready.result()
            self._check_owner(child, place, entry)
        finally:
            ended.cancel()
            ready.cancel()

    async def _answers(self, launch: Launch, place: Place) -> None:
        if launch.check_path is not None:
            await until_ready(_address(place), launch.check_path)

    def _check_owner(self, child: Child, place: Place, entry: Entry) -> None:
        if place.port is None or entry.config.listener == "any" or entry.config.check_endpoint == "none":
            return
        if not is_ours(place.port, child.tree()):
            raise PortTaken(
                f"{entry.id}: port {place.port} is answered by another process, not by the engine. If it runs in a "
                "container started by a daemon, set `listener: any`."
            )

    def _check_port_was_free(self, child: Child, place: Place, entry: Entry) -> None:
        """An engine that ended because a stranger was first on its port deserves another port, not a back-off."""
        if place.port is None or entry.config.listener == "any":
            return
        holders = listener_pids(place.port)
        # None: somebody who cannot be seen. What is left of the engine's own tree may hold it for a moment more.
        if holders is None or holders - child.tree():
            raise PortTaken(f"{entry.id}: the engine ended, and port {place.port} is held by another process.")

    def _give_back(self, slot: SlotId, socket: str | None) -> None:
        self._ports_in_use.pop(slot, None)
        if socket is not None:
            Path(socket).unlink(missing_ok=True)

    # --- unload ---------------------------------------------------------------------------------------------------

    async def _unload(self, move: Move) -> None:
        """Cut our connections first: llama.cpp was seen to hang in TERM while a stream was open."""
        if move.slot in self._slots.live:
            # Untouched until it is certain that somebody will have its place.
            await self._grants.make_way(move)
        live = self._slots.live.pop(move.slot, None)
        if live is None:
            return
        live.pool.close()
        await self._end(live, self._memory.held_by(live.id))
        self._give_back(move.slot, live.socket)

    async def _end(self, live: LiveSlot, held: Held) -> None:
        """Its processes, then its memory: what was not given back yet cannot be given to another."""
        await live.child.stop(self._stop_timeout_s(live))
        self._memory.remember(live.id, live.entry)
        await self._memory.back(live.id, held)
        await self._grants.leave(live.id)

    def _stop_timeout_s(self, live: LiveSlot) -> float:
        """What the configuration says now: a reload may have changed it for an engine that runs already."""
        current = self._catalog.revision(live.entry.id, live.entry.spec.revision)
        return (current or live.entry).config.stop_timeout_s

    def _on_exit(self, live: LiveSlot, exit: Exit) -> None:
        """The engine ended. If nobody asked it to, everything it served is lost."""
        if self._slots.live.pop(live.id, None) is None:
            return
        self._observer.lost(live.entry.id, live.id, str(exit))
        self.failures.ended(live.entry, live.id, "engine", exit, live.child.log.tail(LAST_LINES))
        self._give_back(live.id, live.socket)
        self._end_remains(live)
        self._post(SlotsLost(self._clock(), (live.id,), Tier.COLD, str(exit)))
        live.pool.close()

    def _end_remains(self, live: LiveSlot) -> None:
        # What it held is asked now: the scheduler, once it hears of the loss, counts it as free.
        held = self._memory.held_by(live.id)
        self._remains.clear_up(self._end(live, held), held.unseen | frozenset(held.seen), f"remains {live.id}")


def _address(place: Place) -> Address:
    return Address(path=place.socket) if place.socket else Address("127.0.0.1", place.port or 0)


def _failed(entry: Entry, child: Child, why: str) -> LoadFailed:
    said = f"{entry.id} could not be loaded: {why}."
    return LoadFailed(said, public=said, details="\n".join(child.log.tail(LAST_LINES)))
