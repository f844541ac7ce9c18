"""orphans.py"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from greenroom.process import orphans
from greenroom.process.orphans import OwnedProcess
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
