"""Who waits for which trial, what is remembered of it, and the processes this happens in."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from greenroom.workers.torch_host.api.refusals import Refused
from greenroom.workers.torch_host.sandbox import schema_trial
from greenroom.workers.torch_host.sandbox import schema_trials as module
from greenroom.workers.torch_host.sandbox.schema_trials import SchemaTrials, Share
from tests.workers.torch_host.waiting import until

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
import os, subprocess, sys, time
program = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), ""]
print(subprocess.Popen(program, stdin=int(sys.argv[2]), pass_fds=[int(sys.argv[2])]).pid, flush=True)
time.sleep(600)
"""


def order(number: int = 0) -> bytes:
    return json.dumps({"schema": json.dumps({"maxLength": number}), "overrides": {}}).encode()


async def status(share: Share, number: int = 0, param: str = "f") -> int:
    try:
        await share.check(order(number), param)
    except Refused as refused:
        return refused.status
    return 200


class Trials:
    """Trials that end when and as they are told to."""

    def __init__(self) -> None:
        self.began: list[bytes] = []
        self.running = self.most = 0
        self.go = asyncio.Event()
        self.end: tuple[int, str] | Exception = (0, "")

    def have_begun(self, number: int) -> bool:
        return len(self.began) == number

    async def tried(self, order: bytes) -> tuple[int, str]:
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
async def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    made = Trials()
    monkeypatch.setattr(module, "_tried", made.tried)
    return made


async def test_all_who_ask_about_one_schema_wait_for_one_trial(trials: Trials) -> None:
    all_trials = SchemaTrials()
    shares = [Share(all_trials), Share(all_trials)]
    trials.end = (0, "no such type")
    asking = [asyncio.create_task(shares[number % 2].check(order(), f"f{number}")) for number in range(10)]
    await until(lambda: bool(trials.began))
    trials.go.set()
    ends = await asyncio.gather(*asking, return_exceptions=True)
    # Each is told about the field he sent it in.
    assert [end.param for end in ends if isinstance(end, Refused)] == [f"f{number}" for number in range(10)]
    assert trials.began == [order()]


async def test_who_leaves_takes_the_trial_from_nobody_and_the_last_ends_it(trials: Trials) -> None:
    share = Share(SchemaTrials())
    first, second, third = (asyncio.create_task(status(share)) for _ in range(3))
    await until(lambda: trials.running == 1)
    first.cancel()
    await asyncio.wait([first])
    trials.go.set()
    assert (await second, await third) == (200, 200)
    trials.go.clear()
    alone = asyncio.create_task(status(share, 1))
    await until(lambda: trials.running == 1)
    alone.cancel()
    await until(lambda: trials.running == 0)
    # What nobody waited for is not remembered, and tried when somebody asks again.
    trials.go.set()
    assert await status(share, 1) == 200
    assert trials.began == [order(0), order(1), order(1)]


async def test_no_more_trials_run_at_once_than_may(trials: Trials) -> None:
    all_trials = SchemaTrials()
    asking = [asyncio.create_task(status(Share(all_trials), number)) for number in range(module.AT_ONCE + 2)]
    for ended in range(2):
        # Each that ends makes room for one.
        await until(partial(trials.have_begun, module.AT_ONCE + ended))
        asking[ended].cancel()
    await until(partial(trials.have_begun, len(asking)))
    trials.go.set()
    assert await asyncio.gather(*asking[2:]) == [200] * module.AT_ONCE
    assert (trials.most, trials.running) == (module.AT_ONCE, 0)


async def test_one_models_schemas_leave_a_place_for_anothers(trials: Trials) -> None:
    all_trials = SchemaTrials()
    greedy, modest = Share(all_trials), Share(all_trials)
    held = [asyncio.create_task(status(greedy, number)) for number in range(5)]
    await until(lambda: trials.running == module.AT_ONCE_A_MODEL)
    # Also one that the other model's callers wait for, far behind.
    asked = asyncio.create_task(status(modest, 4))
    await until(lambda: order(4) in trials.began)
    assert trials.began == [order(0), order(4)]
    trials.go.set()
    assert await asyncio.gather(asked, *held) == [200] * 6
    assert trials.began == [order(0), order(4), order(1), order(2), order(3)]


