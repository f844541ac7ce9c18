"""Programs that are kept running: started again when they end, and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.process.supervisor import NotStarted, Program, Supervisor
from tests.waiting import PATIENCE_S, until

# Writes its pid into a file of its own, and ends well when it is asked to.
STAYS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("bye"), sys.exit(0)))
signal.signal(signal.SIGHUP, lambda *_: print("again", flush=True))
with open(os.path.join(sys.argv[1], str(os.getpid())), "w"): pass
print("here", flush=True)
while True: time.sleep(60)
"""


def stays(folder: Path) -> Program:
    folder.mkdir()
    return Program(folder.name, (sys.executable, "-c", STAYS, str(folder)), {**os.environ})


def pids(folder: Path) -> list[int]:
    return sorted(int(name) for name in os.listdir(folder))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(supervisor.run())
    try:
        yield task
    finally:
        supervisor.end()
        supervisor.end()
        await asyncio.gather(task, return_exceptions=True)


async def test_one_that_dies_is_started_again_and_the_other_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    told: list[str] = []
    async with running(Supervisor([stays(one), stays(two)], PATIENCE_S, told.append)):
        await until(lambda: pids(one) and pids(two), "both run")
        (first,), (other,) = pids(one), pids(two)
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(pids(one)) == 2, "it runs again")
        assert told == ["one ended (killed by SIGKILL); it is started again in 0.5 s"]
        assert pids(two) == [other] and not is_gone(other)
    assert all(is_gone(pid) for pid in (*pids(one), other))
    assert "one | here\n" in capsys.readouterr().err


async def test_one_that_cannot_be_started_for_a_while_is_started_later(tmp_path: Path) -> None:
    one, two = stays(tmp_path / "one"), stays(tmp_path / "two")
    shell, away = tmp_path / "shell", tmp_path / "away"
    shell.symlink_to(sys.executable)
    one = replace(one, argv=(str(shell), *one.argv[1:]))
    said: list[str] = []
    async with running(Supervisor((one, two), stop_s=10, tell=said.append)) as task:
        await until(lambda: pids(tmp_path / "one") and pids(tmp_path / "two"))
        (first,), left_alone = pids(tmp_path / "one"), pids(tmp_path / "two")
        shell.rename(away)
        os.kill(first, signal.SIGKILL)
        await until(lambda: task.done() or any("could not be started" in line for line in said))
        away.rename(shell)
        await until(lambda: task.done() or len(pids(tmp_path / "one")) > 1)
        assert not task.done() and pids(tmp_path / "two") == left_alone


async def test_all_are_asked_to_end_and_none_is_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    supervisor = Supervisor([stays(one), stays(two)], PATIENCE_S, print)
    async with running(supervisor) as task:
        await until(lambda: pids(one) and pids(two), "both run")
        said = ""

        def both_said_again() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return said.count("again") == 2

        supervisor.signal(signal.SIGHUP)
        await until(both_said_again, "both have the signal")
        supervisor.end()
        await task
    assert all(is_gone(pid) for pid in (*pids(one), *pids(two)))
    assert capsys.readouterr().err.count("bye") == 2


async def test_a_first_start_that_is_refused_ends_all(tmp_path: Path) -> None:
    one, refuses = tmp_path / "one", Program("two", (sys.executable, "-c", "raise SystemExit(1)"), {**os.environ})
    with pytest.raises(NotStarted, match=r"two could not start \(exit code 1\)"):
        await Supervisor([stays(one), refuses], PATIENCE_S, print).run()
    assert all(is_gone(pid) for pid in pids(one))
