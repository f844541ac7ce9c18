"""The gateway is killed, stopped or started twice, also as process 1: nothing is left, and the next one serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli.address import parse
from greenroom.cli.client import Client
from greenroom.process import proc
from greenroom.process.proc import IDENTITY_VARIABLE
from tests.harness import GatewayProcess, fake, gateway, gateway_process, left_behind, tiny, write_config
from tests.integration.facts import Journal
from tests.integration.faults import ENDLESS, assert_ended_by, dial, first_events, is_alive, rest_of
from tests.integration.raw import Answer, asking, chat
from tests.models import tiny as tiny_model
from tests.waiting import PATIENCE_S, until, until_now

pytestmark = pytest.mark.slow
RACE = Path(__file__).with_name("state_dir_race.py")

# Engines get a second to leave when the gateway is gone, then are killed.
CLEARED_WITHIN_S = 30.0
CUSTOMERS = 6


async def ask(port: int, model: str, *, stream: bool = False) -> Answer:
    """One question to a gateway that may die. Raises OSError or EOFError when it does."""
    async with await dial(port) as raw:
        raw.ask(asking(model, stream=stream, max_tokens=20))
        answer = await raw.answer()
    if not answer.whole:
        raise EOFError
    return answer


# --- kill -9 under load ---------------------------------------------------------------------------------------------


@dataclass
class Kills:
    """A gateway killed again and again, and what was seen of it."""

    folder: Path
    seed: int
    answers: Counter[str] = field(default_factory=Counter)
    gate: GatewayProcess | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.journal = Journal(self.folder)
        self.models = self._models()
        # Room for two of the four at a time: there is always something to swap.
        self.config = write_config(self.folder, self.models, budget_mib=250)

    def _models(self) -> dict[str, Any]:
        return {
            "alpha": tiny(tiny_model("alpha")),
            "bravo": tiny(tiny_model("bravo"), parallel=1),
            "cmd": self._fake("cmd", "--token-s", "0.01"),
            "forker": self._fake("forker", "--fork-setsid", "--ignore-term"),
        }

    def _fake(self, name: str, *switches: str) -> dict[str, Any]:
        lock = str(self.folder / f"{name}.lock")
        return fake(name, *self.journal.switches, "--lock", lock, *switches, stop_timeout_s=0.3)

    async def round(self, *, until_all_answered: bool = False) -> None:
        if self.random.random() < 0.15:
            self.kill_while_it_starts()
        gate = self.gate = GatewayProcess(self.folder, self.config)
        # It serves only when nothing of the run before is left, also if that was killed this very moment.
        assert not left_behind(self.folder), f"seed {self.seed}"
        await self.kill_under_load(gate, until_all_answered)
        if self.random.random() < 0.5:
            self.expect_cleared()

    def kill_while_it_starts(self) -> None:
        command = [sys.executable, "-m", "greenroom", "serve", "--config", str(self.config)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            time.sleep(self.random.uniform(0.1, 1.0))
            process.kill()

    async def kill_under_load(self, gate: GatewayProcess, until_all_answered: bool) -> None:
        seeds = [self.random.random() for _ in range(CUSTOMERS)]
        async with asyncio.TaskGroup() as customers:
            for seed in seeds:
                customers.create_task(self.customer(gate.port, random.Random(seed)))
            await asyncio.sleep(self.random.uniform(0.0, 1.2))
            if until_all_answered:
                await until(lambda: set(self.answers) == set(self.models), "engines of all kinds have answered")
            gate.kill()

    async def customer(self, port: int, chance: random.Random) -> None:
        """Ask one model after the other until the gateway is gone. What is answered must be right."""
        while True:
            model = chance.choice(list(self.models))
            try:
                answer = await ask(port, model, stream=chance.random() < 0.5)
            except (OSError, EOFError):
                return
            assert answer.status == 200, answer.body
            assert model in answer.text, answer.body
            self.answers[model] += 1

    def expect_cleared(self) -> None:
        until_now(lambda: not left_behind(self.folder), f"seed {self.seed}: nothing is left", CLEARED_WITHIN_S)

    async def expect_all_served(self) -> None:
        """A last one, not killed: every model gives its right answer, and it leaves in order."""
        self.expect_cleared()
        gate = self.gate = GatewayProcess(self.folder, self.config)
        for model in self.models:
            answer = await ask(gate.port, model)
            assert model in answer.text
        assert gate.stop() == 0
        assert not left_behind(self.folder)
        assert self.journal.count("doubled") == 0, f"seed {self.seed}: two engines of one model at once"

    def end(self) -> None:
        """Whatever went wrong, nothing of this test runs on."""
        if self.gate is not None and self.gate.process.poll() is None:
            self.gate.kill()


# Twenty starts take half a minute where nothing else runs, and minutes on two slow, busy cores.
@pytest.mark.parametrize(
    "rounds", [pytest.param(10, marks=pytest.mark.timeout(400)), pytest.param(300, marks=pytest.mark.soak)]
)
async def test_gateway_killed_at_any_moment_leaves_nothing_and_serves_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rounds: int
) -> None:
    kills = Kills(tmp_path, seed=int(os.environ.get("GREENROOM_SEED") or secrets.randbits(32)))
    with capsys.disabled():
        sys.stdout.write(f"\nseed {kills.seed} (GREENROOM_SEED repeats it)\n")
        sys.stdout.flush()
    try:
        for _ in range(rounds):
            await kills.round()
        # On a busy machine the kills may all have come while models were loading: one comes when all are at work.
        await kills.round(until_all_answered=True)
        await kills.expect_all_served()
    finally:
        kills.end()


# --- SIGTERM --------------------------------------------------------------------------------------------------------


async def test_sigterm_lets_running_answers_finish_and_leaves_nothing(tmp_path: Path) -> None:
    models = {"alpha": tiny(tiny_model("alpha")), "forker": fake("forker", "--fork-setsid", "--token-s", "0.05")}
    with gateway_process(tmp_path, models, server={"drain_s": 200}) as gate:
        assert "alpha" in (await ask(gate.port, "alpha")).text
        async with await dial(gate.port) as raw:
            raw.ask(asking("forker", stream=True, tokens=20))
            await first_events(raw, 3)
            gate.process.terminate()
            rest = await rest_of(raw)
        assert rest.whole and rest.data[-1] == "[DONE]"
        assert await asyncio.to_thread(gate.process.wait, PATIENCE_S) == 0
        # At once, not a moment later: it waited for its engines.
        assert not left_behind(tmp_path)


async def test_second_sigterm_cuts_running_answers(tmp_path: Path) -> None:
    models = {"alpha": fake("alpha", "--token-s", "0.01", "--tokens", str(ENDLESS))}
    with gateway_process(tmp_path, models, server={"drain_s": 600}) as gate:
        async with await dial(gate.port) as raw:
            raw.ask(asking("alpha", stream=True))
            await first_events(raw, 3)
            gate.process.terminate()
            await asyncio.to_thread(wait_for_line, gate, "shutting down")
            await first_chunks(raw, 3)
            assert gate.process.poll() is None
            gate.process.terminate()
            assert_ended_by(await rest_of(raw), "shutting_down", 503)
        assert await asyncio.to_thread(gate.process.wait, PATIENCE_S) == 0
        assert not left_behind(tmp_path)


async def first_chunks(raw: Any, count: int) -> None:
    """The answer still goes on."""
    for _ in range(count):
        assert await raw.chunk()


def wait_for_line(gate: GatewayProcess, word: str) -> None:
    until_now(lambda: any(word in line for line in gate.lines()), f"it says {word!r}")


async def test_sigterm_while_a_model_loads_does_not_wait_for_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    models = {"alpha": fake("alpha", *journal.switches, "--load-s", "1000", preload=True)}
    with gateway_process(tmp_path, models, server={"drain_s": 600}) as gate:
        until_now(lambda: journal.count("start"), "it has started")
        assert gate.stop() == 0
        assert not left_behind(tmp_path)


# --- two at once ----------------------------------------------------------------------------------------------------


async def test_second_gateway_on_a_state_directory_refuses_and_harms_nothing(tmp_path: Path) -> None:
    with gateway_process(tmp_path, {"alpha": fake("alpha")}) as gate:
        assert "alpha" in (await ask(gate.port, "alpha")).text
        engines = {one.pid for one in left_behind(tmp_path)}
        command = [sys.executable, "-m", "greenroom", "serve", "--config", str(tmp_path / "greenroom.yaml")]
        second = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert second.returncode not in (0, -signal.SIGKILL)
        assert f"is held by the gateway with pid {gate.process.pid}" in second.stderr
        assert "Traceback" not in second.stderr
        assert {one.pid for one in left_behind(tmp_path)} == engines
        assert "alpha" in (await ask(gate.port, "alpha")).text


def test_of_two_gateways_that_start_together_exactly_one_serves(tmp_path: Path) -> None:
    config = write_config(tmp_path, {})
    rounds = 20
    environment = os.environ | {"LOG_LEVEL": "error", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, str(RACE), str(config), str(rounds)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        env=environment,
    )
    outcomes = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(outcomes) == rounds
    for outcome in outcomes:
        assert outcome.count("serving") == 1, outcome
        assert any("is held by" in words for words in outcome), outcome


# --- what an earlier run left ---------------------------------------------------------------------------------------


@contextmanager
def planted(identity: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process as an earlier gateway might have left it; deaf to SIGTERM like a busy engine."""
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program],
        env={IDENTITY_VARIABLE: identity},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline()
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        process.stdout.close()


