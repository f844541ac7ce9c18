"""The gateway's end of a worker's control connection: requests out, answers in, one JSON object on each line.

Owns one socket and the requests that wait for an answer. Never decides what a failure means. Works by callbacks on the
loop, in microseconds: a swap consists of such steps.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

# An answer is some hundred bytes; a list of all slots some kilobytes.
LINE_BYTES_MAX: Final = 1024 * 1024
# Bounds what is buffered for a worker that reads nothing.
UNSENT_BYTES_MAX: Final = 1024 * 1024
# More bytes than any memory has.
FIGURE_MAX: Final = 2**62
_READ_BYTES: Final = 64 * 1024

Answer = Mapping[str, Any]
Progress = Callable[[float], None]


class OpFailed(Exception):
    """The worker reports a failure. `kind`: bad_model, out_of_memory, unknown_slot or failed."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class WorkerLost(Exception):
    """The connection ended before the answer: the worker has ended, or must be ended."""


@dataclass(slots=True)
class _PendingCall:
    answer: asyncio.Future[Answer]
    on_progress: Progress | None


class ControlLink:
    """`on_end` is called once when the connection has ended, unless `close` ended it."""

    def __init__(self, connected: socket.socket, on_end: Callable[[], None]) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._asked: dict[int, _PendingCall] = {}
        self._unread = b""
        self._unsent: deque[tuple[bytes, Sequence[int]]] = deque()
        self.is_open = True
        self._loop.add_reader(connected.fileno(), self._read)

    async def ask(
        self, op: str, *, fds: Sequence[int] = (), on_progress: Progress | None = None, **said: object
    ) -> Answer:
        """Ask and wait for the answer. Raises OpFailed or WorkerLost. If this is cancelled, the worker goes on."""
        if not self.is_open:
            raise WorkerLost("the worker is gone")
        number = next(self._numbers)
        asked = self._asked[number] = _PendingCall(self._loop.create_future(), on_progress)
        # Copies are sent: the originals may be closed before that.
        copies = [os.dup(fd) for fd in fds]
        try:
            self._send(json.dumps({"id": number, "op": op, **said}).encode() + b"\n", copies)
            return await asked.answer
        finally:
            self._asked.pop(number, None)

    def close(self) -> None:
        """Close the connection. The worker ends itself when it sees that."""
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for _, fds in self._unsent:
            _close_all(fds)
        self._unsent.clear()
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(WorkerLost("the worker ended before it had answered"))

    def _end(self) -> None:
        if self.is_open:
            self.close()
            self._on_end()

    # --- out --------------------------------------------------------------------------------------------------------

    def _send(self, line: bytes, fds: Sequence[int]) -> None:
        self._unsent.append((line, fds))
        if sum(len(waiting) for waiting, _ in self._unsent) > UNSENT_BYTES_MAX:
            self._end()
        else:
            self._write()

    def _write(self) -> None:
        """Send what the socket takes now, and the rest when it takes more."""
        try:
            while self._unsent:
                line, fds = self._unsent[0]
                sent = socket.send_fds(self._socket, [line], fds) if fds else self._socket.send(line)
                # Descriptors are sent with the first byte.
                _close_all(fds)
                self._unsent[0] = (line[sent:], ())
                if sent == len(line):
                    self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._socket.fileno(), self._write)
        except OSError:
            self._end()
        else:
            self._loop.remove_writer(self._socket.fileno())

    # --- in ---------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        is_sound = all(map(self._take, lines)) and len(self._unread) <= LINE_BYTES_MAX
        if not data or not is_sound:
            self._end()

    def _take(self, line: bytes) -> bool:
        """Take in an answer or a progress report. False if the line is neither."""
        try:
            said = json.loads(line)
            asked = self._asked.get(said["id"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        # The caller was cancelled.
        if asked is None or asked.answer.done():
            return True
        if "ok" not in said:
            if asked.on_progress is not None and isinstance(said.get("progress"), int | float):
                asked.on_progress(said["progress"])
        elif said["ok"] is True:
            asked.answer.set_result(said)
        else:
            asked.answer.set_exception(OpFailed(str(said.get("kind", "failed")), str(said.get("message", "")).strip()))
        return True


async def connect(path: str, on_end: Callable[[], None]) -> ControlLink:
    """Connect to a worker. Raises OSError if it does not listen yet."""
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        # Connecting to a Unix socket succeeds or fails at once.
        connecting.connect(path)
        return ControlLink(connecting, on_end)
    except BaseException:
        connecting.close()
        raise


def count(answer: Answer, name: str) -> int:
    """A count in an answer; 0 if it is missing or invalid."""
    return int(_figure(answer, name))


def seconds(answer: Answer, name: str) -> float:
    """A time in an answer; 0 if it is missing or invalid."""
    return float(_figure(answer, name))


def _figure(answer: Answer, name: str) -> float:
    value = answer.get(name)
    # Python parses Infinity, NaN and integers of any length as JSON.
    return value if isinstance(value, int | float) and 0 < value < FIGURE_MAX else 0


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
