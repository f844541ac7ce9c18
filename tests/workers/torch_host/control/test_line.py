"""The control line: order within a slot, none between slots, files by the side, typed errors, the end of the line."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from greenroom.workers.torch_host.control.line import LINE_MAX_BYTES, ControlLine, bound, listen
from greenroom.workers.torch_host.control.slot_options import Opening
from greenroom.workers.torch_host.failures import BadModel, OutOfMemory, WorkCancelled

DEADLINE_S = 60.0


class FakeDesk:
    """Does nothing, but says so, and waits or fails where it is told to."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.files: list[int] = []
        self.errors: dict[str, BaseException] = {}
        self.waits: dict[str, threading.Event] = {}
        self.begun: dict[str, threading.Event] = {}
        self.lost_to: BaseException | None = None

    def hello(self) -> Mapping[str, Any]:
        return {"pid": 1}

    def look(self) -> Mapping[str, Any]:
        return {"slots": {}}

    def open(self, message: Mapping[str, Any], descriptor: int, opening: Opening) -> Mapping[str, Any]:
        self.files.append(os.fstat(descriptor).st_ino)
        os.close(descriptor)
        opening.report(0.5)
        if message.get("until_cancelled"):
            assert opening.cancelled.wait(DEADLINE_S)
            raise WorkCancelled("it is not waited for")
        return self._do(f"open {message['slot']}")

    def wake(self, slot: str) -> Mapping[str, Any]:
        return self._do(f"wake {slot}")

    def sleep(self, slot: str) -> Mapping[str, Any]:
        return self._do(f"sleep {slot}")

    def flush(self, slot: str, tenant: str | None, tag: str | None) -> Mapping[str, Any]:
        return self._do(f"flush {slot} {tenant} {tag}")

    def close(self, slot: str) -> Mapping[str, Any]:
        return self._do(f"close {slot}")

    def lost(self, error: BaseException, say: Callable[[], None]) -> None:
        is_first = self.lost_to is None
        # Before the answer: its reader may ask the next thing at once.
        self.lost_to = error
        if is_first:
            say()

    def _do(self, what: str) -> Mapping[str, Any]:
        self.begun.setdefault(what, threading.Event()).set()
        if what in self.waits:
            assert self.waits[what].wait(DEADLINE_S)
        if what in self.errors:
            raise self.errors[what]
        self.done.append(what)
        return {"did": what}


