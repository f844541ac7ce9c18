"""Starts the embedded llama.cpp as a program and talks to it, for the tests that need a real engine."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greenroom.workers import llamacpp_server
from tests.waiting import until_now

PROGRAM = Path(llamacpp_server.__file__)
# One thread each: spinning threads on a busy machine with two cores make each other slow.
SMALL = ("--ctx-size", "1024", "--parallel", "2", "--threads", "1")
START_MAX_S = 150
ANSWER_MAX_S = 150


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_MAX_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ANSWER_MAX_S)
        self.sock.connect(self.path)


@dataclass(frozen=True, slots=True)
class Worker:
    process: subprocess.Popen[bytes]
    log: Path

    def address(self) -> str | None:
        """Where it serves, said when its model is loaded. llama.cpp may be amid a line of its own then."""
        line = re.search(r"llama\.cpp: serving .* on (\S+)\n", self.log.read_text())
        return line[1] if line else None

    def connect(self) -> http.client.HTTPConnection:
        address = self.address()
        assert address is not None
        scheme, _, place = address.partition("://")
        return UnixConnection(place) if scheme == "unix" else http.client.HTTPConnection(place, timeout=ANSWER_MAX_S)

    def send(self, path: str, body: object = None) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self.connect()
        payload = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, payload, {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def ask(self, path: str, body: object = None) -> tuple[int, Any]:
        connection, response = self.send(path, body)
        with contextlib.closing(connection):
            return response.status, json.loads(response.read())

    def stream(self, path: str, body: Mapping[str, object]) -> list[str]:
        """The `data:` of each event, in order."""
        connection, response = self.send(path, {**body, "stream": True})
        with contextlib.closing(connection):
            events = response.read().decode().split("\n\n")
        return [event.removeprefix("data: ") for event in events if event]


@contextlib.contextmanager
def worker(model: Path, *options: str, before: Sequence[str] = (), unix: bool = True) -> Iterator[Worker]:
    """A worker that has loaded its model; it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="gr-") as directory:
        log = Path(directory) / "log"
        address = ("--host", f"{directory}/engine.sock") if unix else ("--host", "127.0.0.1", "--port", "0")
        command = [*before, sys.executable, str(PROGRAM), "--model", str(model), *address, *SMALL, *options]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            started = Worker(process, log)
            _wait_until_ready(started)
            yield started
        finally:
            process.kill()
            process.wait()


def _wait_until_ready(started: Worker) -> None:
    def is_ready() -> bool:
        assert started.process.poll() is None, started.log.read_text()
        return started.address() is not None

    until_now(is_ready, started.log.read_text, START_MAX_S)


def run_to_end(*options: str, interpreter: Sequence[str] = (sys.executable,)) -> tuple[int, str]:
    """Run the worker where it is expected to end by itself; its exit code and the last line it said."""
    done = subprocess.run(
        [*interpreter, str(PROGRAM), *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=START_MAX_S,
        check=False,
    )
    return done.returncode, done.stderr.decode().splitlines()[-1]
