"""Gateways for tests: one in this process to look into, one as a real process to kill.

Both take the models as a dictionary in the shape of the configuration file and a budget, and leave nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from greenroom.app import App
from greenroom.config import loader
from greenroom.process import orphans
from greenroom.runtime.timeouts import TIMEOUTS
from tests.ports import claim
from tests.waiting import PATIENCE_S, until_now

STANDINS = Path(__file__).parent / "standins"
FAKE_ENGINE = STANDINS / "fake_engine.py"
FAKE_SERVER = STANDINS / "fake_server.py"
FASTEST_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def fake(name: str, *switches: str, **keys: Any) -> dict[str, Any]:
    """A model run by the fake engine with these switches."""
    cmd = [sys.executable, "-I", "-S", str(FAKE_ENGINE), "--port", "${PORT}", "--name", name, *switches]
    return {"cmd": cmd, "memory_mib": 100, "stop_timeout_s": 2, **keys}


def served(kind: str, folder: Path, *switches: str, faults: str = "", **keys: Any) -> dict[str, Any]:
    """A model run by a stand-in for vLLM or SGLang, whose program lies in this folder beside the model's."""
    program, weights = folder / kind, folder / "weights"
    folder.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {FAKE_SERVER} {kind} "$@"\n')
    program.chmod(0o700)
    weights.mkdir(exist_ok=True)
    (weights / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8}))
    header = json.dumps({"w": {"dtype": "F16", "shape": [2**20], "data_offsets": [0, 2**21]}}).encode()
    (weights / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2**21))
    env = {"FAKE_SWITCHES": json.dumps(switches), "FAKE_FAULTS": faults}
    common = {"engine": kind, "path": str(weights), "program": str(program), "env": env}
    return {**common, "memory_mib": 2_000, "stop_timeout_s": 2, **keys}


def tiny(path: Path, **keys: Any) -> dict[str, Any]:
    """A tiny real model on llama.cpp. One thread: spinning threads on a busy machine make it slower."""
    return {"path": str(path), "ctx_size": 512, "threads": 1, "memory_mib": 100, **keys}


def write_config(folder: Path, models: dict[str, Any], *, budget_mib: int = 10_000, **sections: Any) -> Path:
    server = {"port": 0, **sections.pop("server", {})}
    whole = {
        "server": server,
        "gpus": [{"memory_mib": budget_mib, "margin_mib": 0}],
        "state_dir": str(folder / "state"),
        "ports": _ports_of(folder),
        "models": models,
        **sections,
    }
    path = folder / "greenroom.yaml"
    path.write_text(yaml.dump(whole, Dumper=FASTEST_DUMPER))
    return path


# Ports for engines of tests: below those the system gives out by itself and beyond the gateway's own default, a part
# for each test process that runs beside others, in it a range for each folder. No two that live together share one.
PORTS_FIRST = 22_000
PORTS_A_PROCESS = 800
PORTS_A_FOLDER = 40
PROCESSES_MAX = 12

_folders: dict[Path, int] = {}


@functools.cache
def _part() -> int:
    """The part of this process: one that no other test process of this machine has, unless there are too many."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    parts = [(worker + step) % PROCESSES_MAX for step in range(PROCESSES_MAX)]
    return next((part for part in parts if claim(f"part-{part}")), parts[0])


def _ports_of(folder: Path) -> dict[str, int]:
    """The folder's range; the same when asked again, because a reload may not change it."""
    number = _folders.setdefault(folder, len(_folders)) % (PORTS_A_PROCESS // PORTS_A_FOLDER)
    first = PORTS_FIRST + _part() * PORTS_A_PROCESS + number * PORTS_A_FOLDER
    return {"first": first, "last": first + PORTS_A_FOLDER - 1}


@contextlib.asynccontextmanager
async def gateway(folder: Path, models: dict[str, Any], **options: Any) -> AsyncIterator[App]:
    """A gateway in this process, stopped and looked after at the end: nothing may be left."""
    timeouts = options.pop("timeouts", TIMEOUTS)
    path = write_config(folder, models, **options)
    app = await App.start(loader.load(path).config, path, timeouts=timeouts)
    try:
        yield app
    finally:
        app.shut_down()
        app.shut_down()
        await _closed(app)
        assert not left_behind(folder), "engines were left behind"


async def _closed(app: App) -> None:
    """Wait for its end; where that does not come, say what every task is doing."""
    try:
        await asyncio.wait_for(app.closed.wait(), PATIENCE_S)
    except TimeoutError:
        for task in asyncio.all_tasks():
            task.print_stack()
        raise


def url(app: App) -> str:
    return f"http://{app.edge.addresses[0]}"


def left_behind(folder: Path) -> list[orphans.OwnedProcess]:
    """Processes that carry this state directory's identity."""
    identity = folder / "state" / "id"
    return orphans.find(identity.read_text().strip() + ":") if identity.exists() else []


class GatewayProcess:
    """A gateway as its users run it: `greenroom serve` in a process of its own, or of the program `inside`.

    Without a configuration the environment says everything.
    """

    def __init__(
        self, folder: Path, config: Path | None, inside: Sequence[str] = (), words: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.log = folder / "gateway.log"
        command = [*inside, sys.executable, "-m", "greenroom", "serve"]
        command += (
            ["--port", "0", "--state-dir", str(folder / "state")] if config is None else ["--config", str(config)]
        )
        command += words
        with self.log.open("ab") as log:
            self._offset = log.tell()
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"LOG_FORMAT": "json"}
            )
        try:
            self.url = self._wait_for_address()
        except BaseException:
            # Nothing else knows of it yet.
            self.process.kill()
            self.process.wait()
            raise

    def _wait_for_address(self) -> str:
        until_now(lambda: self._address() or self.process.poll() is not None, self.log.read_text)
        address = self._address()
        assert address is not None, f"the gateway ended: {self.log.read_text()[-3000:]}"
        return f"http://{address}"

    def _address(self) -> str | None:
        """Where it says that it serves."""
        for line in self.lines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("event") == "serving":
                    return str(entry["address"])
        return None

    def lines(self) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(self._offset)
            return log.read().decode("utf-8", "replace").splitlines()

    @property
    def port(self) -> int:
        match = re.search(r":(\d+)$", self.url)
        assert match is not None
        return int(match[1])

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any, Any]:
        """Status, headers and JSON of its answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, answer.headers, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, error.headers, json.loads(error.read())

    def kill(self) -> None:
        """kill -9, as no gateway can prepare for."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def stop(self, within_s: float = PATIENCE_S) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(within_s)

    def nothing_left(self, within_s: float = PATIENCE_S) -> bool:
        """True once every engine of this gateway is gone: the keepers may still be at work. Fails if one stays."""
        until_now(lambda: not left_behind(self.folder), "every engine is gone", within_s)
        return True


@contextlib.contextmanager
def gateway_process(
    folder: Path, models: dict[str, Any], *, inside: Sequence[str] = (), **options: Any
) -> Iterator[GatewayProcess]:
    gate = GatewayProcess(folder, write_config(folder, models, **options), inside)
    try:
        yield gate
    finally:
        with contextlib.suppress(ProcessLookupError):
            gate.process.kill()
        gate.process.wait(PATIENCE_S)
        assert gate.nothing_left(), "engines were left behind"
