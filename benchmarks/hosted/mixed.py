"""Two minutes of mixed traffic over three models of 8 B, with a training job that takes a share of the GPU in between.

    python -m benchmarks.hosted.mixed --models FOLDER [--python PYTHON] [--seconds 120] [--only asleep|restarts]

The same generated trace is served twice by a gateway with memory for two of the three: once by Greenroom's own worker,
where models sleep in host memory; once by one plain Transformers program per model, which is started and stopped at
every swap. In the middle third a program leases as much as one model takes. How long a request waited before its engine
got it is what the gateway says (X-Queue-Wait-Ms).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import APIError, AsyncOpenAI

from benchmarks.hosted.gateway import HostedGateway, hosted_gateway, hosted_model, hosted_options
from benchmarks.hosted.hardware import Card
from benchmarks.hosted.models import EIGHT, make_models
from benchmarks.rig.gateways import ASK_MAX_S
from benchmarks.rig.processes import gpu_worker_argv
from benchmarks.rig.result import Run

# Callers stay with a model for a while, then turn to another; a share of requests goes to any model.
PER_S, STAYS_S, STRAY_SHARE = 1.5, 12.0, 0.15
TOKENS = (16, 96)
CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    model: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    wait_s: float
    whole_s: float
    error: str | None = None


def trace(seconds: float, seed: int) -> list[Request]:
    draw = random.Random(seed)
    at_s, turns_at_s, model, requests = 0.0, 0.0, EIGHT[0], []
    while (at_s := at_s + draw.expovariate(PER_S)) < seconds:
        if at_s >= turns_at_s:
            model, turns_at_s = draw.choice(EIGHT), at_s + draw.expovariate(1 / STAYS_S)
        asked = draw.choice(EIGHT) if draw.random() < STRAY_SHARE else model
        requests.append(Request(at_s, asked, draw.randint(*TOKENS)))
    return requests


async def play(gateway: HostedGateway, requests: Sequence[Request]) -> list[Served]:
    began = time.perf_counter()
    address = f"http://127.0.0.1:{gateway.port}/v1"
    async with AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=ASK_MAX_S) as client:

        async def one(request: Request) -> Served:
            await asyncio.sleep(max(0.0, began + request.at_s - time.perf_counter()))
            sent = time.perf_counter()
            try:
                answer = await client.completions.with_raw_response.create(
                    model=request.model, prompt="w7 w8 w9 " * 16, max_tokens=request.tokens, temperature=0
                )
            except APIError as error:
                return Served(0.0, time.perf_counter() - sent, repr(error))
            wait_s = int(answer.headers.get("x-queue-wait-ms", "0")) / 1000
            return Served(wait_s, time.perf_counter() - sent)

        return await asyncio.gather(*map(one, requests))


async def play_with_job(
    gateway: HostedGateway, seconds: float, requests: Sequence[Request], share_mib: int
) -> dict[str, Any]:
    """The trace, and the training job in its middle third."""
    playing = asyncio.create_task(play(gateway, requests))
    await asyncio.sleep(seconds / 3)
    asked = time.perf_counter()
    with contextlib.ExitStack() as job:
        await asyncio.to_thread(job.enter_context, gateway.lease(share_mib, wait_s=seconds))
        granted_s = time.perf_counter() - asked
        await asyncio.sleep(seconds / 3)
        await asyncio.to_thread(job.pop_all().close)
    served = await playing
    waits = sorted(one.wait_s for one in served)
    failed = [one.error for one in served if one.error]
    return {
        "requests": len(served),
        "failed": len(failed),
        "first_failure": failed[0] if failed else None,
        "lease_granted_s": granted_s,
        "mean_wait_s": statistics.fmean(waits),
        "p50_wait_s": waits[len(waits) // 2],
        "p95_wait_s": waits[int(len(waits) * 0.95)],
        "worst_wait_s": waits[-1],
        "p95_whole_s": sorted(one.whole_s for one in served)[int(len(served) * 0.95)],
    }


def restarted(folder: Path, python: str, memory_mib: int) -> dict[str, Any]:
    """A plain program for one model: weights are loaded at its start; one caller at a time."""
    cmd = gpu_worker_argv(python, folder, CONTEXT)
    return {"cmd": cmd, "memory_mib": memory_mib, "concurrency": 1, "env": {"HF_HUB_OFFLINE": "1"}}


def measure(kind: str, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    if kind == "asleep":
        models = {name: hosted_model(args.models / name, args.python, ctx_size=CONTEXT) for name in EIGHT}
    else:
        models = {name: restarted(args.models / name, args.python, 20_000) for name in EIGHT}
    with hosted_gateway(scratch / kind, models) as gateway:
        if kind == "asleep":
            for name in EIGHT:
                gateway.order(name, "prepare")
        gateway.order(EIGHT[0], "load")
        gateway.order(EIGHT[0], "sleep" if kind == "asleep" else "unload")
        need_mib = gateway.need_mib(EIGHT[0])
        with gateway.lease(gateway.free_mib() - int(2.2 * need_mib)):
            figures = asyncio.run(play_with_job(gateway, args.seconds, trace(args.seconds, 7), need_mib))
    print(f"{kind}: {json.dumps(figures)}", flush=True)
    return figures


def main() -> None:
    parser = hosted_options(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--only", choices=("asleep", "restarts"))
    args = parser.parse_args()
    run = Run("mixed_gpu", args, Card().name)
    make_models(args.python, args.models, *EIGHT)
    print(f"{args.seconds:g} s of traffic, {len(trace(args.seconds, 7))} requests", flush=True)
    kinds = (args.only,) if args.only else ("asleep", "restarts")
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as scratch:
        figures = {kind: measure(kind, args, Path(scratch)) for kind in kinds}
    met = {kind: not one["failed"] for kind, one in figures.items() if kind == "asleep"}
    if len(kinds) == 2:
        ratio = figures["restarts"]["p95_wait_s"] / max(figures["asleep"]["p95_wait_s"], 0.001)
        print(f"p95 wait with restarts is {ratio:.0f} times that with sleep")
        met["shorter waits"] = ratio > 1
    run.report(figures, {"failed": 0}, all(met.values()))


if __name__ == "__main__":
    main()
