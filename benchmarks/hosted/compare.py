"""Whether hosted models got slower since another version of Greenroom: both in turns, on one machine, in one run.

    python -m benchmarks.hosted.compare --models FOLDER --other PYTHON [--rounds 2]

`--other` is an interpreter with the other version and what that needs. For each version in each round a gateway is
started with a model of 8 B, which is asked while it is ready, put to sleep and asked again, and asked by 1 and by 32
callers for whole answers. Ratios are those of the medians of all rounds.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.hosted.gateway import HostedGateway, hosted_gateway, hosted_model, hosted_options
from benchmarks.hosted.hardware import Card
from benchmarks.hosted.models import EIGHT, make_models
from benchmarks.rig.result import Run

MODEL = EIGHT[0]
SETTINGS = {"concurrency": 32, "ctx_size": 2048, "cache_tokens": 32 * 512}
READY_ASKED, WAKES, CALLERS, TOKENS = 30, 8, 32, 256
# Times may grow and rates may fall by this share.
WITHIN = 0.03
TIMES = ("ready_s", "wake_s")


def seen(gateway: HostedGateway) -> dict[str, float]:
    for _ in range(5):
        gateway.stream(MODEL)
    ready = [gateway.stream(MODEL).first_s for _ in range(READY_ASKED)]
    alone = [gateway.stream(MODEL, TOKENS) for _ in range(3)]
    with ThreadPoolExecutor(CALLERS) as callers:
        began = time.perf_counter()
        tokens = sum(callers.map(lambda _: gateway.complete(MODEL, TOKENS), range(2 * CALLERS)))
        many = tokens / (time.perf_counter() - began)
    wakes = []
    for _ in range(WAKES):
        gateway.order(MODEL, "sleep")
        wakes.append(gateway.stream(MODEL).first_s)
    return {
        "ready_s": statistics.median(ready),
        "wake_s": statistics.median(wakes),
        "one_per_s": statistics.median((TOKENS - 1) / (one.whole_s - one.first_s) for one in alone),
        "many_per_s": many,
    }


def main() -> None:
    parser = hosted_options(__doc__)
    parser.add_argument("--other", required=True, help="an interpreter with the version to compare with")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    run = Run("hosted_compare", args, Card().name)
    make_models(args.python, args.models, MODEL)
    model = hosted_model(args.models / MODEL, args.python, **SETTINGS)
    rounds: dict[str, dict[str, list[float]]] = {"this": defaultdict(list), "other": defaultdict(list)}
    for number in range(args.rounds):
        for version, python in (("other", args.other), ("this", sys.executable)):
            with (
                tempfile.TemporaryDirectory(prefix="greenroom-bench-") as scratch,
                hosted_gateway(Path(scratch), {MODEL: model}, interpreter=python) as gateway,
            ):
                figures = seen(gateway)
            print(
                f"round {number + 1} {version:6}",
                {name: round(value, 4) for name, value in figures.items()},
                flush=True,
            )
            for name, value in figures.items():
                rounds[version][name].append(value)
    this, other = ({name: statistics.median(of) for name, of in rounds[side].items()} for side in ("this", "other"))
    ratios = {name: this[name] / other[name] for name in this}
    worst = max(ratio if name in TIMES else 1 / ratio for name, ratio in ratios.items())
    run.report({"this": this, "other": other, "ratios": ratios}, {"within": WITHIN}, worst <= 1 + WITHIN)


if __name__ == "__main__":
    main()
