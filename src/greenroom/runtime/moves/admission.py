"""What comes before a load: nothing of a crash is left, its memory is free, its files lie where they may.

Owns the order of these checks, the protocol by which grants are asked for (`Grants`), the tasks that clean up after
crashed engines (`Cleanup`), and the folders below which files of models must lie (`ModelRoots`). Never decides what
moves: the scheduler did.

While requests wait for a model, its engine often cannot start yet: others must be evicted first, and the disk is idle.
`Prefetch` reads the files of one model at a time into the page cache, front to back. It stops when the model is ready,
when no request waits for it, or when half of the available memory is used up. The page cache is freed when memory is
needed. Never waits for a disk on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from greenroom.base.detached import run_detached
from greenroom.config.part import GatewayState
from greenroom.core.model import Claim, DeviceId, ModelId, Move, SlotId, Tier
from greenroom.core.view import SchedulerView
from greenroom.errors import GreenroomError, OutsideRoots
from greenroom.process.proc import bytes_read
from greenroom.process.spawn import Child
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.devices import HOST
from greenroom.runtime.observer import Observer
from greenroom.telemetry.logs import get_logger


class NoGrant(Exception):
    """This memory cannot be had now. Nothing has failed: the scheduler plans again."""


class Grants:
    """Permission to use memory. This one grants all that the scheduler decided: no other gateway uses these GPUs.
    `SharedSlots` asks the store that gateways share."""

    async def enter(self, move: Move) -> None:
        """Hold what this load needs. Raises NoGrant or StoreDown; `leave` follows in any case."""

    async def confirm(self, slot: SlotId) -> None:
        """The last check before an engine starts. Raises NoGrant if the grant was lost meanwhile, or StoreDown."""

    async def make_way(self, move: Move) -> None:
        """Called before an eviction touches its slot. Raises NoGrant if the eviction would be in vain."""

    async def leave(self, slot: SlotId) -> None:
        """The slot's processes have ended and its memory is back. Never raises; slots without a grant are ignored."""

    def is_taken(self, slot: SlotId) -> bool:
        """True if the slot's memory was granted to another holder, so that its engine must end at once."""
        return False


class FreeMemory(Protocol):
    async def lacks(self, claim: Claim) -> Claim:
        """What of this claim is not really free, after a moment of waiting for it."""


class MemoryGrants:
    """What must hold before a move takes memory, and after it has given memory back."""

    def __init__(self, grants: Grants, cleanup: Cleanup, memory: FreeMemory) -> None:
        self.grants = grants
        self.cleanup = cleanup
        self._memory = memory

    @asynccontextmanager
    async def granted(self, move: Move) -> AsyncIterator[None]:
        """Hold the grant of this move; give it back if the block raises. Raises NoGrant or StoreDown."""
        try:
            await self.grants.enter(move)
            yield
        except BaseException:
            await self.grants.leave(move.slot)
            raise

    async def check_room(self, move: Move) -> None:
        """Raises NoGrant where memory that is free in the ledger is still used."""
        if missing := await self._memory.lacks(move.claim):
            said = " ".join(f"{device}={mib}" for device, mib in missing.items())
            raise NoGrant(f"memory is free on paper only, missing_mib: {said}")


