"""What goes wrong in workers, told as errors of ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from greenroom.core.model import Claim, DeviceId, ModelId, Move, MoveId, MoveKind, SlotId
from greenroom.errors import LoadFailed, LoadOutOfMemory, UnusableModel
from greenroom.process.spawn import Exit
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.slot_memory import HostedMemory, SlotMemory
from greenroom.runtime.moves.admission import NoGrant
from greenroom.runtime.moves.load_errors import HostedErrors
from greenroom.runtime.workers.control_link import OpFailed
from greenroom.runtime.workers.worker import Worker

GPU = DeviceId("GPU-a")
MOVE = Move(MoveId("m1"), MoveKind.WAKE, SlotId("s1"), ModelId("qwen"), 1, {GPU: 100}, 0.0)
ENTRY = cast(Entry, SimpleNamespace(id="qwen"))


class FakeMemory:
    def __init__(self, missing: Claim) -> None:
        self._missing = missing

    async def missing(self, claim: Claim) -> Claim:
        return self._missing


def shortage(move: Move, entry: Entry, complaint: str, details: str) -> LoadOutOfMemory:
    return LoadOutOfMemory(f"{entry.id}: {complaint}", details=details)


def hosted_errors(missing: Claim | None = None) -> HostedErrors:
    return HostedErrors(
        cast(HostedMemory, FakeMemory(missing or {})), cast(SlotMemory, SimpleNamespace(shortage=shortage))
    )


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("bad_model", UnusableModel),
        ("out_of_memory", LoadOutOfMemory),
        ("failed", LoadFailed),
        ("unknown_slot", LoadFailed),
        ("something new", LoadFailed),
    ],
)
def test_a_failed_open_is_told_by_its_kind_and_with_its_words(kind: str, error: type[LoadFailed]) -> None:
    told = hosted_errors().load_error(MOVE, ENTRY, OpFailed(kind, "no config.json in /m."))
    assert type(told) is error and "no config.json in /m" in told.message and "qwen" in told.message


async def test_a_wake_for_which_a_stranger_has_left_no_memory_has_not_failed() -> None:
    error = OpFailed("out_of_memory", "the GPU is full.")
    assert isinstance(await hosted_errors({GPU: 40}).wake_error(MOVE, ENTRY, error), NoGrant)
    assert isinstance(await hosted_errors().wake_error(MOVE, ENTRY, error), LoadOutOfMemory)
    assert isinstance(await hosted_errors({GPU: 40}).wake_error(MOVE, ENTRY, OpFailed("failed", "no.")), LoadFailed)


@pytest.mark.parametrize(("complaint", "error"), [(None, LoadFailed), ("std::bad_alloc", LoadOutOfMemory)])
def test_a_worker_that_ended_is_told_with_its_exit_and_last_lines(
    complaint: str | None, error: type[LoadFailed]
) -> None:
    lines = {MOVE.slot: ["first", complaint or "last"]}
    worker: Any = SimpleNamespace(lines_of=lambda slot, _: lines[slot], child=SimpleNamespace(exit=Exit(70, None)))
    told = hosted_errors().worker_ended(MOVE, ENTRY, cast(Worker, worker), kills_before=0)
    assert type(told) is error and told.details == "\n".join(lines[MOVE.slot])
    assert complaint is not None or "exit code 70" in told.message
