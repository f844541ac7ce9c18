"""The gateway of `estimates`: models as commands, no memory declared, asked over HTTP.

The gateway finds out itself how much memory a model needs; only the two holders, which stand for larger models, declare
it.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.memory.models import Configuration
from benchmarks.rig.gateways import Gateway, gateway
from benchmarks.rig.processes import gpu_worker_argv

NEW_TOKENS = 8
# Two of these leave room for the largest model, but not for it and the undeclared process.
HOLDERS = ("holder-a", "holder-b")
HOLDER_SHAPE, HOLDER_CONTEXT = "llama-0.1b-f32", 2048


@dataclass(frozen=True, slots=True)
class Answer:
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


class MemoryGateway(Gateway):
    def complete(self, model: str, prompt_tokens: int) -> Answer:
        """A completion, which loads the model if it has to."""
        body = {"model": model, "prompt": "ab" * (prompt_tokens // 2), "max_tokens": NEW_TOKENS}
        worker = self.ask("/v1/completions", body)["worker"]
        return Answer(worker["pid"], worker["memory_mib"])

    def fill(self, served: Configuration) -> Answer:
        """A completion whose prompt takes the whole context."""
        return self.complete(served.id, served.context - NEW_TOKENS)

    def unload(self, model: str) -> None:
        self.order(model, "unload")

    def evicted_for(self, model: str) -> list[str] | None:
        """The models that a load of this one would evict now; None if it could not be loaded at all."""
        plan = self.ask("/api/v1/explain", {"model": model})
        return [one["model"] for one in plan["evict"]] if plan["action"] == "swap" else None

    def ready(self) -> list[str]:
        return [model for model, tier in self.tiers().items() if tier == "ready"]

    def claims_mib(self) -> dict[str, int]:
        """What each model was given on the first GPU when its load was planned."""
        return {one["model"]: one["claim_mib"] for one in self.gpu()["holders"]}

    def foreign_mib(self) -> int:
        """What undeclared processes use, by the scheduler's books. Asking starts no probe."""
        mib: int = self.ask("/api/v1/status")["gpus"][0]["foreign_mib"]
        return mib

    def figure(self, model: str) -> Figure:
        estimate = self.estimate(model)
        parts = {one["part"]: one["gpu_mib"] for one in estimate["estimate"]["parts"]}
        need = estimate["need"]
        return Figure(need["gpu_mib"], need["host_mib"], need["source"], parts)


@contextlib.contextmanager
def memory_gateway(
    home: Path, folders: Path, python: str, served: Sequence[Configuration], holder_mib: int
) -> Iterator[MemoryGateway]:
    """The gateway, with its state in `home`: started again there, it remembers."""
    models: dict[str, dict[str, Any]] = {
        one.id: {"cmd": gpu_worker_argv(python, folders / one.shape, one.context)} for one in served
    }
    spare = ("--spare-mib", str(holder_mib - 2048))
    holder = gpu_worker_argv(python, folders / HOLDER_SHAPE, HOLDER_CONTEXT, *spare)
    models |= {name: {"cmd": holder, "memory_mib": holder_mib} for name in HOLDERS}
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    models = {name: {**model, "env": quiet} for name, model in models.items()}
    with gateway(models, home=home, memory={"probe": "nvml"}) as found:
        yield MemoryGateway(found.port, found.pid, found.config)


@contextlib.contextmanager
def undeclared_process(python: str, mib: int) -> Iterator[int]:
    """A process that the gateway does not know and that takes so much of the GPU; gives its pid once it has it."""
    script = f"import torch; kept = torch.empty({mib} << 20, dtype=torch.uint8, device='cuda'); print(1, flush=True)"
    process = subprocess.Popen([python, "-c", f"{script}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit("the undeclared process got no memory")
        yield process.pid
    finally:
        process.kill()
        process.wait()
