"""Runs the program as its users do: an order in, reports out."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import greenroom
from tests.standins.standin_hub import StandinHub
from tests.waiting import PATIENCE_S

LAUNCH = Path(greenroom.__file__).parent / "workers" / "launch.py"


def environment(hub: StandinHub, home: Path, token: str | None = None) -> dict[str, str]:
    """What the program sees: this hub, and nothing of the user's own."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    ours |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
    return ours if token is None else ours | {"HF_TOKEN": token}


class Fetcher:
    def __init__(
        self, hub: StandinHub, home: Path, *, token: str | None = None, memory_max: int | None = None, **order: Any
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(LAUNCH), "fetching.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(hub, home, token),
        )
        if memory_max is not None:
            # Before it has its order.
            resource.prlimit(self.process.pid, resource.RLIMIT_AS, (memory_max, memory_max))
        asked = {"include": [], "exclude": [], "stall_s": 5.0, "backoff_s": 0.01, **order}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        self.process.stdin.flush()

    def reports(self) -> list[dict[str, Any]]:
        """All it says until it ends."""
        assert self.process.stdout is not None
        lines = self.process.stdout.readlines()
        self.close()
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def fetch(hub: StandinHub, home: Path, **order: Any) -> list[dict[str, Any]]:
    return Fetcher(hub, home, **order).reports()
