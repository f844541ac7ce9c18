"""A real worker process and the gateway's end of its control line, for tests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import until_now

PROGRAM = Path(__file__).parents[3] / "src" / "greenroom" / "workers" / "launch.py"
# Importing torch on a loaded machine takes long.
DEADLINE_S = 110.0


class WorkerRig:
    """Starts a worker; every question waits for its answer."""

    def __init__(self, folder: Path, program: str = "transformers", **environment: str) -> None:
        self.folder = folder
        self.path = folder / "control.sock"
        self.progress: list[float] = []
        self._number = 0
        self._log = open(folder / "worker.log", "wb")  # noqa: SIM115
        # No more threads than the machine has to spare while other tests run.
        settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        command = [sys.executable, str(PROGRAM), "torch_host.main", "--program", program]
        command += ["--control", str(self.path)]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=settings, cwd="/")
        self._line = self._connected()
        self._reader = self._line.makefile("rb")

    def ask(self, op: str, files: list[int] | None = None, **fields: Any) -> int:
        """Send a request and give its number."""
        self._number += 1
        line = json.dumps({"id": self._number, "op": op, **fields}).encode() + b"\n"
        if files:
            socket.send_fds(self._line, [line], files)
        else:
            self._line.sendall(line)
        return self._number

    def answer(self, number: int) -> dict[str, Any]:
        while True:
            heard = json.loads(self._reader.readline() or "null")
            assert heard is not None, self.log()
            if heard["id"] != number:
                continue
            if "progress" not in heard:
                return dict(heard)
            self.progress.append(heard["progress"])

    def do(self, op: str, **fields: Any) -> dict[str, Any]:
        heard = self.answer(self.ask(op, **fields))
        assert heard.pop("ok"), (heard, self.log())
        return heard

    def open(self, slot: str, model: Path, memory: int, filled: bool = False, **options: Any) -> dict[str, Any]:
        return self.answer(self.begin_open(slot, model, memory, filled, **options))

    def begin_open(self, slot: str, model: Path, memory: int, filled: bool = False, **options: Any) -> int:
        options = {"context": 256, "cache_tokens": 1024, "batch_max": 4, "device": "cpu", "threads": 1, **options}
        where = {"path": str(model), "socket": str(self.socket(slot))}
        return self.ask("open", [memory], slot=slot, model=f"model-{slot}", filled=filled, options=options, **where)

    def socket(self, slot: str) -> Path:
        return self.folder / f"{slot}.sock"

    def post(self, slot: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        connection = UnixConnection(self.socket(slot))
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        heard = connection.getresponse()
        found = heard.status, json.loads(heard.read())
        connection.close()
        return found

    def complete(self, slot: str, prompt: str = "The quick brown", tokens: int = 12) -> str:
        body = {"model": slot, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        status, found = self.post(slot, "/v1/completions", body)
        assert status == 200, (found, self.log())
        return str(found["choices"][0]["text"])

    def log(self) -> str:
        self._log.flush()
        return (self.folder / "worker.log").read_text(errors="replace")

    def hang_up(self) -> int:
        """Close the line and give the worker's exit code."""
        self._line.shutdown(socket.SHUT_RDWR)
        self._reader.close()
        self._line.close()
        return self.process.wait(DEADLINE_S)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.close()
        self._line.close()
        self._log.close()

    def _connected(self) -> socket.socket:
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(DEADLINE_S)

        def is_connected() -> bool:
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(OSError):
                line.connect(str(self.path))
                return True
            return False

        until_now(is_connected, self.log, DEADLINE_S)
        return line


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("worker", timeout=DEADLINE_S)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(self._path)
