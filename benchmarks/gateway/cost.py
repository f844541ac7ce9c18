"""What the gateway costs, with everything on, beside nginx and a direct call in the same run.

CPU microseconds per request (keep-alive, 16 at a time) and per streamed chunk (100 parallel streams, a chunk every
20 ms), the time it adds to a lone request, and its memory over many requests. CPU is read from /proc, so other load on
the machine matters little. Gateway and nginx each have the last core to themselves; engines and callers share the
others. Everything is on: an API key, metrics, activity, priorities, the scheduler.

The build that this interpreter has is measured, and beside it the compiled one when its interpreter is given; the goals
are then for the compiled one. Each interpreter says itself which build it has.

    make bench        or        python -m benchmarks.gateway.cost [--compiled PYTHON] [--rounds 3] [--requests 20000]
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import sys
from typing import Any

from benchmarks.rig.gateways import build_of, gateway
from benchmarks.rig.processes import engine_argv, free_port, leave_last_core, memory_mib, running
from benchmarks.rig.result import Run, options_of
from benchmarks.rig.traffic import Side, compare, cost_ratios, load, nginx

# CPU per request and per chunk in units of nginx's. On arm64 an interpreter is slower by more than nginx is.
_RATIOS = {"aarch64": (5.0, 1.8), "x86_64": (3.2, 1.35)}
_REQUEST, _CHUNK = _RATIOS.get(platform.machine(), _RATIOS["x86_64"])
GOALS = {
    "request_ratio_max": _REQUEST,
    "chunk_ratio_max": _CHUNK,
    "added_p50_ratio_max": 2.5,
    "memory_growth_mib_max": 8.0,
}
CHUNKS, CHUNK_S = 150, 0.02
# The load generator presents this key.
KEY = "none"


def memory_growth(port: int, pid: int, requests: int) -> dict[str, float]:
    """Memory after a tenth of the requests, when everything has its size, and after all of them."""
    load("requests", port, concurrency=16, count=requests // 10)
    early = memory_mib(pid)
    load("requests", port, concurrency=16, count=requests - requests // 10)
    late = memory_mib(pid)
    return {"requests": requests, "early_mib": round(early, 1), "late_mib": round(late, 1)}


def figures_of(pythons: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """`pythons` are the interpreters of the builds, by the builds' names. The last one's memory is watched too."""
    leave_last_core()
    engine_port, nginx_port = free_port(), free_port()
    # The gateway starts an engine of its own.
    model = {"cmd": _engine("${PORT}"), "memory_mib": 100, "concurrency": 512, "preload": True}
    keys = {"api_keys": [{"name": "bench", "key": KEY}]}
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(running(_engine(str(engine_port)), engine_port))
        other = stack.enter_context(nginx(nginx_port, engine_port))
        sides = {
            "direct": Side(engine_port, engine, is_engine=True),
            "nginx": Side(nginx_port, other, with_children=True),
        }
        for build, python in pythons.items():
            own = stack.enter_context(gateway({"mock": model}, python=python, server=keys))
            sides[build] = Side(own.port, own.pid)
        figures = compare(sides, options.rounds, requests=options.requests, streams=options.streams)
        figures["memory"] = memory_growth(own.port, own.pid, options.memory_requests)
    return figures


def _engine(port: str) -> list[str]:
    return engine_argv(port, chunks=CHUNKS, chunk_s=CHUNK_S)


def ratios(figures: dict[str, Any], build: str) -> dict[str, float]:
    own, other, direct = figures[build], figures["nginx"], figures["direct"]
    added_own = own["p50_alone_us"] - direct["p50_alone_us"]
    added_nginx = other["p50_alone_us"] - direct["p50_alone_us"]
    return {
        **cost_ratios(own, other),
        "added_p50_us": round(added_own, 1),
        "added_p50_nginx_us": round(added_nginx, 1),
        "added_p50_ratio": round(added_own / added_nginx, 2),
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--compiled", metavar="PYTHON", help="the interpreter that has the compiled build")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--memory-requests", type=int, default=200_000)
    options = parser.parse_args()
    pythons = {build_of(python): python for python in (sys.executable, options.compiled) if python is not None}
    judged = list(pythons)[-1]
    if options.compiled is not None and judged != "compiled":
        raise SystemExit(f"{options.compiled} has the {judged} build; `make compiled` makes the other.")
    run = Run("gateway", options)
    print(f"builds: {', '.join(pythons)}; the goals are for: {judged}", flush=True)
    figures = figures_of(pythons, options)
    for build in pythons:
        figures[build] |= ratios(figures, build)
        print(build, {name: figures[build][name] for name in ("request_ratio", "chunk_ratio", "added_p50_ratio")})
    growth = figures["memory"]["late_mib"] - figures["memory"]["early_mib"]
    seen = {**figures[judged], "memory_growth_mib": round(growth, 1)}
    met = all(seen[name.removesuffix("_max")] <= most for name, most in GOALS.items())
    run.report({"build": judged, **figures, "judged": seen}, GOALS, met)


if __name__ == "__main__":
    main()