async def test_start_ends_what_an_earlier_run_left_and_nothing_else(tmp_path: Path) -> None:
    ours, theirs = "00112233445566aa", "00112233445566ab"
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "id").write_text(ours + "\n")
    # The same command line in each: only the identity tells them apart.
    with (
        planted(f"{ours}:0a0b0c0d:s1.1") as left,
        planted(f"{theirs}:0a0b0c0d:s1.1") as stranger,
        planted(f"{ours}0:0a0b0c0d:s1.1") as namesake,
    ):
        async with gateway(tmp_path, {"alpha": fake("alpha")}) as app:
            assert left.poll() == -signal.SIGKILL
            assert is_alive(stranger.pid) and is_alive(namesake.pid)
            assert (await chat(app, "alpha")).status == 200
        assert is_alive(stranger.pid) and is_alive(namesake.pid)


# A new process namespace with its own /proc; all of it ends with the gateway, and the gateway with the test.
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def _can_contain() -> bool:
    if shutil.which(CONTAINER[0]) is None:
        return False
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0


def children(parent: int) -> list[int]:
    return [seen.pid for seen in filter(None, map(proc.stat, proc.pids())) if seen.parent == parent]


@pytest.mark.skipif(not _can_contain(), reason="a process namespace cannot be made here")
def test_what_a_killed_keeper_leaves_is_collected_by_a_gateway_that_is_process_1(tmp_path: Path) -> None:
    # The engine starts a process that outlives it, as engines with workers do.
    models = {"m": fake("m", "--fork-setsid", ttl_s=0)}
    gateway = GatewayProcess(tmp_path, write_config(tmp_path, models), inside=CONTAINER)
    try:
        (first,) = children(gateway.process.pid)
        client = Client(parse(gateway.url))
        client.post("/api/v1/models/m/load")
        (keeper,) = children(first)
        below = proc.below(keeper)
        assert below
        os.kill(keeper, signal.SIGKILL)
        until_now(lambda: not any(proc.stat(pid) for pid in (keeper, *below)), "all of them are ended and collected")
        # The gateway goes on: the next keeper's end is told to its waiter.
        client.post("/api/v1/models/m/load")
        client.post("/api/v1/models/m/unload")
        until_now(lambda: not children(first), "nothing is left")
    finally:
        gateway.process.send_signal(signal.SIGKILL)
        gateway.process.wait()
