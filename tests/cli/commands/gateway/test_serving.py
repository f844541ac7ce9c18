"""`greenroom serve` as a process: what it says, and what signals do to it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import cast

import pytest

from greenroom.app import App
from greenroom.cli.serving import Signals, why_not_started
from greenroom.config.schema import Config, Server
from greenroom.runtime.record.recording import ACTIVITY_COLUMNS
from tests.cli.command import Cli
from tests.waiting import until, until_now

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
FILE = """
server: {port: 1, drain_s: 5}
models:
  speech: {cmd: "sh --port ${PORT}"}
"""


class Served:
    """A gateway in a process of its own; its output is read from files, so that it never waits for us."""

    def __init__(self, folder: Path, *argv: str, file_bytes_max: int = resource.RLIM_INFINITY) -> None:
        self._out, self._err = folder / "out", folder / "err"
        command = [sys.executable, "-m", "greenroom.cli.main", "serve", "--state-dir", str(folder / "state"), *argv]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=folder)
        # Long before it writes: it is still importing.
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (file_bytes_max, resource.RLIM_INFINITY))

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def url(self) -> str:
        self.until(lambda: "next, in another terminal" in self.out)
        return next(word for word in self.out.split() if word.startswith("http://"))

    def get(self, path: str) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, timeout=DEADLINE_S) as answer:
            body: bytes = answer.read()
        return body

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def until(self, is_so: Callable[[], bool]) -> None:
        def looked() -> bool:
            assert self.process.poll() is None, f"it ended: {self.err}"
            return is_so()

        until_now(looked, lambda: f"{self.out} {self.err}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "greenroom.yaml"
    file.write_text(FILE)
    return file


@contextlib.contextmanager
def served(folder: Path, *argv: str, **limits: int) -> Iterator[Served]:
    gateway = Served(folder, *argv, **limits)
    try:
        yield gateway
    finally:
        if gateway.process.poll() is None:
            gateway.process.kill()
        gateway.wait()


def test_it_serves_says_where_and_ends_by_a_signal(file: Path) -> None:
    with served(file.parent, "--port", "0") as gateway:
        assert b"speech" in gateway.get("/v1/models")
        assert f"greenroom serves 1 model at {gateway.url} (started in " in gateway.out
        assert f"dashboard: {gateway.url}/ui/" in gateway.out
        assert f"export GREENROOM_URL={gateway.url}" in gateway.out
        assert "greenroom chat speech" in gateway.out
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
        assert "Traceback" not in gateway.err


def test_what_to_type_next_suits_the_models(file: Path) -> None:
    file.write_text(FILE.replace("cmd:", "category: speech, cmd:"))
    with served(file.parent, "--port", "0") as gateway:
        assert gateway.url and "greenroom ps" in gateway.out and "greenroom chat" not in gateway.out


def test_sighup_reads_the_file_again_and_the_command_line_still_wins(file: Path) -> None:
    with served(file.parent, "--port", "0", "--log-level", "error") as gateway:
        assert b"second" not in gateway.get("/v1/models")
        # The file's port is another than the one served on, and must not count as changed.
        file.write_text(FILE + '  second: {cmd: "sh --port ${PORT}"}\n')
        gateway.signal(signal.SIGHUP)
        gateway.until(lambda: b"second" in gateway.get("/v1/models"))
        assert gateway.err == ""


def test_a_bad_file_at_sighup_is_logged_and_changes_nothing(file: Path) -> None:
    with served(file.parent, "--port", "0") as gateway:
        before = gateway.get("/v1/models")
        file.write_text("modles: {}\n")
        gateway.signal(signal.SIGHUP)
        gateway.until(lambda: "not reloaded, nothing was changed" in gateway.err)
        assert "greenroom.yaml:1" in gateway.err
        assert json.loads(gateway.get("/v1/models")) == json.loads(before)


def test_many_sighups_become_few_reloads_and_the_last_one_counts(file: Path) -> None:
    with served(file.parent, "--port", "0") as gateway:
        gateway.get("/health")
        for number in range(50):
            file.write_text(FILE + f'  model{number}: {{cmd: "sh --port ${{PORT}}"}}\n')
            gateway.signal(signal.SIGHUP)
        gateway.until(lambda: b"model49" in gateway.get("/v1/models"))
        assert 1 <= gateway.err.count("reloaded") < 50
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0


def test_a_burst_of_sigterms_ends_it_as_one_does(file: Path) -> None:
    """Until the very end of the process, also while the interpreter clears up."""
    with served(file.parent, "--port", "0") as gateway:
        gateway.get("/health")

        def has_ended_when_asked_again() -> bool:
            gateway.signal(signal.SIGTERM)
            return gateway.process.poll() is not None

        until_now(has_ended_when_asked_again)
        assert gateway.wait() == 0
        assert "Traceback" not in gateway.err
        assert gateway.err.count("shutting down") == 2


STUCK = """
import asyncio, signal, os, sys, time
from pathlib import Path
from greenroom.cli import serving
from greenroom.config import loader

