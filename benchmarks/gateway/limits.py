"""What limits and the counting of usage add to the cost of a request, beside gateways without them in one run.

CPU microseconds per request and per streamed chunk, as in `gateway.cost`, of three gateways. `all`: the key, its
tenant and the model each have a limit on requests, on tokens and on requests at once, so that every check is made, and
usage is kept. `key`: a key is asked for, as in `gateway.cost`, and nothing else; the goals are ratios to this. `none`:
not even that.

    python -m benchmarks.gateway.limits [--compiled PYTHON] [--rounds 5] [--requests 20000]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from benchmarks.gateway.cost import CHUNK_S, CHUNKS, KEY
from benchmarks.rig.gateways import build_of, gateway
from benchmarks.rig.processes import engine_argv, leave_last_core
from benchmarks.rig.result import Run, options_of
from benchmarks.rig.traffic import Side, compare

GOALS = {"request_ratio_max": 1.10, "chunk_ratio_max": 1.10}
# Never reached.
LIMITS = {"requests_per_minute": 1_000_000_000, "tokens_per_minute": 1_000_000_000, "concurrent_max": 1_000_000}
MODEL = {
    "cmd": engine_argv("${PORT}", chunks=CHUNKS, chunk_s=CHUNK_S),
    "memory_mib": 100,
    "concurrency": 512,
    "preload": True,
}
NONE: dict[str, Any] = {"models": {"mock": MODEL}, "server": {"usage_days": 0}}
JUST_KEY: dict[str, Any] = {
    "models": {"mock": MODEL},
    "server": {"usage_days": 0, "api_keys": [{"name": "bench", "key": KEY}]},
}
ALL: dict[str, Any] = {
    "models": {"mock": {**MODEL, "limits": LIMITS}},
    "server": {"api_keys": [{"name": "bench", "key": KEY, "tenant": "lab", "limits": LIMITS, "admin": True}]},
    "tenants": {"lab": LIMITS},
}


def figures_of(python: str, options: argparse.Namespace) -> dict[str, Any]:
    leave_last_core()
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, config in (("none", NONE), ("key", JUST_KEY), ("all", ALL)):
            own = stack.enter_context(gateway(python=python, **config))
            sides[name] = Side(own.port, own.pid)
        figures = compare(sides, options.rounds, requests=options.requests, streams=options.streams)
    for name in ("request", "chunk"):
        figures[f"{name}_ratio"] = round(figures["all"][f"{name}_us"] / figures["key"][f"{name}_us"], 3)
    return figures


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--compiled", metavar="PYTHON", help="the interpreter that has the compiled build")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--streams", type=int, default=100)
    options = parser.parse_args()
    run = Run("gateway_limits", options)
    builds = {}
    for python in filter(None, (sys.executable, options.compiled)):
        build = build_of(python)
        print(f"build: {build}", flush=True)
        builds[build] = seen = figures_of(python, options)
        print(build, {name: seen[name] for name in ("request_ratio", "chunk_ratio")}, flush=True)
    met = all(seen[name.removesuffix("_max")] <= most for seen in builds.values() for name, most in GOALS.items())
    run.report(builds, GOALS, met)


if __name__ == "__main__":
    main()
