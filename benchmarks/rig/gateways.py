"""The gateway as users run it: started with a configuration, asked over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.rig.processes import free_port, running

# A first load reads up to 16 GB and imports torch; then the longest prompt is read.
ASK_MAX_S = 300.0


class Gateway:
    """A running gateway. An error answer ends the benchmark."""

    def __init__(self, port: int, pid: int, config: Path) -> None:
        self.port, self.pid, self.config = port, pid, config

    def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """GET, or POST where there is a body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ASK_MAX_S)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status >= 300:
            raise SystemExit(f"{path} {(body or {}).get('model', '')}: {response.status} {answer[:2000].decode()}")
        return answer

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.fetch(path, body))
        return answer

    def order(self, model: str, verb: str) -> float:
        """Have a model load, sleep, prepare or unload; gives the seconds that the gateway says it took."""
        took_s: float = self.ask(f"/api/v1/models/{model}/{verb}", {})["took_s"]
        return took_s

    def gpu(self) -> dict[str, Any]:
        """The first GPU, probed now."""
        gpu: dict[str, Any] = self.ask("/api/v1/gpus")["gpus"][0]
        return gpu

    def tiers(self) -> dict[str, str]:
        return {model["id"]: model["tier"] for model in self.ask("/api/v1/status")["models"]}

    def estimate(self, model: str) -> dict[str, Any]:
        """What `greenroom estimate` tells an operator."""
        argv = [sys.executable, "-m", "greenroom", "estimate", model, "--config", str(self.config), "--json"]
        estimate: dict[str, Any] = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)
        return estimate


@contextlib.contextmanager
def gateway(
    models: Mapping[str, Mapping[str, Any]],
    *,
    home: Path | None = None,
    python: str = sys.executable,
    server: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Iterator[Gateway]:
    """A gateway with these models and sections of its configuration. One that is started again in `home` has the state
    of the one before."""
    with contextlib.ExitStack() as stack:
        if home is None:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="greenroom-bench-")))
        home.mkdir(parents=True, exist_ok=True)
        port, path = free_port(), home / "greenroom.yaml"
        config = {
            "server": {"port": port, **(server or {})},
            "log": {"level": "warning"},
            "state_dir": str(home / "state"),
            "models": models,
            **sections,
        }
        # JSON is YAML.
        path.write_text(json.dumps(config))
        argv = [python, "-m", "greenroom", "serve", "--config", str(path)]
        yield Gateway(port, stack.enter_context(running(argv, port)), path)


def build_of(python: str) -> str:
    """The build that this interpreter runs: pure or compiled."""
    argv = [python, "-c", "from greenroom.api.reports.snapshot import BUILD; print(BUILD)"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
