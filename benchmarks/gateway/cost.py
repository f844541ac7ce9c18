"""What the gateway costs, with everything on, beside nginx and a direct call in the same run.

CPU microseconds per request (keep-alive, 16 at a time) and per streamed chunk (100 parallel streams, a chunk every
20 ms), the time it adds to a lone request, and its memory over many requests. CPU is read from /proc, so other load on
the machine matters little. Everything is on: an API key, metrics, activity, priorities, the scheduler.

The build that this interpreter has is measured, and beside it the compiled one when its interpreter is given; the goals
are then the compiled one's to meet. Which is which is asked of the builds themselves.

    make bench        or        python -m benchmarks.gateway.cost [--compiled PYTHON] [--rounds 3] [--requests 20000]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import rig

GOALS = {"request_ratio_max": 4.0, "chunk_ratio_max": 1.4, "added_p50_ratio_max": 2.5, "memory_growth_mib_max": 8.0}
CHUNKS, CHUNK_S = 150, 0.02
# The load generator presents this key.
KEY = "none"


def build_of(python: str) -> str:
    """The build that this interpreter would run, by its own word."""
    argv = [python, "-c", "from greenroom.app import BUILD; print(BUILD)"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def greenroom(python: str, port: int) -> Iterator[int]:
    """The gateway as users run it, with the mock engine as a command it starts itself; gives its pid."""
    engine = [sys.executable, str(rig.HERE / "mock_engine.py"), "--port", "${PORT}"]
    engine += ["--chunks", str(CHUNKS), "--chunk-s", str(CHUNK_S)]
    model = {"cmd": engine, "memory_mib": 100, "concurrency": 512, "preload": True}
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as folder:
        config = {
            "server": {"port": port, "api_keys": [{"name": "bench", "key": KEY}]},
            "log": {"level": "warning"},
            "state_dir": f"{folder}/state",
            "models": {"mock": model},
        }
        path = Path(folder) / "greenroom.yaml"
        # JSON is YAML.
        path.write_text(json.dumps(config))
        with rig.running([python, "-m", "greenroom", "serve", "--config", str(path)], port) as pid:
            yield pid


def memory_mib(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def memory_growth(port: int, pid: int, requests: int) -> dict[str, float]:
    """Memory after a tenth of the requests, when everything has its size, and after all of them."""
    rig.load("requests", port, concurrency=16, count=requests // 10)
    early = memory_mib(pid)
    rig.load("requests", port, concurrency=16, count=requests - requests // 10)
    late = memory_mib(pid)
    return {"requests": requests, "early_mib": round(early, 1), "late_mib": round(late, 1)}


def figures_of(pythons: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """`pythons` are the interpreters of the builds, by the builds' names. The last one's memory is watched too."""
    engine_port, nginx_port = rig.free_port(), rig.free_port()
    with contextlib.ExitStack() as stack:
        pace = ("--chunks", str(CHUNKS), "--chunk-s", str(CHUNK_S))
        engine = stack.enter_context(rig.python("rig/mock_engine.py", engine_port, *pace))
        nginx = stack.enter_context(rig.nginx(nginx_port, engine_port))
        sides = {
            "direct": (engine_port, lambda: rig.own_cpu_s(engine)),
            "nginx": (nginx_port, lambda: rig.cpu_s(nginx)),
        }
        for build, python in pythons.items():
            port = rig.free_port()
            own = stack.enter_context(greenroom(python, port))
            # The gateway's engine is its child: its time is not the gateway's.
            sides[build] = (port, partial(rig.own_cpu_s, own))
        figures: dict[str, Any] = dict(
            rig.compare(sides, options.rounds, requests=options.requests, streams=options.streams)
        )
        figures["memory"] = memory_growth(port, own, options.memory_requests)
    return figures


def ratios(figures: dict[str, Any], build: str) -> dict[str, float]:
    own, nginx, direct = figures[build], figures["nginx"], figures["direct"]
    added_own = own["p50_alone_us"] - direct["p50_alone_us"]
    added_nginx = nginx["p50_alone_us"] - direct["p50_alone_us"]
    return {
        "request_ratio": round(own["request_us"] / nginx["request_us"], 2),
        "chunk_ratio": round(own["chunk_us"] / nginx["chunk_us"], 2),
        "added_p50_us": round(added_own, 1),
        "added_p50_nginx_us": round(added_nginx, 1),
        "added_p50_ratio": round(added_own / added_nginx, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
    print(f"{rig.machine()}; builds: {', '.join(pythons)}; the goals are for: {judged}", flush=True)
    figures = figures_of(pythons, options)
    for build in pythons:
        figures[build] |= ratios(figures, build)
        print(build, {name: figures[build][name] for name in ("request_ratio", "chunk_ratio", "added_p50_ratio")})
    growth = figures["memory"]["late_mib"] - figures["memory"]["early_mib"]
    seen = {**figures[judged], "memory_growth_mib": round(growth, 1)}
    met = all(seen[name.removesuffix("_max")] <= most for name, most in GOALS.items())
    rig.report("gateway", {"machine": rig.machine(), "build": judged, **figures, "judged": seen}, GOALS, met)


if __name__ == "__main__":
    main()
