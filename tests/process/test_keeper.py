"""The keeper when its gateway is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import until_now

from .trees import is_alive, new_identity

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
