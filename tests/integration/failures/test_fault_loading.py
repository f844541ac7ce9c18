"""Engines that do not come up: every way to fail a load, told at once, paused after, and tried again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind
from greenroom.engines.builtin.llamacpp import WORKER
from greenroom.errors import LoadFailed
from greenroom.process import proc
from tests.harness import FAKE_ENGINE, fake, gateway, left_behind, tiny
from tests.integration.facts import Journal, at_rest, is_loading, is_ready, pids
from tests.integration.raw import Answer, chat, http
from tests.models import tiny as tiny_model
from tests.waiting import until, until_now

pytestmark = pytest.mark.slow

# A load timeout that no test waits for: an answer that comes much earlier was not caused by it.
NEVER_S = 300
LONG_BACKOFF = {"scheduler": {"backoff_s": 100}}


def load(app: App, model: str) -> Any:
    return app.operations.move(MoveKind.LOAD, ModelId(model))


def assert_failed(answer: Answer, why: str, code: str = "model_load_failed") -> None:
    """The shape every waiter of a failed load sees, with what the engine said last."""
    assert answer.status == 503, answer.body
    assert answer.error["code"] == code
    assert why in answer.error["message"]
    assert int(answer.headers["retry-after"]) >= 1


# --- it ends while loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "why"),
    [
        pytest.param(
            ["--crash-at", "load", "--load-s", "0.4"],
            "alpha could not be loaded: crashing as told; the engine ended while loading (exit code 1).",
            id="crash at load",
        ),
        pytest.param(["--exit-before-bind"], "could not open the model file", id="exit before bind"),
        pytest.param(["--exit-zero-without-listening"], "exit code 0", id="exit 0 without listening"),
    ],
)
async def test_engine_that_ends_while_loading_fails_all_and_backs_off(
    tmp_path: Path, switches: list[str], why: str
) -> None:
    journal = Journal(tmp_path)
    model = fake("alpha", *journal.switches, *switches, load_timeout_s=NEVER_S)
    async with gateway(tmp_path, {"alpha": model}, **LONG_BACKOFF) as app:
        began = time.monotonic()
        for answer in await asyncio.gather(*(chat(app, "alpha", stream=number % 2 == 0) for number in range(4))):
            assert_failed(answer, why)
        assert time.monotonic() - began < NEVER_S / 5
        assert journal.count("start") == 1

        # Within the back-off nothing is started, and the caller hears the same reason.
        again = await chat(app, "alpha")
        assert_failed(again, why)
        assert int(again.headers["retry-after"]) > 10
        assert journal.count("start") == 1
        await at_rest(app)


async def test_model_file_that_is_not_there_fails_the_load(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"alpha": tiny(tmp_path / "gone.gguf")}, **LONG_BACKOFF) as app:
        assert_failed(await chat(app, "alpha"), "gone.gguf")


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        pytest.param(4, "gguf_init_from_reader: failed to read header", id="magic only"),
        pytest.param(5000, "gguf_init_from_reader: failed to read key-value pairs", id="cut in the head"),
        pytest.param(
            -3000, "data is not within the file bounds, model is corrupted or incomplete", id="cut at the end"
        ),
    ],
)
async def test_the_error_of_a_corrupt_gguf_begins_with_llama_cpps_words(tmp_path: Path, kept: int, why: str) -> None:
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(tiny_model("alpha").read_bytes()[:kept])
    model = tiny(corrupt, load_timeout_s=NEVER_S)
    async with gateway(tmp_path, {"alpha": model}, **LONG_BACKOFF) as app:
        answer = await chat(app, "alpha", stream=True)
        assert_failed(answer, "the engine ended while loading")
        first, *rest = answer.error["message"].splitlines()
        assert first.startswith("alpha could not be loaded: ") and why in first and not rest
        assert "gguf" in answer.error["details"].lower()


async def test_llama_cpp_that_runs_out_of_memory_fails_the_load(tmp_path: Path) -> None:
    """A context of millions of tokens in an address space that cannot hold it."""
    program = tmp_path / "llama-server"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, {str(WORKER)!r}, *sys.argv[1:]])\n"
    )
    program.chmod(0o755)
    model = tiny(tiny_model("alpha"), program=str(program), load_timeout_s=NEVER_S) | {"ctx_size": 4_000_000}
    async with gateway(tmp_path, {"alpha": model}, **LONG_BACKOFF) as app:
        answer = await chat(app, "alpha")
        assert (answer.status, answer.error["code"]) == (507, "model_out_of_memory")
        assert "insufficient memory" in answer.error["details"] or "allocate" in answer.error["details"]


# --- after a failure ------------------------------------------------------------------------------------------------


@contextmanager
def broken(folder: Path) -> Iterator[Path]:
    """A file that makes engines crash while it is there."""
    path = folder / "broken"
    path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


async def test_load_is_tried_again_after_the_back_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with broken(tmp_path) as flag:
        model = fake("alpha", *journal.switches, "--crash-while", str(flag))
        async with gateway(tmp_path, {"alpha": model}, scheduler={"backoff_s": 1}) as app:
            assert_failed(await chat(app, "alpha"), "crashing as told")
            flag.unlink()
            first_failed_at = time.monotonic()
            answers: list[Answer] = []

            async def is_answered() -> bool:
                answers.append(await chat(app, "alpha"))
                return answers[-1].status == 200

            await until(is_answered, every_s=0.05)
            for answer in answers[:-1]:
                assert_failed(answer, "crashing as told")
            assert answers[-1].text.startswith("alpha")
            assert time.monotonic() - first_failed_at > 0.8
            assert journal.count("start") == 2


async def test_each_further_failure_doubles_the_pause(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha", "--exit-before-bind")}, scheduler={"backoff_s": 40}) as app:
        waits = []
        for _ in range(3):
            with pytest.raises(LoadFailed):
                await load(app, "alpha")
            waits.append(int((await chat(app, "alpha")).headers["retry-after"]))
        # Retry-After itself never exceeds two minutes.
        assert [round(wait / 40) for wait in waits] == [1, 2, 3]


async def test_a_program_that_is_not_there_is_told_with_the_model(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"alpha": {"cmd": "no-such-server ${PORT}"}}, **LONG_BACKOFF) as app:
        (shown,) = (await http(app, "GET", "/api/v1/status")).json()["models"]
        assert shown["missing"] == "there is no program no-such-server; install it or correct `cmd`"
        answer = await chat(app, "alpha")
        assert_failed(answer, "there is no program no-such-server", "engine_missing")
        assert answer.error["message"].startswith("alpha could not be loaded: ")


async def test_a_program_that_was_installed_meanwhile_is_used(tmp_path: Path) -> None:
    program = tmp_path / "server"
    cmd = [str(program), *fake("alpha")["cmd"][1:]]
    async with gateway(tmp_path, {"alpha": {"cmd": cmd, "memory_mib": 1}}, **LONG_BACKOFF) as app:
        assert_failed(await chat(app, "alpha"), "there is no program", "engine_missing")
        program.symlink_to(sys.executable)
        await load(app, "alpha")
        (shown,) = (await http(app, "GET", "/api/v1/status")).json()["models"]
        assert (shown["missing"], shown["last_error"]) == (None, None)


async def test_an_engine_whose_packages_are_missing_says_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (tmp_path / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    python = tmp_path / "bin" / "python"
    python.symlink_to(sys.executable)
    async with gateway(tmp_path, {"alpha": {"path": str(tmp_path), "python": str(python)}}, **LONG_BACKOFF) as app:
        answer = await chat(app, "alpha")
        packages = "torch transformers h11 jinja2"
        assert_failed(answer, f"{python} -m pip install {packages}", "engine_missing")


async def test_operator_need_not_wait_for_the_back_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with broken(tmp_path) as flag:
        model = fake("alpha", *journal.switches, "--crash-while", str(flag))
        async with gateway(tmp_path, {"alpha": model}, **LONG_BACKOFF) as app:
            assert_failed(await chat(app, "alpha"), "crashing as told")
            with pytest.raises(LoadFailed, match="could not be loaded"):
                await load(app, "alpha")
            flag.unlink()
            await load(app, "alpha")
            assert journal.count("start") == 3
            assert (await chat(app, "alpha")).text.startswith("alpha")


async def test_preloaded_model_that_failed_comes_by_itself_after_the_back_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with broken(tmp_path) as flag:
        model = fake("alpha", *journal.switches, "--crash-while", str(flag), preload=True)
        async with gateway(tmp_path, {"alpha": model}, scheduler={"backoff_s": 0.5}) as app:
            await until(lambda: journal.count("start") >= 2, "a second try")
            flag.unlink()
            await until(lambda: is_ready(app, "alpha"), "the preloaded model is ready")
        # 0.5, 1, 2 … seconds: a loop without pauses would have started it far more often.
        assert journal.count("start") <= 5


# --- it hangs while loading -----------------------------------------------------------------------------------------

SLEEPER = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)", "${PORT}"]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(fake("alpha", "--hang", "load"), id="health never answers"),
        pytest.param(fake("alpha", "--load-s", "1000"), id="health says loading for ever"),
        pytest.param({"cmd": SLEEPER, "memory_mib": 1}, id="no port"),
    ],
)
async def test_load_that_hangs_is_ended_at_its_deadline(tmp_path: Path, model: dict[str, Any]) -> None:
    async with gateway(tmp_path, {"alpha": {**model, "load_timeout_s": 1}}, **LONG_BACKOFF) as app:
        for answer in await asyncio.gather(chat(app, "alpha"), chat(app, "alpha", stream=True)):
            assert_failed(answer, "not ready after 1 s")
        assert not app.slots.live and not app.mover.moving
        await at_rest(app)


async def test_engine_stopped_while_loading_is_killed_at_the_deadline(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    model = fake("alpha", *journal.switches, "--load-s", "1000", load_timeout_s=8, stop_timeout_s=0.5)
    async with gateway(tmp_path, {"alpha": model}, **LONG_BACKOFF) as app:
        waiting = asyncio.create_task(chat(app, "alpha"))
        await until(lambda: journal.count("start") == 1, "the engine runs")
        os.kill(journal.lines("start")[0]["pid"], signal.SIGSTOP)
        assert_failed(await waiting, "not ready after 8 s")


async def test_kill_9_while_loading_fails_the_waiters_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    model = fake("alpha", *journal.switches, "--load-s", "1000", load_timeout_s=NEVER_S)
    async with gateway(tmp_path, {"alpha": model}, **LONG_BACKOFF) as app:
        waiting = asyncio.create_task(chat(app, "alpha"))
        await until(lambda: journal.count("start") == 1 and is_loading(app, "alpha"), "the engine loads")
        os.kill(journal.lines("start")[0]["pid"], signal.SIGKILL)
        assert_failed(await waiting, "killed by SIGKILL")


# --- a stranger on its port -----------------------------------------------------------------------------------------


def free_range(length: int) -> tuple[int, int]:
    """So many free ports in a row, outside of those the system gives out by itself."""
    for _ in range(1000):
        first = random.randrange(11_000, 20_000)
        if all(proc.can_bind(port) for port in range(first, first + length)):
            return first, first + length - 1
    raise AssertionError("no free ports")


@contextmanager
def stranger(port: int) -> Iterator[None]:
    """A foreign server that answers everything an engine answers."""
    command = [sys.executable, "-I", "-S", str(FAKE_ENGINE), "--port", str(port), "--name", "stranger"]
    with subprocess.Popen(command) as process:
        try:
            until_now(lambda: not proc.can_bind(port), "the stranger has come")
            yield
        finally:
            process.kill()


@contextmanager
def deaf_stranger(port: int) -> Iterator[None]:
    """One that listens and never answers."""
    with closing(socket.create_server(("127.0.0.1", port))):
        yield


@pytest.mark.parametrize("who", [stranger, deaf_stranger])
async def test_engine_whose_port_is_taken_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: Any
) -> None:
    first, last = free_range(3)
    with who(first):
        # As if it had come in the moment between our look and the engine's bind.
        really = proc.can_bind
        monkeypatch.setattr(proc, "can_bind", lambda port: port == first or really(port))
        journal = Journal(tmp_path)
        model = fake("alpha", *journal.switches)
        async with gateway(tmp_path, {"alpha": model}, ports={"first": first, "last": last}) as app:
            answer = await chat(app, "alpha")
            assert answer.status == 200, answer.body
            assert answer.text.startswith("alpha")
            # A stranger that answers before the engine has even started is seen without it.
            assert journal.lines("start")[-1]["port"] == first + 1
            assert journal.lines("ready", pid=pids(app, "alpha")[0])


async def test_strangers_on_every_port_fail_the_load_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = free_range(1)
    with stranger(first):
        monkeypatch.setattr(proc, "can_bind", lambda port: True)
        models = {"alpha": fake("alpha", load_timeout_s=NEVER_S)}
        async with gateway(tmp_path, models, ports={"first": first, "last": last}, **LONG_BACKOFF) as app:
            assert_failed(await chat(app, "alpha"), f"port {first}")


async def test_listener_any_accepts_an_engine_outside_of_the_tree(tmp_path: Path) -> None:
    """As for a container: the command stays in the foreground, a daemon's child listens."""
    first, last = free_range(1)
    model = {"cmd": SLEEPER, "memory_mib": 1, "listener": "any", "stop_timeout_s": 1}
    async with gateway(tmp_path, {"alpha": model}, ports={"first": first, "last": last}) as app:
        waiting = asyncio.create_task(chat(app, "alpha"))
        await until(lambda: is_loading(app, "alpha") and left_behind(tmp_path), "its port is chosen, its command runs")
        with stranger(first):
            assert (await waiting).text.startswith("stranger")


async def test_empty_folder_is_told_as_such_whatever_else_is_missing(tmp_path: Path) -> None:
    """Nothing that hosts models is installed in this Python, either."""
    (tmp_path / "empty").mkdir()
    async with gateway(tmp_path, {"a": {"path": str(tmp_path / "empty"), "memory_mib": 100}}) as app:
        answer = await chat(app, "a")
        assert (answer.status, answer.error["code"]) == (503, "bad_model")
        assert "is empty" in answer.error["message"]
