"""The keeper of a program under a lease: the whole tree ends with the wrapper, and only with it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from greenroom.process import proc, program_keeper
from tests.process.trees import is_alive, new_identity
from tests.waiting import PATIENCE_S, until_now

HEEDLESS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
draft = pathlib.Path(sys.argv[1] + ".draft")
draft.write_text(str(os.getpid()))
draft.rename(sys.argv[1])
time.sleep(600)
"""


@dataclass
class Kept:
    """A keeper whose wrapper is this test."""

    process: subprocess.Popen[bytes]
    control_fd: int
    status_fd: int

    def say(self, word: bytes) -> None:
        os.write(self.control_fd, word)

    def leave(self) -> None:
        """As the end of the wrapper looks to its keeper, however that ended."""
        os.close(self.control_fd)
        self.control_fd = -1

    def told(self) -> list[str]:
        """Everything it says until it has ended."""
        with open(self.status_fd, "rb", closefd=False) as status:
            return status.read().decode().split("\n")[:-1]


@contextlib.contextmanager
def kept(command: Sequence[str], *, term_s: float = 30.0) -> Iterator[Kept]:
    (control_read, control_write), (status_read, status_write) = os.pipe(), os.pipe()
    argv = [sys.executable, "-P", "-m", program_keeper.__name__, str(control_read), str(status_write), str(term_s)]
    process = subprocess.Popen([*argv, *command], pass_fds=(control_read, status_write))
    for fd in (control_read, status_write):
        os.close(fd)
    one = Kept(process, control_write, status_read)
    try:
        yield one
    finally:
        for fd in (one.control_fd, one.status_fd):
            if fd >= 0:
                os.close(fd)
        process.wait(PATIENCE_S)


def heedless(up: Path) -> str:
    return shlex.join([sys.executable, "-c", HEEDLESS, str(up)])


@pytest.mark.parametrize(("command", "told"), [("exit 7", "exited 7"), ("kill -9 $$", "signalled 9")])
def test_how_the_program_ended_is_told(command: str, told: str) -> None:
    with kept(["sh", "-c", command]) as one:
        one.say(program_keeper.SEEN)
        said = one.told()
        assert said[0].startswith("started ") and said[1:] == [told]


@pytest.mark.parametrize(("command", "number"), [("/no/such/program", 2), ("/", 13)])
def test_what_cannot_be_run_is_told_by_its_number(command: str, number: int) -> None:
    with kept([command]) as one:
        assert one.told() == [f"failed {number}"]


def test_a_program_that_has_ended_keeps_its_number_until_the_wrapper_has_seen_it() -> None:
    with kept(["true"]) as one:
        pid = int(os.read(one.status_fd, 100).split()[1])
        until_now(lambda: not is_alive(pid))
        assert proc.stat(pid) is not None, "a zombie: its pid is not used again"
        one.say(program_keeper.SEEN)
        assert one.told() == ["exited 0"]


@pytest.mark.parametrize("shell", ["{0}; true", "trap '' TERM; {0}; true", "(setsid {0} &) ; sleep 600"])
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_program_that_ignores_the_signal_is_killed_with_what_it_started(
    tmp_path: Path, shell: str, is_asked: bool
) -> None:
    """Whether the shell waits, is deaf, or has let it go."""
    up = tmp_path / "up"
    with kept(["sh", "-c", shell.format(heedless(up))], term_s=0.3) as one:
        until_now(up.exists)
        started = int(up.read_text())
        if is_asked:
            one.say(program_keeper.SEEN + program_keeper.END)
        else:
            one.leave()
        until_now(lambda: not is_alive(started))
        assert one.process.wait(PATIENCE_S) == 0


def test_a_wrapper_that_ends_before_it_has_seen_the_program_leaves_nothing(tmp_path: Path) -> None:
    up = tmp_path / "up"
    with kept(["sh", "-c", f"{heedless(up)} & exit 3"], term_s=0.3) as one:
        until_now(up.exists)
        one.leave()
        until_now(lambda: not is_alive(int(up.read_text())))


def test_a_program_that_ends_by_itself_may_leave_others_running(tmp_path: Path) -> None:
    up = tmp_path / "up"
    with kept(["sh", "-c", f"{heedless(up)} & while [ ! -e {up} ]; do sleep 0.01; done"]) as one:
        one.say(program_keeper.SEEN)
        assert one.told()[-1] == "exited 0"
        started = int(up.read_text())
        assert is_alive(started)
        os.kill(started, 9)


# --- the keeper of an engine, when its gateway is killed --------------------------------------------------------------


GATEWAY = Path(__file__).with_name("gateway_program.py")


@contextmanager
def gateway(processes: int, *mode: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, object]]]:
    argv = [sys.executable, str(GATEWAY), new_identity(), str(processes), *mode]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def all_pids(pids: dict[str, object]) -> list[int]:
    tree = pids["tree"]
    assert isinstance(tree, list)
    return [*tree, int(str(pids["keeper"]))]


@pytest.mark.parametrize(("mode", "processes"), [("plain", 1), ("deaf", 1), ("fork-setsid", 2), ("daemon", 2)])
def test_killed_gateway_leaves_nothing(mode: str, processes: int) -> None:
    with gateway(processes, mode) as (process, pids):
        assert all(map(is_alive, all_pids(pids)))
        process.kill()
        until_now(lambda: not any(map(is_alive, all_pids(pids))))


def test_killed_gateway_leaves_no_stopped_engine() -> None:
    with gateway(2, "fork-setsid") as (process, pids):
        *tree, _ = all_pids(pids)
        for pid in tree:
            os.kill(pid, signal.SIGSTOP)
        process.kill()
        until_now(lambda: not any(map(is_alive, all_pids(pids))))


def test_killed_gateway_leaves_no_engine_that_floods_its_log() -> None:
    with gateway(1, "flood-for-ever") as (process, pids):
        process.kill()
        until_now(lambda: not any(map(is_alive, all_pids(pids))))


def test_terminal_signal_to_the_gateways_group_does_not_reach_the_engine() -> None:
    with gateway(1, "plain") as (process, pids):
        keeper = int(str(pids["keeper"]))
        assert os.getsid(keeper) == keeper != os.getsid(process.pid)
        assert os.getpgid(all_pids(pids)[0]) != os.getpgid(process.pid)


def test_keeper_starts_without_anything_but_the_standard_library() -> None:
    keeper = Path(sys.modules["greenroom.process.spawn"].__file__ or "").with_name("keeper.py")
    check = f"import runpy, sys; runpy.run_path({str(keeper)!r}); print([n for n in sys.modules if 'greenroom' in n])"
    said = subprocess.run([sys.executable, "-I", "-S", "-c", check], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"
