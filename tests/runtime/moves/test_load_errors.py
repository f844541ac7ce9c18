"""What is kept of a model that failed: the cause in our words, the engine's for operators."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from greenroom.core.model import ModelId, SlotId
from greenroom.errors import LoadFailed
from greenroom.process.spawn import Exit
from greenroom.process.state_dir import StateDir
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.moves.load_errors import LoadErrors
from greenroom.runtime.scheduler_loop import SchedulerLoop

M = ModelId("qwen")
HERE, GOING = SlotId("s1"), SlotId("s2")


def entry(revision: int = 1) -> Entry:
    return cast(Entry, SimpleNamespace(id=M, spec=SimpleNamespace(revision=revision)))


def failures(state_dir: StateDir) -> LoadErrors:
    catalog = SimpleNamespace(revision=lambda model, revision: entry() if (model, revision) == (M, 1) else None)
    view = SimpleNamespace(slots={GOING: SimpleNamespace(is_going=True)})
    return LoadErrors(state_dir, cast(Catalog, catalog), cast(SchedulerLoop, SimpleNamespace(view=view)))


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
