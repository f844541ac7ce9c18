"""The worker program's own end; and that benchmarks can be imported and finish."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.workers.torch_host.worker_rig import DEADLINE_S, PROGRAM

pytestmark = pytest.mark.slow

# One instruction of Python that takes hours and lets no other thread in meanwhile.
STUCK = """
import asyncio
from greenroom.workers.torch_host import main

main.STUCK_S = 1.0
main._control = lambda listener, prepare, loop, ended: loop.call_soon_threadsafe(pow, 7, 7 ** 11)
asyncio.run(main._serve(None, None))
"""

# The same, but it lasts for several times that long in pieces, and then the gateway hangs up.
PATIENT = """
import asyncio, time
from greenroom.workers.torch_host import main

def control(listener, prepare, loop, ended):
    for _ in range(45):
        time.sleep(0.1)
        loop.call_soon_threadsafe(sum, range(1000))
    loop.call_soon_threadsafe(ended.set)

main.STUCK_S = 3.0
main._control = control
asyncio.run(main._serve(None, None))
time.sleep(4)
"""


def ran(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_a_worker_whose_interpreter_is_stuck_ends_itself_and_says_where_it_stood() -> None:
    ended = ran(STUCK)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr and "run_forever" in ended.stderr


def test_a_worker_whose_loop_turns_lives_on_and_is_not_ended_after_its_gateway_hung_up() -> None:
    ended = ran(PATIENT)
    assert (ended.returncode, ended.stderr) == (0, "")


SETTLED = """
import os, sys
from greenroom.workers.torch_host import main

assert "torch" not in sys.modules
main._settle()
print(os.environ["OMP_WAIT_POLICY"])
"""


def test_threads_that_compute_on_the_host_sleep_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert ran(SETTLED).stdout == "PASSIVE\n"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert ran(SETTLED).stdout == "ACTIVE\n"


TINY = "--layers 1 --hidden 32 --intermediate 64 --heads 2 --kv-heads 1 --vocabulary 100 --prompt 8 --steps 4"


@pytest.mark.parametrize("name", ["rig.gpu_worker", "hosted.spread"])
def test_what_needs_a_gpu_can_be_imported(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.{name}").main)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_decode_probe_finishes_every_section(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = importlib.import_module("benchmarks.hosted.probe_decode")
    monkeypatch.setattr(sys, "argv", ["probe_decode", *TINY.split(), "--batches", "1", "2", "--device", "cpu"])
    with torch.no_grad():
        probe.main()
    output = capsys.readouterr().out
    assert "Traceback" not in output
    assert json.loads(output.splitlines()[-1])["met"]