class Cleanup:
    """Tasks that end what crashed engines left, and wait for their memory.

    A load waits only for the tasks on its own GPUs: a crash on one GPU must not hold up the others. It also waits where
    the GPUs of either are not known.
    """

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], frozenset[DeviceId]] = {}

    def start(self, work: Coroutine[Any, Any, None], devices: Iterable[DeviceId], name: str) -> None:
        """Run `work`, which cleans up on these devices."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = _gpus(devices)
        task.add_done_callback(self._tasks.pop)

    async def finished(self, devices: Iterable[DeviceId] = ()) -> None:
        """Wait until nothing is left on these devices; on any device if none is named."""
        mine = _gpus(devices)
        while waited_for := [task for task, others in self._tasks.items() if _may_meet(mine, others)]:
            await asyncio.wait(waited_for)


def _gpus(devices: Iterable[DeviceId]) -> frozenset[DeviceId]:
    return frozenset(devices) - {HOST}


def _may_meet(mine: frozenset[DeviceId], others: frozenset[DeviceId]) -> bool:
    return not mine or not others or not mine.isdisjoint(others)


# --- files of models ------------------------------------------------------------------------------------------------

MIB: Final = 2**20
# Read between two checks whether it is still wanted: short on any disk, and few checks on a fast one.
PIECE_BYTES: Final = 32 * MIB
# Read by one call, into one buffer of this size.
READ_BYTES: Final = 4 * MIB
# The share of available memory to fill. The rest is for running models.
MEMORY_SHARE: Final = 0.5
# Models in the queue; a disk cannot read more before they are served.
QUEUE_MAX: Final = 16
# Pages of a range that are probed to tell whether it is in the page cache.
PROBES: Final = 4
# After this a disk counts as hanging, and reading ahead stops. It keeps one thread.
PIECE_MAX_S: Final = 60.0

_log = get_logger("prefetch")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class FileRange:
    """One part of a file."""

    file: Path
    offset: int
    length: int


class Prefetch:
    def __init__(
        self,
        state: SchedulerView,
        available_mib: Callable[[], int],
        observer: Observer,
        *,
        read: Callable[[FileRange], int] | None = None,
        piece_bytes: int = PIECE_BYTES,
        piece_max_s: float = PIECE_MAX_S,
    ) -> None:
        """`read` reads a piece, and blocks."""
        self._read_piece = read or read_ahead
        self._piece_bytes = piece_bytes
        self._piece_max_s = piece_max_s
        self._state = state
        self._available_mib = available_mib
        self._observer = observer
        self._queue: dict[ModelId, Entry] = {}
        self._task: asyncio.Task[None] | None = None

    def waits(self, entry: Entry) -> None:
        """A request has begun to wait for this model. Hosted engines bypass the page cache and need no help."""
        if entry.engine.hosted or len(self._queue) >= QUEUE_MAX or not self._is_waited_for(entry.id):
            return
        self._queue.setdefault(entry.id, entry)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="prefetch")
            self._task.add_done_callback(self._ended)

    def _is_waited_for(self, model: ModelId) -> bool:
        """Whether requests wait for it to load. If it is ready they wait for a turn, and no read helps."""
        slots = self._state.slots_of(model)
        # A sleeper wakes without reading its files.
        helps = not any(slot.is_serving or slot.tier is Tier.ASLEEP for slot in slots)
        return self._state.waitlist.count(model) > 0 and helps

    def close(self) -> None:
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("prefetch broke", error=repr(error))

    async def _run(self) -> None:
        while self._queue:
            model = next(iter(self._queue))
            # It stays in the queue while it is read, so that later requests do not have it read again.
            try:
                await self._read(self._queue[model])
            finally:
                self._queue.pop(model, None)

    async def _read(self, entry: Entry) -> None:
        began, read_bytes = time.monotonic(), 0
        # In a thread too: the folder may lie on a disk that hangs.
        pieces = await self._detached(lambda: pieces_of(entry.engine.files(entry.config), self._piece_bytes)) or []
        room = int(self._available_mib() * MIB * MEMORY_SHARE)
        for piece in pieces:
            room -= piece.length
            if room < 0 or not self._is_waited_for(entry.id):
                break
            got = await self._detached(partial(self._read_piece, piece))
            if got is None:
                break
            read_bytes += got
        if read_bytes:
            self._observer.prefetched(entry.id, read_bytes, time.monotonic() - began)

    async def _detached(self, work: Callable[[], _Result]) -> _Result | None:
        """None if there is no thread, or the disk does not answer in time; the thread is left behind then."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(self._piece_max_s):
                return await run_detached(work, "prefetch")
        return None


def pieces_of(files: Iterable[Path], piece_bytes: int = PIECE_BYTES) -> list[FileRange]:
    """All regular files in pieces, front to back. Others are left to the engine's own error. Blocks."""
    pieces = []
    for file in files:
        try:
            seen = os.stat(file)
        except (OSError, ValueError):
            continue
        if stat.S_ISREG(seen.st_mode):
            ends = range(0, seen.st_size, piece_bytes)
            pieces += [FileRange(file, offset, min(piece_bytes, seen.st_size - offset)) for offset in ends]
    return pieces


