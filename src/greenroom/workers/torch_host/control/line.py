"""The control line from the gateway to this worker: one JSON object a line, answers in any order, files as SCM_RIGHTS.

Owns the connection, the framing and the dispatch to the `SlotTable`. Operations of one slot run in that slot's own
thread, in the order of their arrival. Independent of what operations do, and never imports torch. Read
`ControlLine.serve` first.
"""

from __future__ import annotations

import array
import contextlib
import json
import logging
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from ..failures import Failure, UnknownSlot, WorkCancelled, is_fatal, translated
from .slot_options import Opening

if TYPE_CHECKING:
    from .slots import SlotTable

LINE_MAX_BYTES: Final = 2**20
READ_BYTES: Final = 2**16
# Files in one read, and files that wait for the line they belong to.
FILES_MAX: Final = 16
# A gateway that does not read for this long is given up.
SEND_TIMEOUT_S: Final = 30.0

log = logging.getLogger(__name__)

Fields = Mapping[str, Any]


class ControlLine:
    def __init__(self, connection: socket.socket, slots: SlotTable) -> None:
        self._connection, self._slots = connection, slots
        self._threads: dict[str, SlotThread] = {}
        self._files: deque[int] = deque()
        self._sending = threading.Lock()
        # Held from finding a thread to handing work over: a thread that has ended would never answer.
        self._threads_lock = threading.RLock()

    def serve(self) -> None:
        """Read and answer until the gateway hangs up or breaks the protocol."""
        rest = b""
        while True:
            try:
                data, files = _receive(self._connection)
            except OSError as reason:
                log.warning("control line broken: %s", reason)
                return
            self._files.extend(files)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > LINE_MAX_BYTES or len(self._files) > FILES_MAX:
                log.error("control line broken: a message without an end, or files without a message")
                return
            for line in lines:
                self._handle(line)

    def _handle(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            number, operation = message["id"], message["op"]
        except (ValueError, KeyError, TypeError):
            self.send({"id": None, "ok": False, "kind": "failed", "message": "That is not a request."})
            return
        # A file belongs to the next `open`, even if that fails.
        descriptor = self._files.popleft() if operation == "open" and self._files else None
        try:
            self._dispatch(number, operation, message, descriptor)
        except Exception as error:
            if descriptor is not None:
                os.close(descriptor)
            self._refuse(number, error)

    def _dispatch(self, number: Any, operation: str, message: Fields, descriptor: int | None) -> None:
        slots = self._slots
        if operation == "hello":
            return self.send({"id": number, "ok": True, **slots.hello()})
        if operation == "look":
            return self.send({"id": number, "ok": True, **slots.look()})
        slot = message.get("slot")
        if not isinstance(slot, str):
            raise Failure(f"{operation} needs a slot.")
        with self._threads_lock:
            if operation == "open":
                return self._open(number, slot, message, descriptor)
            thread = self._threads.get(slot)
            if thread is None:
                raise UnknownSlot(f"there is no slot {slot} here.")
            return self._move(thread, number, operation, slot, message)

    def _move(self, thread: SlotThread, number: Any, operation: str, slot: str, message: Fields) -> None:
        slots = self._slots
        if operation == "wake":
            return self._later(thread, number, lambda: slots.wake(slot))
        if operation == "sleep":
            return self._later(thread, number, lambda: slots.sleep(slot))
        if operation == "flush":
            tenant, tag = message.get("tenant"), message.get("tag")
            return self._later(thread, number, lambda: slots.flush(slot, tenant, tag))
        if operation == "close":
            thread.cancelled.set()
            return self._later(thread, number, lambda: self._close(slot))
        raise Failure(f"{operation!r} is not known here.")

    def _open(self, number: Any, slot: str, message: Fields, descriptor: int | None) -> None:
        if descriptor is None:
            raise Failure("open comes with a file to keep the weights in; there was none.")
        if slot in self._threads:
            raise Failure(f"slot {slot} is open already.")
        thread = self._threads[slot] = SlotThread(slot)

        opening = _ReportedOpening(self, number, thread.cancelled)

        def work() -> Fields:
            try:
                return self._slots.open(message, descriptor, opening)
            except BaseException:
                with self._threads_lock:
                    # If a close has arrived meanwhile, it comes next in this thread and ends it.
                    if not thread.cancelled.is_set():
                        self._forget(slot)
                raise

        self._later(thread, number, work)

    def _close(self, slot: str) -> Fields:
        try:
            return self._slots.close(slot)
        finally:
            self._forget(slot)

    def _forget(self, slot: str) -> None:
        with self._threads_lock:
            thread = self._threads.pop(slot, None)
            if thread is not None:
                thread.end()

    def _later(self, thread: SlotThread, number: Any, work: Callable[[], Fields]) -> None:
        def answer() -> None:
            try:
                self.send({"id": number, "ok": True, **work()})
            except BaseException as error:
                self._refuse(number, error)

        try:
            thread.put(answer)
        except queue.Full:
            raise Failure("too much is asked of this slot at once.") from None

    def _refuse(self, number: Any, error: BaseException) -> None:
        failure = translated(error)
        if not isinstance(failure, WorkCancelled):
            log.warning("asked in vain: %s", failure, exc_info=None if isinstance(error, Failure) else error)
        answer = {"id": number, "ok": False, "kind": failure.kind, "message": str(failure)}
        if is_fatal(error):
            # Only the operation that lost the device is answered. The gateway repeats the others in another worker.
            self._slots.lost(error, lambda: self.send(answer))
        else:
            self.send(answer)

    def send(self, message: Fields) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        # A gateway that has hung up needs no answer; `serve` notices by itself.
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(line)


class _ReportedOpening(Opening):
    """Reports to the gateway, under the number of its request."""

    def __init__(self, line: ControlLine, number: Any, cancelled: threading.Event) -> None:
        super().__init__(cancelled)
        self._line, self._number = line, number

    def report(self, share: float) -> None:
        self._line.send({"id": self._number, "progress": round(share, 4)})


def listen(path: str) -> socket.socket:
    """A listening socket for one gateway; only this user may connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    listener.listen(1)
    return listener


def bound(connection: socket.socket) -> None:
    """Bound sending, so that a gateway that does not read is given up. Receiving has no bound."""
    seconds = array.array("l", [int(SEND_TIMEOUT_S), 0]).tobytes()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    data, files, flags, _ = socket.recv_fds(connection, READ_BYTES, FILES_MAX)
    for descriptor in files:
        os.set_inheritable(descriptor, False)
    if flags & socket.MSG_CTRUNC:
        log.error("files that came with a message were lost: too many are open")
    return data, files


# A gateway asks for one move at a time, so this many at once are a bug.
WAITING_MAX: Final = 64


class SlotThread:
    """The thread of one slot: runs work in order. `cancelled` tells running work that its result is not wanted."""

    def __init__(self, name: str) -> None:
        self.cancelled = threading.Event()
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"slot-{name}", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Run this after all earlier work. Raises queue.Full."""
        if self._waiting.qsize() >= WAITING_MAX:
            raise queue.Full
        self._waiting.put(work)

    def end(self) -> None:
        """Stop after the current work. To be called once, by the last piece of work or by the owner."""
        self.cancelled.set()
        self._waiting.put(None)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()
