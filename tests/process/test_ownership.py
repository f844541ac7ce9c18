"""Whose a process is, and how many the kernel ended for want of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.process import proc
from greenroom.process.proc import COUNTERS, IDENTITY_VARIABLE, oom_kills

# A process that starts another one and waits with it until its input ends.
PARENT = "import subprocess, sys; c = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'input()'], env={}); "
PARENT += "print(c.pid, flush=True); input(); c.wait()"


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process with an identity, and its child, which was given none."""
    env = {IDENTITY_VARIABLE: "gate:run:s7.1"}
    command = [sys.executable, "-I", "-S", "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        yield parent.pid, int(parent.stdout.readline())
        assert parent.stdin is not None
        parent.stdin.close()


def by_identity(identity: str) -> str | None:
    return "s7" if identity.startswith("gate:run:") else None


def no_owner(_: str) -> None:
    return None


def test_a_process_is_its_identitys_and_so_is_what_it_started(family: tuple[int, int]) -> None:
    parent, child = family
    assert proc.owners_of([parent, child], {}, by_identity) == {parent: "s7", child: "s7"}


def test_a_process_below_a_known_one_is_its_owners(family: tuple[int, int]) -> None:
    parent, child = family
    assert proc.owners_of([parent, child], {parent: "trainer"}, no_owner) == {parent: "trainer", child: "trainer"}


def test_the_nearest_owner_counts(family: tuple[int, int]) -> None:
    parent, child = family
    assert proc.owner_of(child, {parent: "near", os.getpid(): "far"}, no_owner) == "near"


def test_foreign_and_ended_processes_have_no_owner(family: tuple[int, int]) -> None:
    ended = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    ended.wait()
    assert proc.owners_of([*family, ended.pid, 1], {}, no_owner) == {}


def test_a_tree_is_everything_at_or_below_its_root(family: tuple[int, int]) -> None:
    parent, child = family
    assert proc.trees({parent: "s7"}) == {"s7": {parent, child}}
    assert proc.trees({child: "a", parent: "b"}) == {"a": {child}, "b": {parent}}
    assert proc.trees({}) == {}


def test_a_process_has_a_name_while_it_lives() -> None:
    assert proc.name_of(os.getpid())
    assert proc.name_of(2**30) is None


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
