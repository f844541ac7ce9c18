"""The journal of leases: what must be known of them after the gateway was killed.

`Journal` owns one file of JSON lines, which is compacted when it has grown too long. A change is on disk when `append`
returns, which blocks. A last line that a crash cut off counts as never written.

`JournalWriter` writes it in one thread, so that the loop never waits for a disk. Changes that come while it writes
share the next write. A lease is granted only once it is on disk. A disk that is full or broken stops new leases and
nothing else: held leases go on, and ends are written later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from greenroom.base.detached import run_detached
from greenroom.base.plain_file import APPENDING, append_whole, replaced, sync_folder
from greenroom.base.repeated import AGAIN_S, Repeated
from greenroom.leases.records import LeaseAsk
from greenroom.telemetry.logs import get_logger

# Compacted beyond this: some thousand grants and ends.
BYTES_MAX = 1024 * 1024
# The journal is never longer; the rest of a larger file is not read.
READ_BYTES_MAX = 64 * 1024 * 1024
# Upper limits of what we write: a year, and a 64-bit integer.
SECONDS_MAX = 31_536_000
NUMBER_MAX = 2**63 - 1
_CLOSED = -1


Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
Moment = Annotated[float, msgspec.Meta(ge=0, le=NUMBER_MAX)]


class Kept(msgspec.Struct, frozen=True, tag="granted"):
    """A lease that was granted and has not ended."""

    ask: LeaseAsk
    token: Number
    claim: Annotated[dict[str, Number], msgspec.Meta(min_length=1)]
    heard_at: Moment
    """Wall-clock time of the last renewal."""

    @property
    def id(self) -> str:
        return self.ask.id


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """A renewal. Not every one is written: the caller decides which."""

    id: str
    at: Moment


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    id: str


class LastToken(msgspec.Struct, frozen=True, tag="last_token"):
    """The highest token of earlier files."""

    token: Number


Change = Kept | Heard | Ended | LastToken

_DECODER: Final[msgspec.json.Decoder[Change]] = msgspec.json.Decoder(Change)


class Journal:
    def __init__(self, path: Path, bytes_max: int = BYTES_MAX) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._fd = _CLOSED
        self._size = 0
        # Size at which it is compacted next; larger after a failure.
        self._compact_at = bytes_max
        self.live: dict[str, Kept] = {}
        self.last_token = 0
        # Lines of an earlier run that could not be parsed.
        self.spoiled = 0

    @property
    def is_open(self) -> bool:
        return self._fd != _CLOSED

    def open(self) -> None:
        """Read the journal of an earlier run and continue it. Raises OSError."""
        fd = os.open(self._path, APPENDING, 0o600)
        self.live, self.last_token, self.spoiled = {}, 0, 0
        try:
            self._size = self._read(fd)
            # Half a line would make the next one unreadable.
            os.ftruncate(fd, self._size)
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        self._compact()

    def append(self, changes: Sequence[Change]) -> None:
        """Write these changes durably. Raises OSError, and then none of them is written."""
        if not self.is_open:
            self.open()
        content = _lines(changes)
        append_whole(self._fd, content)
        self._size += len(content)
        for change in changes:
            self._take(change)
        if self._size > self._compact_at:
            self._compact()

    def close(self) -> None:
        fd, self._fd = self._fd, _CLOSED
        if fd != _CLOSED:
            os.close(fd)

    # --- reading ----------------------------------------------------------------------------------------------------

    def _read(self, fd: int) -> int:
        """Take in every whole line. Returns the offset where the last one ends."""
        content = os.pread(fd, READ_BYTES_MAX, 0)
        end = content.rfind(b"\n") + 1
        for line in content[:end].splitlines():
            try:
                self._take(_change(line))
            except (ValueError, RecursionError):
                self.spoiled += 1
        return end

    def _take(self, change: Change) -> None:
        match change:
            case LastToken(token):
                self.last_token = max(self.last_token, token)
            case Kept():
                self.last_token = max(self.last_token, change.token)
                self.live[change.id] = change
            case Heard(id, at) if id in self.live:
                self.live[id] = msgspec.structs.replace(self.live[id], heard_at=at)
            case Ended(id):
                self.live.pop(id, None)

    def _compact(self) -> None:
        """Rewrite the file with live leases only. If that fails, the old file grows on for a while."""
        content = _lines([LastToken(self.last_token), *self.live.values()])
        try:
            fd = replaced(self._path, content)
        except OSError:
            self._compact_at = 2 * max(self._size, self._bytes_max)
            return
        # From here on the new file counts, whether or not its name is on disk already.
        with contextlib.suppress(OSError):
            sync_folder(self._path.parent)
        self.close()
        self._fd, self._size = fd, len(content)
        self._compact_at = max(2 * self._size, self._bytes_max)


def _lines(changes: Iterable[Change]) -> bytes:
    return b"".join(msgspec.json.encode(change) + b"\n" for change in changes)


def _change(line: bytes) -> Change:
    """Raises ValueError or RecursionError for a line that is not ours: the file may be damaged."""
    change = _DECODER.decode(line)
    if isinstance(change, Kept) and not (
        0 <= change.ask.grace_s <= SECONDS_MAX and 0 < change.ask.ttl_s <= SECONDS_MAX
    ):
        raise ValueError("a time is out of range")
    return change


_log = get_logger("leases")

FILE_NAME = "leases.jsonl"
# Shutdown does not wait longer than this for a disk that hangs.
CLOSE_MAX_S = 5.0

_Pending = tuple[Change, asyncio.Future[None] | None]


class JournalWriter:
    """`open` it first; then report every grant, renewal and end."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder / FILE_NAME)
        self._pending: list[_Pending] = []
        self._writing = Repeated(
            self._write, "writing the journal of leases", lambda: AGAIN_S if self._pending else None, _log.failed
        )
        self._last_token = 0

    def next_token(self, wall_s: float) -> int:
        """A token greater than all before, also if the clock was set back or the journal is gone."""
        self._last_token = max(self._last_token + 1, self._journal.last_token + 1, int(wall_s * 1_000_000))
        return self._last_token

    def open(self) -> list[Kept]:
        """The leases of an earlier run, oldest first. A file that cannot be read is logged and counts as empty."""
        try:
            self._journal.open()
        except OSError as error:
            _log.failed("the journal of leases cannot be read", error)
        if self._journal.spoiled:
            _log.warning("lines of the journal of leases make no sense", lines=self._journal.spoiled)
        return list(self._journal.live.values())

    async def granted(self, kept: Kept) -> None:
        """Write this grant; it is on disk when this returns. Raises OSError."""
        done = asyncio.get_running_loop().create_future()
        self._put(kept, done)
        await done

    def heard(self, lease: str, at: float) -> None:
        """Write this renewal soon. If that fails, the next one is written instead."""
        self._put(Heard(lease, at), None)

    def ended(self, lease: str) -> None:
        """Write this end soon."""
        self._put(Ended(lease), None)

    async def close(self) -> None:
        """Write what waits, if the disk takes it."""
        try:
            async with asyncio.timeout(CLOSE_MAX_S):
                await self._writing.stop()
                await self._write()
        except TimeoutError:
            # A thread still uses the file; the process ends soon.
            return
        except OSError as error:
            _log.failed("ends of leases are not written", error)
        self._journal.close()

    def _put(self, change: Change, done: asyncio.Future[None] | None) -> None:
        self._pending.append((change, done))
        self._writing.start()
        self._writing.wake()

    async def _write(self) -> None:
        batch, self._pending = self._pending, []
        if not batch:
            return
        changes = [change for change, _ in batch]
        try:
            await run_detached(lambda: self._journal.append(changes), "write leases")
        except Exception as error:
            self._pending = self._still_to_write(changes) + self._pending
            _tell([done for _, done in batch], error)
            raise
        _tell([done for _, done in batch], None)

    def _still_to_write(self, changes: list[Change]) -> list[_Pending]:
        """Ends to write again: one for each lease, and only for leases that are in the journal. While a disk is full,
        leases that were never held end too; these must not pile up."""
        ends = {change.id: change for change in changes if isinstance(change, Ended)}
        return [(change, None) for id, change in ends.items() if id in self._journal.live]


def _tell(waiting: list[asyncio.Future[None] | None], error: Exception | None) -> None:
    for done in waiting:
        if done is None or done.done():
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