async def test_who_waits_too_long_is_told_to_try_again(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    share = Share(SchemaTrials())
    assert await asyncio.gather(*(status(share, number) for number in range(4))) == [503] * 4
    await until(lambda: trials.running == 0)


@pytest.mark.parametrize("name", ["PASSED_MAX", "REFUSED_MAX"])
async def test_the_last_verdicts_are_remembered(trials: Trials, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(module, name, 2)
    trials.go.set()
    trials.end = (0, "" if name == "PASSED_MAX" else "no such type")
    share = Share(SchemaTrials())
    for number in (1, 1, 2, 1, 3, 1, 2):
        assert await status(share, number) == (200 if name == "PASSED_MAX" else 400)
    # The third pushed the second out, which had been asked for the longest ago.
    assert trials.began == [order(1), order(2), order(3), order(2)]


@pytest.mark.parametrize(
    "code",
    [
        schema_trial.TOO_SLOW,
        schema_trial.TOO_MUCH,
        *(-signal.Signals[f"SIG{name}"] for name in ("XCPU", "SEGV", "ABRT")),
    ],
)
async def test_what_is_the_schemas_own_doing_is_held_against_it(trials: Trials, code: int) -> None:
    trials.go.set()
    trials.end = (code, "")
    share = Share(SchemaTrials())
    for _ in range(3):
        with pytest.raises(Refused) as refused:
            await share.check(order(), "f")
        assert (refused.value.status, refused.value.code) == (422, "schema_too_complex")
    assert len(trials.began) == 1


@pytest.mark.parametrize(
    "end",
    [
        TimeoutError(),
        OSError("no process"),
        (1, ""),
        (-signal.SIGKILL, ""),
        (-signal.SIGALRM, ""),
        (schema_trial.NO_LIBRARY, "gone"),
    ],
)
async def test_what_is_not_is_logged_and_tried_again(
    trials: Trials, caplog: pytest.LogCaptureFixture, end: tuple[int, str] | Exception
) -> None:
    trials.go.set()
    trials.end = end
    share = Share(SchemaTrials())
    assert await status(share) == 503
    assert "schema trial failed" in caplog.text
    trials.end = (0, "")
    assert await status(share) == 200


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
    assert await status(Share(SchemaTrials())) == wanted


async def test_a_machine_that_has_no_time_is_not_the_schemas_fault(
    library: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    library("time.sleep(600)")
    monkeypatch.setattr(module, "WALL_S", 0.5)
    assert await status(Share(SchemaTrials())) == 503


async def test_a_library_that_cannot_be_imported_is_not_the_schemas_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "none" / "a")))
    assert await status(Share(SchemaTrials())) == 503
    assert "No module named 'llguidance'" in caplog.text


async def test_a_trial_is_the_first_to_go_and_ends_with_its_worker() -> None:
    # Its order never comes, so that it does not end by itself.
    theirs, ours = os.pipe()
    program = str(Path(schema_trial.__file__))
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, program, str(theirs)], stdout=subprocess.PIPE, pass_fds=[theirs]
    )
    try:
        assert worker.stdout is not None
        trial = Path("/proc") / worker.stdout.readline().decode().strip()
        await until(lambda: (trial / "oom_score_adj").read_text().strip() == schema_trial.FIRST_TO_GO)
        worker.kill()
        worker.wait()
        # Long before its own alarm.
        await until(lambda: _has_ended(trial), within_s=schema_trial.WALL_S / 2)
    finally:
        worker.kill()
        worker.communicate()
        os.close(theirs)
        os.close(ours)


def _has_ended(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
