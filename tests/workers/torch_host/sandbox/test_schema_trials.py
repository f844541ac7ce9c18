"""Which request waits for which trial, what is remembered of it, and the processes this happens in."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from greenroom.workers.serving.errors import ApiError
from greenroom.workers.torch_host.sandbox import program, schema_job
from greenroom.workers.torch_host.sandbox.pool import (
    JobKind,
    MemoryExhausted,
    ProcessEnded,
    SandboxPool,
    TimedOut,
    Unavailable,
)
from greenroom.workers.torch_host.sandbox.schema_trials import SCHEMAS, WALL_S, SchemaChecker, SchemaTrials
from tests.waiting import until

# A library that does this when it is given a schema.
LIBRARY = """
import os, signal, time
class LLTokenizer:
    def __init__(self, name): pass
class LLMatcher:
    @staticmethod
    def grammar_from_json_schema(schema, overrides):
        {does}
"""
# A worker that starts a trial, whose order does not come, and says which process it is.
WORKER = """
import json, os, subprocess, sys, time
setup = {**json.loads(sys.argv[2]), "worker": os.getpid()}
program = [sys.executable, "-I", "-S", sys.argv[1], json.dumps(setup)]
print(subprocess.Popen(program, stdin=int(sys.argv[3]), pass_fds=[int(sys.argv[3])]).pid, flush=True)
time.sleep(600)
"""


def order(number: int = 0) -> bytes:
    return json.dumps({"schema": json.dumps({"maxLength": number}), "overrides": {}}).encode()


async def status(checker: SchemaChecker, number: int = 0, param: str = "f") -> int:
    try:
        await checker.check(order(number), param)
    except ApiError as refused:
        return refused.status
    return 200


End = tuple[bytes, bytes] | Exception
FITS: End = (schema_job.FIT, b"")
UNFIT: End = (schema_job.UNFIT, b"no such type")


class Trials(SandboxPool):
    """Trials that end when and as they are told to."""

    def __init__(self, kind: JobKind = SCHEMAS) -> None:
        super().__init__(kind)
        self.began: list[bytes] = []
        self.running = self.most = 0
        self.go = asyncio.Event()
        self.end: End = FITS

    def have_begun(self, number: int) -> bool:
        return len(self.began) == number

    async def run(self, order: bytes, answer_bytes_max: int, deadline_s: float) -> tuple[bytes, bytes]:
        self.began.append(order)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go.wait()
        finally:
            self.running -= 1
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


@pytest.fixture
async def trials() -> Trials:
    return Trials()


def real_checker() -> SchemaChecker:
    """Trials in real processes. What never ends is ended sooner than in production."""
    return SchemaChecker(SchemaTrials(SandboxPool(replace(SCHEMAS, cpu_s=1))))


async def test_all_requests_with_one_schema_wait_for_one_trial(trials: Trials) -> None:
    all_trials = SchemaTrials(trials)
    checkers = [SchemaChecker(all_trials), SchemaChecker(all_trials)]
    trials.end = UNFIT
    asking = [asyncio.create_task(checkers[number % 2].check(order(), f"f{number}")) for number in range(10)]
    await until(lambda: bool(trials.began))
    trials.go.set()
    ends = await asyncio.gather(*asking, return_exceptions=True)
    # Each is told about the field that it used.
    assert [end.param for end in ends if isinstance(end, ApiError)] == [f"f{number}" for number in range(10)]
    assert trials.began == [order()]


async def test_a_cancelled_request_does_not_end_a_shared_trial_and_the_last_does(trials: Trials) -> None:
    checker = SchemaChecker(SchemaTrials(trials))
    first, second, third = (asyncio.create_task(status(checker)) for _ in range(3))
    await until(lambda: trials.running == 1)
    first.cancel()
    await asyncio.wait([first])
    trials.go.set()
    assert (await second, await third) == (200, 200)
    trials.go.clear()
    alone = asyncio.create_task(status(checker, 1))
    await until(lambda: trials.running == 1)
    alone.cancel()
    await until(lambda: trials.running == 0)
    # A trial that no request waited for is not remembered, and tried when it is asked for again.
    trials.go.set()
    assert await status(checker, 1) == 200
    assert trials.began == [order(0), order(1), order(1)]


async def test_no_more_trials_run_at_once_than_may(trials: Trials) -> None:
    all_trials = SchemaTrials(trials)
    asking = [
        asyncio.create_task(status(SchemaChecker(all_trials), number)) for number in range(SCHEMAS.processes_max + 2)
    ]
    for ended in range(2):
        # Each that ends makes room for one.
        await until(partial(trials.have_begun, SCHEMAS.processes_max + ended))
        asking[ended].cancel()
    await until(partial(trials.have_begun, len(asking)))
    trials.go.set()
    assert await asyncio.gather(*asking[2:]) == [200] * SCHEMAS.processes_max
    assert (trials.most, trials.running) == (SCHEMAS.processes_max, 0)


async def test_one_models_schemas_leave_a_place_for_anothers(trials: Trials) -> None:
    all_trials = SchemaTrials(trials)
    greedy, modest = SchemaChecker(all_trials), SchemaChecker(all_trials)
    held = [asyncio.create_task(status(greedy, number)) for number in range(5)]
    await until(lambda: trials.running == SCHEMAS.processes_a_model)
    # Also one that the other model's callers wait for, far behind.
    asked = asyncio.create_task(status(modest, 4))
    await until(lambda: order(4) in trials.began)
    assert trials.began == [order(0), order(4)]
    trials.go.set()
    assert await asyncio.gather(asked, *held) == [200] * 6
    assert trials.began == [order(0), order(4), order(1), order(2), order(3)]


async def test_a_request_that_waits_too_long_for_a_trial_is_told_to_try_again() -> None:
    trials = Trials(replace(SCHEMAS, wait_s=0.05))
    checker = SchemaChecker(SchemaTrials(trials))
    assert await asyncio.gather(*(status(checker, number) for number in range(4))) == [503] * 4
    await until(lambda: trials.running == 0)


@pytest.mark.parametrize("name", ["PASSED_MAX", "REFUSED_MAX"])
async def test_the_last_verdicts_are_remembered(trials: Trials, name: str) -> None:
    trials.go.set()
    trials.end = FITS if name == "PASSED_MAX" else UNFIT
    checker = SchemaChecker(SchemaTrials(trials, **{name.lower(): 2}))
    for number in (1, 1, 2, 1, 3, 1, 2):
        assert await status(checker, number) == (200 if name == "PASSED_MAX" else 400)
    # The third pushed the second out, which had been asked for the longest ago.
    assert trials.began == [order(1), order(2), order(3), order(2)]


@pytest.mark.parametrize(
    "end",
    [
        (schema_job.TOO_SLOW, b""),
        (schema_job.TOO_MUCH, b""),
        MemoryExhausted(),
        *(ProcessEnded(-signal.Signals[f"SIG{name}"]) for name in ("XCPU", "SEGV", "BUS", "ABRT")),
    ],
    ids=repr,
)
async def test_what_is_the_schemas_own_doing_is_held_against_it(trials: Trials, end: End) -> None:
    trials.go.set()
    trials.end = end
    checker = SchemaChecker(SchemaTrials(trials))
    for _ in range(3):
        with pytest.raises(ApiError) as refused:
            await checker.check(order(), "f")
        assert (refused.value.status, refused.value.code) == (422, "schema_too_complex")
    assert len(trials.began) == 1


@pytest.mark.parametrize(
    "end",
    [
        TimedOut(WALL_S),
        Unavailable("no process"),
        ProcessEnded(1),
        ProcessEnded(None),
        ProcessEnded(-signal.SIGKILL),
        ProcessEnded(-signal.SIGALRM),
        (schema_job.UNKNOWN, b"gone"),
    ],
    ids=repr,
)
async def test_what_is_not_is_logged_and_tried_again(
    trials: Trials, caplog: pytest.LogCaptureFixture, end: End
) -> None:
    trials.go.set()
    trials.end = end
    checker = SchemaChecker(SchemaTrials(trials))
    assert await status(checker) == 503
    assert "schema trial failed" in caplog.text
    trials.end = FITS
    assert await status(checker) == 200


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def does(what: str, source: str = LIBRARY) -> None:
        file = tmp_path / "llguidance" / "__init__.py"
        file.parent.mkdir()
        file.write_text(source.format(does=what))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(file)))

    return does


@pytest.mark.parametrize(
    ("does", "wanted"),
    [
        pytest.param("raise ValueError('no such type')", 400, id="refuses"),
        pytest.param("raise MemoryError", 422, id="no memory in Python"),
        pytest.param("bytearray(2**32)", 422, id="more memory than it may have"),
        pytest.param("os.abort()", 422, id="no memory in the library"),
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", 422, id="stack"),
        pytest.param("while True: pass", 422, id="no end"),
        pytest.param("raise type('Panic', (BaseException,), {})", 422, id="panic"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 503, id="killed"),
        pytest.param("raise RuntimeError('can\\'t start new thread')", 503, id="no threads"),
    ],
)
async def test_how_a_trial_ends_says_whose_fault_it_was(library: Callable[[str], None], does: str, wanted: int) -> None:
    library(does)
    assert await status(real_checker()) == wanted


async def test_a_machine_that_has_no_time_is_not_the_schemas_fault(library: Callable[[str], None]) -> None:
    library("time.sleep(600)")
    hurried = SandboxPool(replace(SCHEMAS, wall_s=1))
    assert await status(SchemaChecker(SchemaTrials(hurried))) == 503


async def test_a_library_that_cannot_be_imported_is_not_the_schemas_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "none" / "a")))
    assert await status(real_checker()) == 503
    assert "No module named 'llguidance'" in caplog.text


async def test_a_trial_is_the_first_to_go_and_ends_with_its_worker() -> None:
    # Its order never comes, so that it does not end by itself.
    theirs, ours = socket.socketpair()
    setup = {"module": str(SCHEMAS.module), "folders": [], "memory_bytes": SCHEMAS.memory_bytes}
    setup |= {"kept_bytes": 0, "cpu_s": SCHEMAS.cpu_s, "wall_s": WALL_S}
    command = [sys.executable, "-c", WORKER, program.__file__, json.dumps(setup), str(theirs.fileno())]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()])
    try:
        assert worker.stdout is not None
        trial = Path("/proc") / worker.stdout.readline().decode().strip()
        await until(lambda: (trial / "oom_score_adj").read_text().strip() == program.OOM_SCORE)
        worker.kill()
        worker.wait()
        # Long before its own alarm.
        await until(lambda: _has_ended(trial), within_s=WALL_S / 2)
    finally:
        worker.kill()
        worker.communicate()
        theirs.close()
        ours.close()


def _has_ended(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
