"""Writes the journal of leases without blocking the loop. A lease is granted only once it is on disk.

Owns the order of changes and the one thread that writes them; changes that come while it writes share the next write.
A disk that is full or broken stops new leases and nothing else: held leases go on, and ends are written later.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from greenroom.leases.journal import Change, Ended, Heard, Journal, Kept
from greenroom.runtime.detached import run_detached
from greenroom.telemetry.logs import get_logger

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
        self._writing: asyncio.Task[None] | None = None
        self._warned = False
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
            self._warn(error)
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
        try:
            async with asyncio.timeout(CLOSE_MAX_S):
                if self._writing is not None:
                    await asyncio.wait((self._writing,))
        except TimeoutError:
            # A thread still uses the file; the process ends soon.
            return
        self._journal.close()

    def _put(self, change: Change, done: asyncio.Future[None] | None) -> None:
        self._pending.append((change, done))
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_all(), name="write leases")

    async def _write_all(self) -> None:
        try:
            while self._pending:
                batch, self._pending = self._pending, []
                if not await self._write(batch):
                    return
        finally:
            self._writing = None

    async def _write(self, batch: list[_Pending]) -> bool:
        changes = [change for change, _ in batch]
        try:
            await run_detached(lambda: self._journal.append(changes), "write leases")
        except OSError as error:
            self._warn(error)
            self._pending = self._still_to_write(changes) + self._pending
            _tell([done for _, done in batch], error)
            return any(done is not None for _, done in self._pending)
        self._warned = False
        _tell([done for _, done in batch], None)
        return True

    def _still_to_write(self, changes: list[Change]) -> list[_Pending]:
        """Ends to write again with the next change: one for each lease, and only for leases that are in the journal.

        While a disk is full, leases that were never held end too; these must not pile up.
        """
        ends = {change.id: change for change in changes if isinstance(change, Ended)}
        return [(change, None) for id, change in ends.items() if id in self._journal.live]

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("the journal of leases cannot be written", error=error.strerror or str(error))


def _tell(waiting: list[asyncio.Future[None] | None], error: OSError | None) -> None:
    for done in waiting:
        if done is None or done.done():
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
