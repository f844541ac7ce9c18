"""Writes that are made together, once the event loop has handled all that it read in one turn.

Each write wakes the process at its other end, which between two answers of a busy gateway falls asleep again; and while
the kernel works, our own code leaves the caches. With writes made together a request costs a fifth less.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

log = logging.getLogger("greenroom.http")

# What has waited for so many others goes out at once: in a long turn the first answer must not wait for the last.
WRITERS_MAX: Final = 16
# After so many turns in a row with one write each, there is little to do: so many writes are made at once, before it is
# looked again whether others come in the same turn. To look costs a callback.
LONE_TURNS: Final = 8
# More than this of one connection goes out at once, so that a slow reader is noticed.
HELD_BYTES_MAX: Final = 64 * 1024


class WriteBatch:
    """The writes of many connections. Belongs to one event loop."""

    __slots__ = ("_at_once", "_count", "_lone_turns", "_loop", "_writers")

    def __init__(self) -> None:
        # Asked for once: Python looks each time whether the process was forked, by a system call.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writers: list[Writer] = []
        # How many wrote in this turn, and how many turns before it had one write each.
        self._count = 0
        self._lone_turns = 1
        # How many writes are left to be made at once.
        self._at_once = 0

    def add(self, writer: Writer) -> None:
        if self._at_once > 0:
            self._at_once -= 1
            writer.flush()
            return
        self._count += 1
        if self._count == 1:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._end_turn)
            if self._lone_turns > 0:
                # It need not wait for others that will not come.
                writer.flush()
                return
        self._writers.append(writer)
        if len(self._writers) >= WRITERS_MAX:
            self._flush()

    def _end_turn(self) -> None:
        self._lone_turns = self._lone_turns + 1 if self._count == 1 else 0
        if self._lone_turns >= LONE_TURNS:
            self._at_once = LONE_TURNS
        self._count = 0
        self._flush()

    def _flush(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            try:
                writer.flush()
            except Exception:
                # Of one connection: those after it must still be written to.
                log.exception("writing to a connection failed")


class Writer:
    """Writes to one transport. Call `flush` before closing it; what is held when it closes otherwise is dropped."""

    __slots__ = ("_batch", "_held", "_transport")

    def __init__(self, batch: WriteBatch, transport: asyncio.Transport) -> None:
        self._batch = batch
        self._transport = transport
        self._held = b""

    def write(self, data: bytes) -> None:
        if self._held:
            self._held += data
        else:
            self._held = data
            self._batch.add(self)
        if len(self._held) > HELD_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Write what is held, now."""
        data, self._held = self._held, b""
        if not data:
            return
        try:
            self._transport.write(data)
        except RuntimeError:
            # So says uvloop of a transport that is closed, and was not asked whether it is, which costs more.
            if not self._transport.is_closing():
                raise
