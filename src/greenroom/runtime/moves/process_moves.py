"""Moves of engines with one process for each slot.

Owns the way from a launch to a live slot and back: grant, port or socket, process, readiness, memory. `hosted_moves.py`
does the same for slots that live in workers. Also owns our own HTTP calls to an engine: whether it is ready, and orders
such as to sleep or to wake. Never decides what moves: the scheduler did.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from greenroom.core.model import Claim, Move, SlotId, Tier
from greenroom.engines.base import CallEngine, Launch, LaunchPlace, Listens, ProcessEngine
from greenroom.errors import LoadFailed
from greenroom.http.upstream import EngineAddress, Pool
from greenroom.process.logs import START_LINES_MAX, StartLog, last_line, telling_line
from greenroom.process.proc import PortRange, is_ours, listener_pids, oom_kills
from greenroom.process.spawn import Child, Exit, spawn
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.clocks import running_timeout
from greenroom.runtime.memory.devices import HOST
from greenroom.runtime.memory.slot_memory import Held, SlotMemory
from greenroom.runtime.moves.admission import MemoryGrants, ModelRoots, Starting
from greenroom.runtime.moves.load_errors import LAST_LINES, LoadErrors, evidence_of_no_memory, failed
from greenroom.runtime.moves.opening import uninterrupted
from greenroom.runtime.shell import Shell
from greenroom.runtime.slots import LiveSlot
from greenroom.telemetry.logs import get_logger

# Another process may take the port between our choice and the engine's bind; another port is tried this often.
PORT_TRIES = 3
# An engine whose memory was granted to another holder has so long to end before it is killed.
TAKEN_STOP_S = 0.5
# An engine that needs longer to fall asleep is unloaded, which is as quick.
SLEEP_MAX_S = 60.0

_log = get_logger("moves")


class PortTaken(LoadFailed):
    """Another process answers on the port that was meant for the engine."""


class ProcessMoves:
    def __init__(
        self,
        shell: Shell,
        ports: PortRange,
        memory: SlotMemory,
        admission: MemoryGrants,
        failures: LoadErrors,
        roots: ModelRoots,
    ) -> None:
        self._catalog = shell.catalog
        self._slots = shell.slots
        self._run_dir = shell.state_dir.run_dir
        self._identity = shell.state_dir.identity("")
        self._ports = ports
        self._memory = memory
        self._admission = admission
        self._failures = failures
        self._observer = shell.observer
        self._roots = roots
        self._ports_in_use: dict[SlotId, int] = {}

    # --- load -----------------------------------------------------------------------------------------------------

    async def load(self, move: Move, entry: Entry, engine: ProcessEngine) -> Claim | None:
        """Start the engine and wait until it answers. Returns what it was seen to use, where that is known. Raises
        LoadFailed, NoGrant or StoreDown, and leaves nothing behind."""
        await self._roots.check(entry)
        # What a crashed engine held, memory above all, is free only when its last process has ended.
        await self._admission.cleanup.finished(move.claim)
        async with self._admission.granted(move):
            await self._admission.check_room(move)
            await self._admission.grants.confirm(move.slot)
            return await self._load_granted(move, entry, engine)

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
            launch = engine.launch(entry.engine_name, entry.config, place)
            child, seen = await self._ready_child(move, entry, launch, place, attempt)
        except BaseException:
            self._give_back(move.slot, place.socket)
            raise
        pool = Pool(_address(place), name=f"The engine of {entry.id}")
        now = asyncio.get_running_loop().time()
        call = EngineCall(pool.address)
        live = LiveSlot(move.slot, entry, child, pool, place.socket, now, call, stop=lambda: self._stopped(live))
        self._slots.live[move.slot] = live
        child.on_exit(lambda exit: self._on_exit(live, exit))
        return seen

    async def _ready_child(
        self, move: Move, entry: Entry, launch: Launch, place: LaunchPlace, attempt: int
    ) -> tuple[Child, Claim | None]:
        kills_before, log = oom_kills(), StartLog(self._slots.log(move.model))
        identity = f"{self._identity}{move.slot}.{attempt}"
        try:
            child = await spawn(launch.command, identity=identity, log=log)
        except LoadFailed as error:
            raise LoadFailed(
                f"{entry.id} could not be loaded: {error.message}.",
                public=f"{entry.id} could not be loaded: its program could not be started.",
                details=error.details,
            ) from error
        self._slots.starting[move.slot] = starting = Starting(child)
        measuring = asyncio.create_task(starting.measure(entry), name=f"size of {entry.id}")
        try:
            await self._until_ready(child, launch, place, entry)
            return child, await self._memory.look(move.slot)
        except BaseException as error:
            # Also when this move was aborted: its processes and their memory must be gone before the move ends.
            held = self._memory.held_by(move.slot)
            await child.stop(self._stop_s(move.slot, entry))
            await self._memory.back(move.slot, held)
            lines = log.tail(START_LINES_MAX)
            kills = oom_kills() - kills_before
            if isinstance(error, LoadFailed) and (complaint := evidence_of_no_memory(child, lines, kills)):
                raise self._memory.shortage(move, entry, complaint, error.details or "") from error
            raise
        finally:
            measuring.cancel()
            self._slots.starting.pop(move.slot, None)

    def _place(self, move: Move, entry: Entry, engine: ProcessEngine) -> LaunchPlace:
        gpus = self._memory.gpus_for(entry, move.claim)
        if engine.listens is Listens.SOCKET:
            # Slot ids are never used again, so no leftover socket can be in the way.
            socket = str(self._run_dir / f"{move.slot}.sock")
            return LaunchPlace(move.claim, None, socket, gpus, *self._memory.sizes_of(gpus or ()))
        port = self._ports.pick(set(self._ports_in_use.values()))
        self._ports_in_use[move.slot] = port
        return LaunchPlace(move.claim, port, None, gpus, *self._memory.sizes_of(gpus or ()))

    async def _until_ready(self, child: Child, launch: Launch, place: LaunchPlace, entry: Entry) -> None:
        """Wait until the engine answers. Its process is watched too: a dying engine may still answer. Raises LoadFailed
        or PortTaken."""
        ended = asyncio.ensure_future(child.wait())
        ready = asyncio.ensure_future(self._answers(launch, place))
        try:
            with contextlib.suppress(TimeoutError):
                async with running_timeout(entry.config.load_timeout_s):
                    await asyncio.wait((ended, ready), return_when=asyncio.FIRST_COMPLETED)
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

    async def _answers(self, launch: Launch, place: LaunchPlace) -> None:
        if launch.check_path is not None:
            await until_ready(_address(place), launch.check_path)

    def _check_owner(self, child: Child, place: LaunchPlace, entry: Entry) -> None:
        if place.port is None or entry.config.listener == "any" or entry.config.check_endpoint == "none":
            return
        if not is_ours(place.port, child.tree()):
            raise PortTaken(
                f"{entry.id}: port {place.port} is answered by another process, not by the engine. If it runs in a "
                "container started by a daemon, set `listener: any`."
            )

    def _check_port_was_free(self, child: Child, place: LaunchPlace, entry: Entry) -> None:
        """Raises PortTaken where another process holds the port: the load is tried on another, without back-off."""
        if place.port is None or entry.config.listener == "any":
            return
        holders = listener_pids(place.port)
        # None: a process that cannot be seen. What is left of the engine's own tree may hold the port a moment longer.
        if holders is None or holders - child.tree():
            raise PortTaken(f"{entry.id}: the engine ended, and port {place.port} is held by another process.")

    def _give_back(self, slot: SlotId, socket: str | None) -> None:
        self._ports_in_use.pop(slot, None)
        if socket is not None:
            Path(socket).unlink(missing_ok=True)

    # --- sleep and wake -------------------------------------------------------------------------------------------

    async def sleep(self, move: Move) -> Claim | None:
        """Have the engine free its GPU memory; its process stays. Raises LoadFailed; the slot must be unloaded then."""
        await self._admission.grants.make_way(move)
        live = self._slots.live.get(move.slot)
        if live is None:
            # It ended a moment ago, which the scheduler was told.
            return None
        held = self._memory.held_by(live.id)
        async with _ordered(live, "be put to sleep", SLEEP_MAX_S) as (engine, call):
            await engine.sleep(live.entry.config, call)
        await self._memory.slept(live.id, held.less(_stays(live.entry, held)))
        await self._admission.grants.leave(live.id)
        return await self._memory.look(live.id)

    async def wake(self, move: Move) -> Claim | None:
        """Have the engine take its memory back and answer. Raises LoadFailed, NoGrant or StoreDown. What is half awake
        holds memory that no claim covers: if it does not wake, its process is ended."""
        await self._admission.cleanup.finished(move.claim)
        async with self._admission.granted(move):
            await self._admission.check_room(move)
            await self._admission.grants.confirm(move.slot)
            live = self._slots.live.get(move.slot)
            if live is None:
                raise LoadFailed(f"{move.model} could not be woken: its engine has ended.")
            try:
                async with _ordered(live, "be woken", live.entry.config.load_timeout_s) as (engine, call):
                    await engine.wake(live.entry.config, call)
            except BaseException:
                await uninterrupted(self._stopped(live))
                raise
            return await self._memory.look(live.id)

    async def _stopped(self, live: LiveSlot) -> None:
        """End its process, which reports the loss of the slot as if it had crashed."""
        await live.process.stop(self._stop_timeout_s(live))

    # --- unload ---------------------------------------------------------------------------------------------------

    async def unload(self, move: Move) -> None:
        """Cut our connections first: llama.cpp was seen to hang in TERM while a stream was open."""
        if move.slot in self._slots.live:
            # The slot is untouched until it is certain that its memory will be used.
            await self._admission.grants.make_way(move)
        live = self._slots.live.pop(move.slot, None)
        if live is None:
            return
        live.pool.close()
        await self._end(live, self._memory.held_by(live.id))
        self._give_back(move.slot, live.socket)

    async def _end(self, live: LiveSlot, held: Held) -> None:
        """End its processes, then wait for its memory: the grant is given back only after both."""
        await live.process.stop(self._stop_timeout_s(live))
        self._memory.remember(live.id, live.entry)
        await self._memory.back(live.id, held)
        await self._admission.grants.leave(live.id)

    def _stop_timeout_s(self, live: LiveSlot) -> float:
        """As configured now: a reload may have changed it while the engine runs."""
        return self._stop_s(live.id, self._catalog.revision(live.entry.id, live.entry.spec.revision) or live.entry)

    def _stop_s(self, slot: SlotId, entry: Entry) -> float:
        is_taken = self._admission.grants.is_taken(slot)
        return min(TAKEN_STOP_S, entry.config.stop_timeout_s) if is_taken else entry.config.stop_timeout_s

    def _on_exit(self, live: LiveSlot, exit: Exit) -> None:
        """The engine ended. If it was not asked to, everything it served is lost."""
        if self._slots.live.pop(live.id, None) is None:
            return
        self._observer.lost(live.entry.id, live.id, str(exit))
        self._failures.ended(live.entry, live.id, "engine", exit, live.process.log.tail(LAST_LINES))
        self._give_back(live.id, live.socket)
        self._clean_up(live)
        self._failures.post_lost((live.id,), Tier.COLD, exit)
        live.pool.close()

    def _clean_up(self, live: LiveSlot) -> None:
        # What it held is read now: once the scheduler hears of the loss, it counts that as free.
        held = self._memory.held_by(live.id)
        self._admission.cleanup.start(self._end(live, held), held.unseen | frozenset(held.seen), f"remains {live.id}")


@contextlib.asynccontextmanager
async def _ordered(live: LiveSlot, what: str, max_s: float) -> AsyncIterator[tuple[ProcessEngine, CallEngine]]:
    """For one order to its engine. Raises LoadFailed where it fails or takes too long."""
    engine = live.entry.engine
    assert isinstance(engine, ProcessEngine) and live.call is not None, "others are moved elsewhere"
    try:
        async with running_timeout(max_s):
            yield engine, live.call
    except (LoadFailed, OSError, ValueError) as error:
        why = error.message.rstrip(".") if isinstance(error, LoadFailed) else str(error)
        said = f"it took more than {max_s:g} s" if isinstance(error, TimeoutError) else why
        raise LoadFailed(f"{live.entry.id} could not {what}: {said}.") from error


def _stays(entry: Entry, held: Held) -> Claim:
    """What a sleeping engine keeps of each GPU: its need asleep, shared evenly."""
    asleep = entry.spec.need_asleep
    gpus = [device for device in held.seen if device != HOST]
    return {} if asleep is None or not gpus else dict.fromkeys(gpus, -(-asleep.gpu_mib // len(gpus)))


def _address(place: LaunchPlace) -> EngineAddress:
    return EngineAddress(path=place.socket) if place.socket else EngineAddress("127.0.0.1", place.port or 0)


def _failed(entry: Entry, child: Child, why: str) -> LoadFailed:
    lines = child.log.tail(START_LINES_MAX)
    reason = telling_line(lines)
    if reason is None and child.exit is not None and child.exit.code:
        # A program that gave up says last why; one that was killed does not.
        reason = last_line(lines)
    return failed(f"{entry.id} could not be loaded", why, reason, lines)


# Of an answer. Those of control calls have some bytes.
ANSWER_MAX_BYTES: Final = 1024 * 1024


class EngineCall:
    """Calls to one address. HTTP/1.0: the answer is not chunked and ends with the connection. Raises OSError or
    ValueError."""

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self.notes: dict[str, float] = {}

    async def __call__(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        """Method, target and JSON body → status and body."""
        async with _connected(self._address) as (reader, writer):
            head = f"{method} {target} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            return await _answer(reader)


@contextlib.asynccontextmanager
async def _connected(address: EngineAddress) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    if address.path:
        reader, writer = await asyncio.open_unix_connection(address.path)
    else:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    whole = b""
    while more := await reader.read(ANSWER_MAX_BYTES):
        whole += more
        head, end, body = whole.partition(b"\r\n\r\n")
        if len(whole) > ANSWER_MAX_BYTES:
            raise ValueError(f"it answered with more than {ANSWER_MAX_BYTES:,} bytes")
        # An engine may keep the connection open all the same.
        if end and (length := _length(head)) is not None and len(body) >= length:
            return _status(head), body[:length]
    head, end, body = whole.partition(b"\r\n\r\n")
    if not end:
        raise ValueError("it closed the connection without an answer")
    return _status(head), body


def _status(head: bytes) -> int:
    try:
        return int(head.split(b" ", 2)[1])
    except (IndexError, ValueError):
        raise ValueError("it did not answer like an HTTP server") from None


def _length(head: bytes) -> int | None:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return int(value)
    return None


# --- readiness ------------------------------------------------------------------------------------------------------

# The first polls are frequent, because small models are ready in a tenth of a second; later ones are slower.
ASK_FIRST_S: Final = 0.02
ASK_SLOWEST_S: Final = 0.25
ASK_GROWTH: Final = 1.3
READY_MAX_S: Final = 2.0


async def until_ready(address: EngineAddress, path: str) -> None:
    """Return when the path answers 200. Runs until cancelled otherwise."""
    pause_s = ASK_FIRST_S
    while not await _is_ready(address, path):
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * ASK_GROWTH, ASK_SLOWEST_S)


async def _is_ready(address: EngineAddress, path: str) -> bool:
    """HTTP/1.1, as a health check of any other program would ask. Only the status line is read."""
    try:
        async with asyncio.timeout(READY_MAX_S), _connected(address) as (reader, writer):
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            return _status(await reader.readuntil(b"\n")) == 200
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return False
