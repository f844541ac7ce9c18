"""The gateway of the GPU benchmarks, as users run it: Transformers models, asked with the OpenAI client.

Owns its configuration, its words and the plain programs it is compared with. What it measures is what a caller sees:
the time from sending a request to the first word of its answer. Imports no torch: the benchmark holds no GPU memory.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from openai import OpenAI

import greenroom
from benchmarks import rig

MIB: Final = 1 << 20
PROMPT: Final = " ".join(f"w{100 + 7 * number}" for number in range(64))


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer as it arrived: when its first word came, when it ended, how many tokens it has, and what it says."""

    first_s: float
    whole_s: float
    tokens: int
    text: str


class Stage:
    def __init__(self, port: int, config: Path) -> None:
        self.port, self._config = port, config
        self.client = OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=rig.ASK_MAX_S
        )

    def hear(self, model: str, tokens: int = 1, prompt: str = PROMPT) -> Heard:
        """A streamed chat answer, timed from before the request is sent."""
        began, first, parts, used = time.perf_counter(), 0.0, [], 0
        stream = self.client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.usage is not None:
                used = chunk.usage.completion_tokens
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.perf_counter()
                parts.append(chunk.choices[0].delta.content)
        return Heard((first or time.perf_counter()) - began, time.perf_counter() - began, used, "".join(parts))

    def say(self, model: str, tokens: int, prompt: str = PROMPT) -> int:
        """A chat answer in one piece; how many tokens it has."""
        answer = self.client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt}], max_tokens=tokens, temperature=0
        )
        return answer.usage.completion_tokens if answer.usage else 0

    def logits(self, model: str) -> str:
        """What a model finds likeliest, token by token with its figures: equal texts are equal numbers."""
        answer = self.client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=8,
            temperature=0,
            logprobs=True,
            top_logprobs=8,
        )
        return "" if answer.choices[0].logprobs is None else answer.choices[0].logprobs.model_dump_json()

    def order(self, model: str, verb: str) -> float:
        """Have a model sleep, prepare, load or unload; how long the gateway says that it took."""
        took_s: float = self.ask(f"/api/v1/models/{model}/{verb}", {})["took_s"]
        return took_s

    def tiers(self) -> dict[str, str]:
        return {model["id"]: model["tier"] for model in self.ask("/api/v1/status")["models"]}

    def free_mib(self) -> int:
        mib: int = self.ask("/api/v1/gpus")["gpus"][0]["free_mib"]
        return mib

    def need_mib(self, model: str) -> int:
        mib: int = rig.estimate(model, self._config)["need"]["gpu_mib"]
        return mib

    def lease(self, mib: int, *, wait_s: float = 60.0) -> contextlib.AbstractContextManager[Any]:
        """Memory of the GPU for something else, for as long as the block runs."""
        return greenroom.lease(mib, name="training", wait_s=wait_s, url=f"http://127.0.0.1:{self.port}")

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return rig.ask(self.port, path, body)


@contextlib.contextmanager
def stage(home: Path, models: Mapping[str, Mapping[str, Any]], *, probe: str = "nvml") -> Iterator[Stage]:
    """A gateway with these models, its state in `home`."""
    with rig.gateway(home, {name: {"ttl_s": 0, **model} for name, model in models.items()}, probe=probe) as found:
        yield Stage(*found)


def hosted(folder: Path, python: str, **more: Any) -> dict[str, Any]:
    """A model as Greenroom's own worker runs it."""
    return {"engine": "transformers", "path": str(folder), "python": python, "env": {"HF_HUB_OFFLINE": "1"}, **more}


# --- plain programs it is compared with -----------------------------------------------------------------------------

_FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto", device_map=sys.argv[2])
ids = torch.arange(64, device=sys.argv[2])[None]
print(model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)[0, -1].item(), flush=True)
"""
_WIRE = """
import time, torch
host = torch.zeros(4 << 30, dtype=torch.uint8)
torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0)
gpu, rates = torch.empty_like(host, device="cuda"), []
for _ in range(8):
    torch.cuda.synchronize(); began = time.perf_counter()
    gpu.copy_(host, non_blocking=True); torch.cuda.synchronize()
    rates.append(host.numel() / (time.perf_counter() - began))
print(sorted(rates)[len(rates) // 2])
"""


def program(python: str, script: str, *arguments: str) -> tuple[float, str]:
    """How long a plain Python program takes from its start to its end, and what it prints."""
    began = time.perf_counter()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-c", script, *arguments], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"a plain program failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - began, done.stdout.strip()


def fresh_process_s(python: str, folder: Path, device: str) -> float:
    """From nothing to the first token in a process of its own, as restarts do it. Its file is in the page cache."""
    return program(python, _FRESH, str(folder), device)[0]


def wire_rate(python: str) -> float:
    """Bytes a second from registered host memory to the GPU, in one piece: what copying cannot beat."""
    return float(program(python, _WIRE)[1])