def greet(app):
    app.stuck = asyncio.ensure_future(asyncio.to_thread(time.sleep, 1_000))
    os.kill(os.getpid(), signal.SIGTERM)

path = Path(sys.argv[1])
config = loader.load(path).config
sys.exit(serving.serve(serving.ServePlan(config.model_copy(update={"state_dir": sys.argv[2]}), greet, path)))
"""


def test_a_thread_that_hangs_does_not_keep_the_process(file: Path, tmp_path: Path) -> None:
    file.write_text(FILE.replace("port: 1,", "port: 0,"))
    command = [sys.executable, "-c", STUCK, str(file), str(tmp_path / "state")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0 and "shutting down" in ended.stderr


def test_what_the_file_cannot_serve_is_a_warning(file: Path) -> None:
    file.write_text("models: {chat: {path: missing.gguf}}\n")
    with served(file.parent, "--port", "0") as gateway:
        assert b"chat" in gateway.get("/v1/models")
        assert "models.chat: path: there is no file" in gateway.err


def test_every_open_file_the_system_allows_may_be_used(file: Path) -> None:
    with served(file.parent, "--port", "0") as gateway:
        gateway.get("/health")
        limits = Path(f"/proc/{gateway.process.pid}/limits").read_text()
        soft, hard = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3:5]
        assert soft == hard or int(soft) >= 65_536


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full"])
def test_it_serves_although_its_output_is_closed(file: Path, closed: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = [sys.executable, "-m", "greenroom.cli.main", "serve", "--config", str(file), "--port", str(port)]
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *serve, "--state-dir", str(file.parent / "state")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            until_it_answers(port, process)
            process.terminate()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def test_closing_the_pipe_of_its_output_does_not_end_it(file: Path) -> None:
    command = [sys.executable, "-m", "greenroom.cli.main", "serve", "--config", str(file), "--port", "0"]
    command += ["--state-dir", str(file.parent / "state")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        try:
            words = (word for line in process.stderr for word in line.split())
            address = next(word for word in words if word.startswith("address="))
            until_it_answers(int(address.rpartition(":")[2]), process)
            process.terminate()
            assert process.wait(DEADLINE_S) == 0
            assert "BrokenPipe" not in process.stderr.read()
        finally:
            process.kill()


def until_it_answers(port: int, process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """It answers, and has said everything it says at the start."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answers() -> bool:
        assert process.poll() is None, "it ended"
        with (
            contextlib.suppress(OSError, HTTPException),
            opener.open(f"http://127.0.0.1:{port}/health", timeout=DEADLINE_S),
        ):
            return True
        return False

    until_now(answers, "it answers")


# --- what keeps it from starting ------------------------------------------------------------------------------------


