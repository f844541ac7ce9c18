"""The gateway of `estimates.py`, as users run it: models as commands, nothing declared, asked over HTTP.

Owns the configuration and the words of its API. What the gateway needs to know of a model's memory it finds out itself;
only the models that stand for larger ones say what they take.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import rig
from benchmarks.memory.models import Configuration

NEW_TOKENS = 8
# Two of these leave room for the largest model, but not for it and a stranger.
HOLDERS = ("holder-a", "holder-b")
HOLDER_SHAPE, HOLDER_CONTEXT = "llama-0.1b-f32", 2048


@dataclass(frozen=True, slots=True)
class Spoken:
    """An answer of a model: which process gave it, and what torch says it holds."""

    pid: int
    memory_mib: dict[str, float]


@dataclass(frozen=True, slots=True)
class Figure:
    """What is known of a model before it is loaded: what to plan with, where that comes from, the estimate's parts."""

    gpu_mib: int
    host_mib: int
    source: str
    parts: dict[str, int]


class House:
    def __init__(self, port: int, config: Path) -> None:
        self._port, self._config = port, config

    def speak(self, model: str, prompt_tokens: int) -> Spoken:
        """A completion, which loads the model if it has to."""
        body = {"model": model, "prompt": "ab" * (prompt_tokens // 2), "max_tokens": NEW_TOKENS}
        worker = self._ask("/v1/completions", body)["worker"]
        return Spoken(worker["pid"], worker["memory_mib"])

    def fill(self, served: Configuration) -> Spoken:
        """A completion whose prompt takes the whole context."""
        return self.speak(served.id, served.context - NEW_TOKENS)

    def unload(self, model: str) -> None:
        self._ask(f"/api/v1/models/{model}/unload", {})

    def gpu(self) -> dict[str, Any]:
        """The first GPU, looked at now."""
        gpu: dict[str, Any] = self.gpus()["gpus"][0]
        return gpu

    def gpus(self) -> dict[str, Any]:
        return self._ask("/api/v1/gpus")

    def evicted_for(self, model: str) -> list[str] | None:
        """Who would leave if this model were asked for now; None if it could not be brought at all."""
        said = self._ask("/api/v1/explain", {"model": model})
        return [one["model"] for one in said["evict"]] if said["action"] == "swap" else None

    def ready(self) -> list[str]:
        return [model["id"] for model in self._models() if model["tier"] == "ready"]

    def claims_mib(self) -> dict[str, int]:
        """What each model was given on the first GPU when its load was planned."""
        return {one["model"]: one["claim_mib"] for one in self.gpu()["holders"]}

    def foreign_mib(self) -> int:
        """What processes that nobody declared use, by the scheduler's books. Asking makes nobody look."""
        mib: int = self._ask("/api/v1/status")["gpus"][0]["foreign_mib"]
        return mib

    def figure(self, model: str) -> Figure:
        """As `greenroom estimate` tells it to an operator."""
        said = rig.estimate(model, self._config)
        parts = {one["part"]: one["gpu_mib"] for one in said["estimate"]["parts"]}
        need = said["need"]
        return Figure(need["gpu_mib"], need["host_mib"], need["source"], parts)

    def _models(self) -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = self._ask("/api/v1/status")["models"]
        return models

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return rig.ask(self._port, path, body)


@contextlib.contextmanager
def house(home: Path, folders: Path, python: str, served: Sequence[Configuration], holder_mib: int) -> Iterator[House]:
    """The gateway, with its state in `home`: started again there, it remembers."""
    models: dict[str, dict[str, Any]] = {
        one.id: {"cmd": _worker(python, folders / one.shape, one.context)} for one in served
    }
    holder = _worker(python, folders / HOLDER_SHAPE, HOLDER_CONTEXT, "--spare-mib", str(holder_mib - 2048))
    models |= {name: {"cmd": holder, "memory_mib": holder_mib} for name in HOLDERS}
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    with rig.gateway(home, {name: {**model, "env": quiet} for name, model in models.items()}) as (port, config):
        yield House(port, config)


def _worker(python: str, folder: Path, context: int, *more: str) -> list[str]:
    said = ["--model", str(folder), "--ctx-size", str(context), *more, "--port", "${PORT}"]
    return [python, str(rig.HERE / "gpu_worker.py"), *said]


@contextlib.contextmanager
def stranger(python: str, mib: int) -> Iterator[int]:
    """A process that nobody declared and that takes so much of the GPU; gives its pid once it has it."""
    script = f"import torch; kept = torch.empty({mib} << 20, dtype=torch.uint8, device='cuda'); print(1, flush=True)"
    process = subprocess.Popen([python, "-c", f"{script}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit("the stranger got no memory")
        yield process.pid
    finally:
        process.kill()
        process.wait()
