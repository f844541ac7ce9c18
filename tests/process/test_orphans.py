"""Whose a process is, which were left behind, and how many the kernel ended for want of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from greenroom.process import orphans, proc
from greenroom.process.orphans import OwnedProcess
from greenroom.process.proc import COUNTERS, IDENTITY_VARIABLE, oom_kills
from tests.waiting import until_now

from .trees import engine_argv, is_alive, new_identity, open_fds


@contextmanager
def process(identity: str | None, mode: str = "plain", processes: int = 1) -> Iterator[list[int]]:
    """An engine that no keeper watches over. Gives all its pids, its own first."""
    env = {} if identity is None else {"GREENROOM_IDENTITY": identity}
    with subprocess.Popen(engine_argv(mode), env=env, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        pids = {int(started.stdout.readline().split()[1]) for _ in range(processes)}
        try:
            yield sorted(pids, key=lambda pid: pid != started.pid)
        finally:
            for pid in pids:
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)


def pids_found(prefix: str) -> set[int]:
    return {found.pid for found in orphans.find(prefix)}


async def test_orphans_are_ended_and_strangers_with_the_same_name_stay() -> None:
    ours, other = new_identity(), new_identity()
    with process(ours, "fork-setsid", 2) as orphaned, process(other) as (stranger,), process(None) as (nameless,):
        assert pids_found(ours) == set(orphaned)
        assert await orphans.sweep(ours, spare=frozenset()) == 2
        assert not any(map(is_alive, orphaned))
        assert is_alive(stranger)
        assert is_alive(nameless)


async def test_spared_processes_stay() -> None:
    identity = new_identity()
    with process(identity) as (spared,), process(identity) as (ended,):
        assert await orphans.sweep(identity, spare=frozenset({spared})) == 1
        assert is_alive(spared)
        assert not is_alive(ended)


def test_prefix_matches_whole_words_only() -> None:
    first = new_identity().partition(":")[0]
    with process(f"{first}:run:1") as (one,), process(f"{first}:run:10") as (ten,):
        assert pids_found(f"{first}:") == pids_found(first) == {one, ten}
        assert pids_found(f"{first}:run:1") == {one}
        assert pids_found(first[:-1]) == set()


@pytest.mark.parametrize("prefix", ["", ":"])
def test_empty_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="strangers"):
        orphans.find(prefix)


async def test_process_that_ignores_term_is_killed() -> None:
    identity = new_identity()
    with process(identity, "deaf") as (pid,):
        assert await orphans.end(orphans.find(identity), term_s=0.1) == 1
        until_now(lambda: not is_alive(pid))


async def test_later_owner_of_a_pid_is_not_touched() -> None:
    identity = new_identity()
    fds = open_fds()
    with process(identity) as (pid,):
        (found,) = orphans.find(identity)
        earlier = OwnedProcess(pid, found.start_ticks - 1, identity)
        assert await orphans.end([earlier], term_s=0.1) == 0
        assert is_alive(pid)
    assert await orphans.end([found], term_s=0.1) == 0
    assert open_fds() <= fds


def test_this_process_and_those_above_it_are_never_found() -> None:
    identity = new_identity()
    program = (
        "import os, subprocess, sys\n"
        "from greenroom.process import orphans\n"
        "if len(sys.argv) > 2: sys.exit(bool(orphans.find(sys.argv[1])))\n"
        "sys.exit(subprocess.run([*sys.orig_argv, 'again']).returncode)\n"
    )
    env = {**os.environ, "GREENROOM_IDENTITY": identity}
    assert subprocess.run([sys.executable, "-c", program, identity], env=env).returncode == 0


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
