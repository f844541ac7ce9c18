"""A process is told from another that has its number later, or elsewhere."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.leases import records
from greenroom.leases.records import holder_of, is_alive, is_here


def test_this_process_is_here_and_lives() -> None:
    mine = holder_of(os.getpid())
    assert mine is not None and (mine.pid, mine.host) == (os.getpid(), os.uname().nodename)
    assert is_here(mine) and is_alive(mine)


def test_another_with_the_same_number_is_not_the_same() -> None:
    mine = holder_of(os.getpid())
    assert mine is not None
    assert not is_alive(replace(mine, start_ticks=mine.start_ticks - 1))
    assert not is_here(replace(mine, host="far")) and not is_here(replace(mine, pid_ns=mine.pid_ns + 1))


def test_an_ended_process_is_not_alive_before_its_parent_collects_it() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        other = holder_of(process.pid)
        assert other is not None and is_alive(other)
        process.kill()
        # Its end is known without being collected: nothing has waited for it yet.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(other) and holder_of(process.pid) is None
    assert not is_alive(other)


def test_there_is_no_holder_that_never_was() -> None:
    assert holder_of(2**22 + 1) is None


def test_whether_a_holder_is_here_is_answered_without_looking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = holder_of(os.getpid())
    assert mine is not None
    monkeypatch.setattr(records, "_PROC", tmp_path)
    assert is_here(mine) and not is_here(replace(mine, host="far"))
    assert holder_of(os.getpid()) is None