class Line:
    """The gateway's end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(DEADLINE_S)
        self._reader = connection.makefile("rb")
        self._number = 0

    def ask(self, op: str, files: list[int] | None = None, **fields: Any) -> int:
        self._number += 1
        line = json.dumps({"id": self._number, "op": op, **fields}).encode() + b"\n"
        if files:
            socket.send_fds(self.connection, [line], files)
        else:
            self.connection.sendall(line)
        return self._number

    def hear(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._reader.readline())
        return found

    def answer(self, number: int) -> dict[str, Any]:
        while True:
            heard = self.hear()
            if heard["id"] == number and "ok" in heard:
                return heard

    def open(self, slot: str, **fields: Any) -> int:
        file = os.memfd_create(slot)
        try:
            return self.ask("open", [file], slot=slot, **fields)
        finally:
            os.close(file)


@pytest.fixture
def desk() -> FakeDesk:
    return FakeDesk()


@pytest.fixture
def line(desk: FakeDesk) -> Iterator[Line]:
    ours, theirs = socket.socketpair()
    control = ControlLine(theirs, desk)
    serving = threading.Thread(target=control.serve, name="serving")
    serving.start()
    yield Line(ours)
    ours.shutdown(socket.SHUT_RDWR)
    ours.close()
    serving.join(DEADLINE_S)
    assert not serving.is_alive()
    theirs.close()


def test_the_first_question_is_answered(line: Line) -> None:
    assert line.answer(line.ask("hello")) == {"id": 1, "ok": True, "pid": 1}
    assert line.answer(line.ask("look")) == {"id": 2, "ok": True, "slots": {}}


def test_a_slot_is_opened_with_the_file_that_came_along(line: Line, desk: FakeDesk) -> None:
    files = [os.memfd_create(str(number)) for number in range(2)]
    for number, file in enumerate(files):
        line.ask("open", [file], slot=f"s{number}")
        assert line.hear()["progress"] == 0.5
        assert line.hear()["ok"]
    assert desk.files == [os.fstat(file).st_ino for file in files]
    for file in files:
        os.close(file)


def test_an_open_without_a_file_is_refused(line: Line) -> None:
    heard = line.answer(line.ask("open", slot="a"))
    assert (heard["ok"], heard["kind"]) == (False, "failed")
    assert "comes with a file" in heard["message"]


def test_operations_of_one_slot_run_in_order_and_others_beside_them(line: Line, desk: FakeDesk) -> None:
    line.answer(line.open("a"))
    line.answer(line.open("b"))
    desk.waits["wake a"] = threading.Event()
    first, second = line.ask("wake", slot="a"), line.ask("sleep", slot="a")
    # The other slot answers while this one is still at its first.
    assert line.answer(line.ask("wake", slot="b"))["did"] == "wake b"
    assert "sleep a" not in desk.done
    desk.waits["wake a"].set()
    assert line.answer(first)["did"] == "wake a"
    assert line.answer(second)["did"] == "sleep a"


def test_a_flush_says_whose(line: Line) -> None:
    line.answer(line.open("a"))
    assert line.answer(line.ask("flush", slot="a", tenant="t", tag=None))["did"] == "flush a t None"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadModel("broken"), "bad_model"),
        (OutOfMemory("full"), "out_of_memory"),
        (MemoryError("Cannot allocate memory"), "out_of_memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "out_of_memory"),
        (KeyError("anything"), "failed"),
    ],
)
def test_an_error_is_answered_by_its_kind_and_not_for_good(
    line: Line, desk: FakeDesk, error: Exception, kind: str
) -> None:
    desk.errors["open a"] = error
    heard = line.answer(line.open("a"))
    assert (heard["ok"], heard["kind"]) == (False, kind)
    assert desk.lost_to is None
    del desk.errors["open a"]
    assert line.answer(line.open("a"))["ok"]


def test_the_order_that_loses_the_device_is_answered_before_the_worker_ends(line: Line, desk: FakeDesk) -> None:
    line.answer(line.open("a"))
    desk.errors["wake a"] = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert line.answer(line.ask("wake", slot="a"))["kind"] == "failed"
    line.answer(line.ask("hello"))
    assert desk.lost_to is desk.errors["wake a"]


def test_an_order_that_finds_the_device_lost_is_not_answered(line: Line, desk: FakeDesk) -> None:
    """Its order is given again to another worker, when this one has ended."""
    for slot in ("a", "b"):
        line.answer(line.open(slot))
        desk.errors[f"wake {slot}"] = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert line.answer(line.ask("wake", slot="a"))["kind"] == "failed"
    line.ask("wake", slot="b")
    # Orders to one slot are obeyed one after the other.
    closed = line.ask("close", slot="b")
    assert line.hear()["id"] == closed
    assert desk.lost_to is desk.errors["wake b"]


def test_a_close_stops_an_open_that_is_under_way(line: Line, desk: FakeDesk) -> None:
    opening = line.open("a", until_cancelled=True)
    assert line.hear()["progress"] == 0.5
    closing = line.ask("close", slot="a")
    assert line.answer(opening)["message"] == "it is not waited for"
    assert line.answer(closing)["ok"]
    assert line.answer(line.ask("wake", slot="a"))["kind"] == "unknown_slot"
    assert line.answer(line.open("a"))["ok"]


def test_a_slot_that_was_not_opened_is_unknown(line: Line) -> None:
    for op in ("wake", "sleep", "flush", "close"):
        assert line.answer(line.ask(op, slot="nowhere"))["kind"] == "unknown_slot"


def test_a_slot_is_not_opened_twice_and_the_second_file_is_closed(line: Line) -> None:
    line.answer(line.open("a"))
    before = len(os.listdir("/proc/self/fd"))
    heard = line.answer(line.open("a"))
    assert (heard["ok"], heard["message"]) == (False, "slot a is open already.")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("text", [b"{", b"[]", b"1", b"{}", b'{"id": 1}', b"\xff\xfe"])
def test_what_is_no_request_is_answered_as_such(line: Line, text: bytes) -> None:
    line.connection.sendall(text + b"\n")
    assert line.hear() == {"id": None, "ok": False, "kind": "failed", "message": "That is not a request."}
    assert line.answer(line.ask("hello"))["ok"]


@pytest.mark.parametrize("fields", [{}, {"slot": 5}, {"slot": None}])
def test_a_move_without_a_slot_is_refused(line: Line, fields: dict[str, Any]) -> None:
    assert line.answer(line.ask("wake", **fields))["message"] == "wake needs a slot."


def test_an_unknown_operation_is_refused(line: Line) -> None:
    line.answer(line.open("a"))
    assert "'dance' is not known" in line.answer(line.ask("dance", slot="a"))["message"]


def test_too_many_at_once_are_refused_rather_than_kept(line: Line, desk: FakeDesk) -> None:
    line.answer(line.open("a"))
    desk.waits["wake a"] = threading.Event()
    line.ask("wake", slot="a")
    assert desk.begun.setdefault("wake a", threading.Event()).wait(DEADLINE_S)
    numbers = [line.ask("sleep", slot="a") for _ in range(70)]
    refused = line.hear()
    assert refused["message"] == "too much is asked of this slot at once."
    assert refused["id"] in numbers
    desk.waits["wake a"].set()


def test_a_message_without_an_end_ends_the_line(desk: FakeDesk) -> None:
    ours, theirs = socket.socketpair()
    serving = threading.Thread(target=ControlLine(theirs, desk).serve)
    serving.start()
    try:
        ours.settimeout(DEADLINE_S)
        ours.sendall(b"x" * (LINE_MAX_BYTES + 100_000))
    except OSError:
        pass
    serving.join(DEADLINE_S)
    assert not serving.is_alive()
    ours.close()
    theirs.close()


def test_only_this_user_may_reach_the_line(tmp_path: Path) -> None:
    path = tmp_path / "control"
    path.write_text("left behind")
    listener = listen(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(str(path))
    connection, _ = listener.accept()
    bound(connection)
    for one in (caller, connection, listener):
        one.close()
