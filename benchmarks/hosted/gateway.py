"""The gateway of the benchmarks of hosted models: Transformers models, asked with the OpenAI client.

What it measures is what a caller sees: the time from sending a request to the first word of its answer. Imports no
torch: the benchmark itself holds no GPU memory.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from openai import OpenAI

import greenroom
from benchmarks.rig.gateways import ASK_MAX_S, Gateway, gateway
from benchmarks.rig.result import options_of

PROMPT: Final = " ".join(f"w{100 + 7 * number}" for number in range(64))


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer: when its first word came, when it ended, how many tokens it has, and its text."""

    first_s: float
    whole_s: float
    tokens: int
    text: str


class HostedGateway(Gateway):
    def __init__(self, port: int, pid: int, config: Path) -> None:
        super().__init__(port, pid, config)
        self.client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=ASK_MAX_S)

    def stream(self, model: str, tokens: int = 1, prompt: str = PROMPT) -> Answer:
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
        return Answer((first or time.perf_counter()) - began, time.perf_counter() - began, used, "".join(parts))

    def complete(self, model: str, tokens: int, prompt: str = PROMPT) -> int:
        """A chat answer in one piece; how many tokens it has."""
        answer = self.client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt}], max_tokens=tokens, temperature=0
        )
        return answer.usage.completion_tokens if answer.usage else 0

    def logits(self, model: str) -> str:
        """The likeliest tokens of an answer with their log probabilities: equal texts are equal numbers."""
        answer = self.client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=8,
            temperature=0,
            logprobs=True,
            top_logprobs=8,
        )
        return "" if answer.choices[0].logprobs is None else answer.choices[0].logprobs.model_dump_json()

    def free_mib(self) -> int:
        mib: int = self.gpu()["free_mib"]
        return mib

    def need_mib(self, model: str) -> int:
        mib: int = self.estimate(model)["need"]["gpu_mib"]
        return mib

    def lease(self, mib: int, *, wait_s: float = 60.0) -> contextlib.AbstractContextManager[Any]:
        """Memory of the GPU for something else, for as long as the block runs."""
        return greenroom.lease(mib, name="training", wait_s=wait_s, url=f"http://127.0.0.1:{self.port}")


@contextlib.contextmanager
def hosted_gateway(
    home: Path, models: Mapping[str, Mapping[str, Any]], *, interpreter: str = sys.executable, **sections: Any
) -> Iterator[HostedGateway]:
    """A gateway with these models and sections of its configuration, its state in `home`."""
    models = {name: {"ttl_s": 0, **model} for name, model in models.items()}
    with gateway(models, home=home, python=interpreter, memory={"probe": "nvml"}, **sections) as found:
        yield HostedGateway(found.port, found.pid, found.config)


def hosted_options(description: str | None) -> argparse.ArgumentParser:
    parser = options_of(description)
    parser.add_argument("--models", type=Path, required=True, help="where the models are kept")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch and Transformers")
    return parser


def hosted_model(folder: Path, python: str, **more: Any) -> dict[str, Any]:
    """A model as Greenroom's own worker runs it."""
    return {"engine": "transformers", "path": str(folder), "python": python, "env": {"HF_HUB_OFFLINE": "1"}, **more}
