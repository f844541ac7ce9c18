"""The kernel's own count of processes it ended for want of memory."""

from __future__ import annotations

from pathlib import Path

from greenroom.process.proc import COUNTERS, oom_kills


def test_counters_of_machine_and_container_are_added(tmp_path: Path) -> None:
    machine, container = tmp_path / "vmstat", tmp_path / "memory.events"
    machine.write_text("nr_free_pages 12\noom_kill 3\nnr_dirty 1\n")
    container.write_text("low 0\nhigh 0\nmax 9\noom 7\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills((machine, container)) == 5


def test_counter_that_cannot_be_read_counts_nothing(tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    strange.write_text("oom_kill\n")
    other = tmp_path / "other"
    other.write_bytes(b"oom_kill \xff\n")
    plain = tmp_path / "plain"
    plain.write_text("oom_kill 4\n")
    assert oom_kills((tmp_path / "gone", strange, other, plain)) == 4


def test_this_machine_can_be_asked() -> None:
    assert any(path.exists() for path in COUNTERS)
    assert oom_kills() >= 0
