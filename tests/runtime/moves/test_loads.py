"""Loads: whether they may begin, whether they ran out of memory, and what is kept of those that failed."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from greenroom.config.schema import Config, Model
from greenroom.core.model import Claim, DeviceId, ModelId, Move, MoveId, MoveKind, SlotId
from greenroom.errors import LoadFailed, LoadOutOfMemory, OutsideRoots, UnusableModel
from greenroom.process.spawn import Child, Exit
from greenroom.process.state_dir import StateDir
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.memory.devices import HOST
from greenroom.runtime.memory.slot_memory import HostedMemory, SlotMemory
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.moves.admission import Cleanup, NoGrant, check_roots
from greenroom.runtime.moves.load_errors import HostedErrors, LoadErrors, evidence_of_no_memory
from greenroom.runtime.shell import Shell
from greenroom.runtime.workers.control_link import OpFailed
from greenroom.runtime.workers.worker import Worker

M = ModelId("qwen")
HERE, GOING = SlotId("s1"), SlotId("s2")


def entry(revision: int = 1) -> Entry:
    return cast(Entry, SimpleNamespace(id=M, spec=SimpleNamespace(revision=revision)))


def failures(state_dir: StateDir) -> LoadErrors:
    catalog = SimpleNamespace(revision=lambda model, revision: entry() if (model, revision) == (M, 1) else None)
    view = SimpleNamespace(slots={GOING: SimpleNamespace(is_going=True)})
    shell = SimpleNamespace(state_dir=state_dir, catalog=catalog, loop=SimpleNamespace(view=view))
    return LoadErrors(cast(Shell, shell), cast(MemoryWatch, None))


def test_a_process_that_ended_is_told_with_its_exit_and_last_lines_but_no_folder_of_ours(tmp_path: Path) -> None:
    state_dir = StateDir.open(tmp_path / "state")
    try:
        kept = failures(state_dir)
        kept.ended(entry(), HERE, "worker", Exit(None, 9), ["illegal access", f"closing {state_dir.run_dir}/s1.sock"])
        assert isinstance(kept[M], LoadFailed)
        assert kept[M].message == "qwen was lost: its worker ended (killed by SIGKILL)."
        assert kept[M].details == "illegal access\nclosing s1.sock"
        kept.ended(entry(), HERE, "engine", Exit(3, None), [])
        assert kept[M].message == "qwen was lost: its engine ended (exit code 3)." and kept[M].details is None
    finally:
        state_dir.close()


def test_the_end_of_a_model_that_was_changed_removed_or_told_to_leave_says_nothing_of_the_present_one(
    tmp_path: Path,
) -> None:
    state_dir = StateDir.open(tmp_path / "state")
    try:
        kept = failures(state_dir)
        kept.ended(entry(revision=2), HERE, "engine", Exit(3, None), [])
        kept.ended(entry(), GOING, "engine", Exit(3, None), [])
        assert not kept
    finally:
        state_dir.close()


COMPLAINT = "CUDA error: out of memory"
KILLED = Exit(None, signal.SIGKILL)


def child(exit: Exit | None = None) -> Child:
    return cast(Child, SimpleNamespace(exit=exit or Exit(1, None)))


def test_what_this_load_printed_counts() -> None:
    assert evidence_of_no_memory(child(), ["loading", COMPLAINT, "bye"], 0) == COMPLAINT
    assert evidence_of_no_memory(child(), ["no such file"], 0) is None


@pytest.mark.parametrize("exit", [KILLED, Exit(137, None)])
def test_a_process_killed_while_the_kernel_killed_for_memory_ran_out_of_it(exit: Exit) -> None:
    found = evidence_of_no_memory(child(exit), [], 1)
    assert "host's memory" in (found or "")


@pytest.mark.parametrize("exit", [Exit(1, None), Exit(None, signal.SIGTERM)])
def test_a_process_that_ended_otherwise_meanwhile_did_not_run_out_of_memory(exit: Exit) -> None:
    assert evidence_of_no_memory(child(exit), [], 1) is None


def test_a_process_that_was_not_killed_by_the_kernel_did_not_run_out_of_memory() -> None:
    assert evidence_of_no_memory(child(KILLED), [], 0) is None


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


def configured(**keys: str) -> Entry:
    catalog = Catalog()
    catalog.fill(Config(models={"m": Model(**keys)}))  # type: ignore[arg-type]
    (only,) = catalog
    return only


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    (tmp_path / "roots").mkdir()
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "roots"


def folder(base: Path) -> Path:
    path = base / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_without_roots_files_lie_anywhere(tmp_path: Path) -> None:
    check_roots(configured(path=str(folder(tmp_path))), ())


def test_files_below_a_root_are_served_also_through_links_that_stay_below(roots: Path) -> None:
    model = folder(roots)
    (roots / "blob").write_text("weights")
    (model / "model.safetensors").symlink_to("../blob")
    check_roots(configured(path=str(model)), (str(roots),))
    check_roots(configured(cmd="serve ${PORT}"), (str(roots),))


@pytest.mark.parametrize("name", ["m.gguf", "model"])
def test_a_path_that_only_begins_like_a_root_lies_outside(roots: Path, name: str) -> None:
    with pytest.raises(OutsideRoots, match="lies outside of the roots"):
        check_roots(configured(path=f"{roots}2/{name}"), (str(roots),))
    with pytest.raises(OutsideRoots):
        check_roots(configured(path=f"{roots}/../{name}"), (str(roots),))


def test_a_link_that_leads_out_is_refused_for_the_folder_and_for_each_file(roots: Path) -> None:
    (roots / "link").symlink_to(folder(roots.parent / "elsewhere"))
    with pytest.raises(OutsideRoots, match=r"m: .*link"):
        check_roots(configured(path=str(roots / "link")), (str(roots),))
    model = folder(roots)
    (model / "model.safetensors").symlink_to(roots.parent / "elsewhere" / "model" / "config.json")
    with pytest.raises(OutsideRoots, match=r"model\.safetensors"):
        check_roots(configured(path=str(model)), (str(roots),))


def test_a_root_that_is_a_link_itself_is_what_it_leads_to(roots: Path) -> None:
    (roots.parent / "alias").symlink_to(roots)
    check_roots(configured(path=str(folder(roots))), (str(roots.parent / "alias"),))


def test_modules_of_an_embedding_model_lie_below_a_root_too(roots: Path) -> None:
    model = folder(roots)
    outside = roots.parent / "elsewhere" / "2_Dense"
    outside.mkdir()
    (outside / "model.safetensors").write_text("weights")
    (model / "2_Dense").symlink_to(outside)
    catalog = Catalog()
    catalog.fill(Config(models={"m": Model(path=str(model), embedding=True)}))
    (only,) = catalog
    with pytest.raises(OutsideRoots, match="2_Dense"):
        check_roots(only, (str(roots),))


A, B = DeviceId("GPU-a"), DeviceId("GPU-b")


@pytest.mark.parametrize(
    ("left_on", "wanted", "waits"),
    [
        ((A,), (A,), True),
        ((A, B), (B,), True),
        ((A,), (B,), False),
        ((A, HOST), (B, HOST), False),
        ((A,), (HOST,), True),
        ((HOST,), (A,), True),
        ((), (A,), True),
        ((A,), (), True),
    ],
)
async def test_a_load_waits_for_remains_on_its_gpus(
    left_on: tuple[DeviceId, ...], wanted: tuple[DeviceId, ...], waits: bool
) -> None:
    cleanup, is_over = Cleanup(), asyncio.Event()

    async def clear_up() -> None:
        await is_over.wait()

    cleanup.start(clear_up(), left_on, "remains")
    waiting = asyncio.ensure_future(cleanup.finished(wanted))
    for _ in range(5):
        await asyncio.sleep(0)
    assert waiting.done() is not waits
    is_over.set()
    await asyncio.wait_for(waiting, 30)
    await asyncio.wait_for(cleanup.finished(), 30)