def test_a_taken_port_is_one_clear_line(file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with served(file.parent, "--port", str(port)) as gateway:
            assert gateway.wait() == 1
            assert gateway.err.splitlines()[-1].startswith(f"greenroom: 127.0.0.1:{port} is taken")
            assert "Traceback" not in gateway.err and gateway.out == ""


def test_a_recording_that_its_disk_does_not_take_is_named(file: Path, tmp_path: Path) -> None:
    full = tmp_path / "activity.csv"
    # The last line was cut off, so the next run must write before its first request.
    full.write_text(",".join(ACTIVITY_COLUMNS) + "\n" + "x" * 200_000)
    file.write_text(FILE.replace("drain_s: 5", f"record_activity: {full}"))
    with served(file.parent, "--port", "0", file_bytes_max=100_000) as gateway:
        assert gateway.wait() == 1
        assert gateway.err.splitlines()[-1].startswith(f"greenroom: {full}: ")


def test_a_wrong_file_is_told_as_it_is(file: Path, cli: Cli) -> None:
    file.write_text("modles: {}\n")
    assert cli("serve", "--config", file, status=1).err.startswith(f"greenroom: {file}:1: modles: unknown key")


def test_an_address_others_can_reach_needs_keys_or_the_word(file: Path, tmp_path: Path) -> None:
    with served(tmp_path, "--host", "0.0.0.0", "--port", "0") as refused:
        assert refused.wait() == 1
        assert "server.api_keys" in refused.err.splitlines()[-1]
    with served(tmp_path, "--host", "0.0.0.0", "--port", "0", "--insecure") as open_door:
        assert open_door.url.startswith("http://127.0.0.1:")
        assert b"speech" in open_door.get("/v1/models")


def test_what_is_printed_holds_no_key(file: Path) -> None:
    file.write_text(FILE.replace("drain_s: 5", "api_keys: [{name: me, key: gr-secret-0123456789abcdef}]"))
    with served(file.parent, "--port", "0", "--log-level", "debug") as gateway:
        assert "export GREENROOM_API_KEY=…" in (gateway.url and gateway.out)
        assert "secret" not in gateway.out + gateway.err
        assert "no key has admin: true" in gateway.err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EADDRINUSE, "in use"), "--port"),
        (OSError(errno.EADDRNOTAVAIL, "not available"), "--host"),
        (socket.gaierror(socket.EAI_NONAME, "not known"), "--host"),
        (PermissionError(errno.EACCES, "denied"), "may not listen on 10.0.0.1:80"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/s/lock"), "/s/lock: Permission denied"),
        (OSError(errno.EMFILE, "Too many open files"), "10.0.0.1:80: Too many open files"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "/s: No space left on device"),
    ],
)
def test_what_the_system_refuses_is_one_line_that_says_what_to_do(error: OSError, said: str) -> None:
    line = why_not_started(error, Config(server=Server(host="10.0.0.1", port=80), state_dir="/s"))
    assert said in line and "\n" not in line


# --- signals, looked at from inside ---------------------------------------------------------------------------------


class SlowToReload:
    """A gateway whose reloads take until the test lets them end."""

    def __init__(self) -> None:
        self.reloads = 0
        self.is_draining = False
        self.may_end = asyncio.Event()

    async def reload(self) -> None:
        self.reloads += 1
        await self.may_end.wait()


def no_reload_is_under_way() -> bool:
    return not any(task.get_name() == "reload" for task in asyncio.all_tasks())


@pytest.mark.usefixtures("own_signals")
async def test_however_many_ask_while_the_file_is_read_it_is_read_once_more() -> None:
    signals, app = Signals(), SlowToReload()
    signals.app = cast(App, app)
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: app.reloads == 1, "the first has begun")
    for _ in range(20):
        signals.read_again()
    app.may_end.set()
    await until(no_reload_is_under_way, "all is read")
    assert app.reloads == 2
    # And the next is heard again.
    signals.read_again()
    await until(no_reload_is_under_way, "read again")
    assert app.reloads == 3