def _is_cached(descriptor: int, piece: FileRange) -> bool:
    """Whether its pages are in the page cache, judged by a few of them."""
    byte, last = bytearray(1), piece.length - 1
    try:
        return all(
            os.preadv(descriptor, [byte], piece.offset + last * probe // (PROBES - 1), os.RWF_NOWAIT)
            for probe in range(PROBES)
        )
    except OSError:
        # A page would have to be read from disk, or the file system cannot tell.
        return False


def read_ahead(piece: FileRange, is_cached: Callable[[int, FileRange], bool] = _is_cached) -> int:
    """Read it into the page cache unless it is there already. Returns the bytes that were read. Blocks."""
    try:
        descriptor = os.open(piece.file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or is_cached(descriptor, piece):
            return 0
        # The kernel may read the next piece while this one is copied.
        os.posix_fadvise(descriptor, piece.offset, 2 * piece.length, os.POSIX_FADV_WILLNEED)
        return _read_through(descriptor, piece)
    except OSError:
        return 0
    finally:
        os.close(descriptor)


def _read_through(descriptor: int, piece: FileRange) -> int:
    buffer, done = bytearray(min(READ_BYTES, piece.length)), 0
    while done < piece.length:
        got = os.preadv(descriptor, [memoryview(buffer)[: piece.length - done]], piece.offset + done)
        if got == 0:
            break
        done += got
    return done


class ModelRoots:
    """The folders below which files of models must be."""

    def __init__(self, live: GatewayState) -> None:
        self._live = live

    async def check(self, entry: Entry) -> None:
        """Raises OutsideRoots if a file of this model is elsewhere."""
        if roots := self._roots_of(entry):
            await run_detached(lambda: check_roots(entry, roots), f"roots of {entry.id}")

    def _roots_of(self, entry: Entry) -> tuple[str, ...]:
        """Empty if its files may be anywhere."""
        config = self._live.config
        configured = config.models.get(entry.base_id)
        # A version may be the configured one.
        is_configured = configured is not None and entry.config.path == configured.path
        is_free = is_configured or not (entry.is_adhoc or entry.version is not None)
        return () if is_free and not config.model_roots else config.roots


def check_roots(entry: Entry, roots: Sequence[str]) -> None:
    """Raises OutsideRoots if a file of this model lies outside of the roots. Blocks as long as its disk does."""
    if not roots or entry.config.path is None:
        return
    allowed = [os.path.realpath(root) for root in roots]
    for file in (Path(entry.config.path), *entry.engine.files(entry.config)):
        whole = os.path.realpath(file)
        if not any(os.path.commonpath((whole, root)) == root for root in allowed):
            raise OutsideRoots(
                f"{entry.id}: {file} lies outside of the roots ({', '.join(roots)}) once links are resolved. Move it "
                "there, or add its folder to model_roots in the configuration."
            )


def files_of(entry: Entry) -> list[str]:
    """The files that this model needs, as they are named. Blocks as long as its disk does."""
    named = [] if entry.config.path is None else [entry.config.path]
    # An engine of another package may fail in any way that files allow.
    with contextlib.suppress(OSError, ValueError, GreenroomError):
        named += map(str, entry.engine.files(entry.config))
    return [path for path in named if "\0" not in path]


# --- how far a start is ---------------------------------------------------------------------------------------------

# Words of vLLM and SGLang while they read the files of a model; llama.cpp prints a dot for each percent.
_SHARDS: Final = re.compile(r"checkpoint shards:\s+(\d{1,3})% Completed")
_DOTS: Final = re.compile(r"\.{1,100}")
_LINES_READ: Final = 20


class Starting:
    """How far an engine is that starts: by what it prints, and by what its processes have read of the model's files.

    Pages of a mapped file count as read once they are in the process, whether they came from the disk or were in the
    page cache. The little that a program reads of itself counts too.
    """

    def __init__(self, child: Child) -> None:
        self._child = child
        self._size_bytes = 0
        # The largest share that callers were told: sources change, and files are unmapped again.
        self.furthest = 0.0

    async def measure(self, entry: Entry) -> None:
        """Learn how large the files are. The disk may hang: nothing waits for this."""
        with contextlib.suppress(OSError):
            self._size_bytes = await run_detached(lambda: _size_of(entry), f"size of {entry.id}")

    def told(self) -> float | None:
        """The share that the engine says it has done, by the last of its words."""
        for line in reversed(self._child.log.tail(_LINES_READ)):
            if found := _SHARDS.search(line):
                return int(found[1]) / 100
            if _DOTS.fullmatch(line.strip()):
                return len(line.strip()) / 100
        return None

    def read(self) -> float | None:
        """The share of the files that its processes have read; None while their size is not known."""
        return sum(map(bytes_read, self._child.tree())) / self._size_bytes if self._size_bytes else None


def _size_of(entry: Entry) -> int:
    size_bytes = 0
    for file in set(files_of(entry)):
        with contextlib.suppress(OSError):
            size_bytes += os.path.getsize(file) if os.path.isfile(file) else 0
    return size_bytes
