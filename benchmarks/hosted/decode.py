"""How fast a model of 8 B decodes through the gateway: 1, 8, 32 and 128 callers, beside plain eager `generate`.

    python -m benchmarks.hosted.decode --models FOLDER [--python PYTHON]

The single caller streams with the OpenAI client; many callers ask for whole answers, so that the engine is measured and
not the client. `generate` runs in a process of its own before, with the same model and batch sizes. After
a sleep and a wake one caller is timed again. Then two models answer eight callers each at the same time: in one
process, and in two (`isolate`).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.hosted.gateway import PROMPT, HostedGateway, hosted_gateway, hosted_model, hosted_options
from benchmarks.hosted.hardware import Card, program
from benchmarks.hosted.models import EIGHT, make_models, weight_bytes
from benchmarks.rig.result import Run

CALLERS = (1, 8, 32, 128)
ONE_PER_S, MANY_RATIO, AFTER_WAKE = 120.0, 8.0, 0.97
# Two models that decode at once in one process, against two processes.
TOGETHER = 0.9
TOKENS = 256
SETTINGS = {"concurrency": 128, "ctx_size": 2048, "cache_tokens": 128 * 512}
# The bandwidth of the H200's memory; weights are read once a token.
MEMORY_BYTES_S = 4.8e12
_EAGER = """
import sys, time, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto", device_map="cuda")
for batch in map(int, sys.argv[3:]):
    ids = torch.arange(64, device="cuda").repeat(batch, 1)
    ask = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
    model.generate(ids, max_new_tokens=4, **ask)
    torch.cuda.synchronize(); began = time.perf_counter()
    out = model.generate(ids, max_new_tokens=int(sys.argv[2]), **ask)
    torch.cuda.synchronize()
    print(batch * (out.shape[1] - 64) / (time.perf_counter() - began))
"""


def one_caller(gateway: HostedGateway, model: str) -> float:
    """Tokens a second after the first."""
    answers = [gateway.stream(model, TOKENS, f"w{number} {PROMPT}") for number in range(4)]
    return statistics.median((one.tokens - 1) / (one.whole_s - one.first_s) for one in answers)


def many_callers(gateway: HostedGateway, model: str, callers: int) -> float:
    """Tokens a second of all callers, from the first request to the last answer."""
    prompts = [f"w{1000 + number} {PROMPT}" for number in range(callers)]
    with ThreadPoolExecutor(callers) as pool:
        began = time.perf_counter()
        tokens = sum(pool.map(lambda prompt: gateway.complete(model, TOKENS, prompt), prompts))
        return tokens / (time.perf_counter() - began)


def main() -> None:
    args = hosted_options(__doc__).parse_args()
    run, folder = Run("decode_gpu", args, Card().name), args.models / EIGHT[0]
    make_models(args.python, args.models, *EIGHT[:2])
    print(f"{weight_bytes(folder) / 1e9:.1f} GB of weights", flush=True)
    printed = program(args.python, _EAGER, str(folder), "64", *map(str, CALLERS))[1]
    eager = dict(zip(CALLERS, map(float, printed.split()), strict=True))
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as scratch:
        models = {model: hosted_model(args.models / model, args.python, **SETTINGS) for model in EIGHT[:2]}
        with hosted_gateway(Path(scratch) / "one", models) as gateway:
            gateway.stream(EIGHT[0], 8)
            ours = {callers: _rate(gateway, EIGHT[0], callers) for callers in CALLERS}
            gateway.order(EIGHT[0], "sleep")
            gateway.stream(EIGHT[0], 8)
            again = one_caller(gateway, EIGHT[0])
            in_one = together(gateway)
        apart = {model: {**settings, "isolate": True} for model, settings in models.items()}
        with hosted_gateway(Path(scratch) / "two", apart) as gateway:
            in_two = together(gateway)
    report(run, eager, ours, again, (in_one, in_two), MEMORY_BYTES_S / weight_bytes(folder))


def together(gateway: HostedGateway) -> float:
    """Tokens a second of two models that decode at the same time."""
    for model in EIGHT[:2]:
        many_callers(gateway, model, 8)
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda model: many_callers(gateway, model, 8), EIGHT[:2]))


def _rate(gateway: HostedGateway, model: str, callers: int) -> float:
    if callers == 1:
        return one_caller(gateway, model)
    # The first run captures graphs of these sizes.
    many_callers(gateway, model, callers)
    return max(many_callers(gateway, model, callers) for _ in range(2))


def report(
    run: Run, eager: dict[int, float], ours: dict[int, float], again: float, pair: tuple[float, float], bound: float
) -> None:
    print(f"\n{'callers':>8}{'eager generate':>16}{'through the gateway':>21}{'ratio':>8}   tokens/s")
    for callers in CALLERS:
        print(f"{callers:>8}{eager[callers]:>16,.0f}{ours[callers]:>21,.0f}{ours[callers] / eager[callers]:>8.1f}")
    print(f"one caller after sleep and wake {again:,.0f}; the memory's rate would allow {bound:,.0f}")
    in_one, in_two = pair
    print(f"two models at once: {in_one:,.0f} in one process, {in_two:,.0f} in two")
    met = {
        "one stream": ours[1] >= ONE_PER_S,
        "32 callers": ours[32] >= MANY_RATIO * ours[1],
        "together": in_one >= TOGETHER * in_two,
        "after wake": again >= AFTER_WAKE * ours[1],
    }
    figures = {
        "eager_per_s": eager,
        "per_s": ours,
        "after_wake_per_s": again,
        "bandwidth_bound_per_s": bound,
        "two_models_per_s": {"one process": in_one, "two processes": in_two},
        "ratio_32": ours[32] / ours[1],
        "goals_met": met,
    }
    goals = {"one_per_s": ONE_PER_S, "ratio_32": MANY_RATIO, "after_wake": AFTER_WAKE, "together": TOGETHER}
    run.report(figures, goals, all(met.values()))


if __name__ == "__main__":
    main()
