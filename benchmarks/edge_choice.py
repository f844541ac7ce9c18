"""Is an HTTP edge of our own worth it? CPU per request and per streamed chunk of the bare edge, beside nginx.

Both stand in front of the same engine, one after the other, several rounds in one run; the best round of each counts,
because other load on the machine can only add. The numbers behind docs/adr/0002-own-http-edge.md.

    python benchmarks/edge_choice.py [--rounds 3]
"""

from __future__ import annotations

import argparse
from typing import Any

import rig

GOALS = {"request_ratio_max": 2.0, "chunk_ratio_max": 1.4}


def measure(port: int, pid: int, *, requests: int, streams: int) -> dict[str, float]:
    """One round against one proxy."""
    rig.load("requests", port, concurrency=16, count=2_000)
    before_s = rig.cpu_s(pid)
    busy = rig.load("requests", port, concurrency=16, count=requests)
    between_s = rig.cpu_s(pid)
    paced = rig.load("streams", port, concurrency=streams)
    after_s = rig.cpu_s(pid)
    alone = rig.load("requests", port, concurrency=1, count=2_000)
    return {
        "request_us": 1e6 * (between_s - before_s) / busy["count"],
        "chunk_us": 1e6 * (after_s - between_s) / paced["chunks"],
        "chunks_per_read": paced["chunks_per_read"],
        "p50_alone_us": alone["p50_us"],
        "per_s": busy["per_s"],
    }


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    chosen = {name: round(min(one[name] for one in rounds), 2) for name in rounds[0]}
    chosen["per_s"] = round(max(one["per_s"] for one in rounds))
    return chosen


def compare(proxies: dict[str, tuple[int, int]], rounds: int, requests: int, streams: int) -> dict[str, Any]:
    results: dict[str, list[dict[str, float]]] = {name: [] for name in proxies}
    for number in range(rounds):
        for name, (port, pid) in proxies.items():
            results[name].append(measure(port, pid, requests=requests, streams=streams))
            print(f"round {number + 1} {name:10}", {key: round(value, 1) for key, value in results[name][-1].items()})
    return {name: best(taken) for name, taken in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--streams", type=int, default=100)
    options = parser.parse_args()
    engine_port, own_port, nginx_port = rig.free_port(), rig.free_port(), rig.free_port()
    print(rig.machine())
    with (
        rig.python("mock_engine.py", engine_port, "--chunks", "150", "--chunk-s", "0.02"),
        rig.python("bare_proxy.py", own_port, "--engine-port", str(engine_port)) as own,
        rig.nginx(nginx_port, engine_port) as nginx,
    ):
        proxies = {"edge": (own_port, own), "nginx": (nginx_port, nginx)}
        figures = compare(proxies, options.rounds, options.requests, options.streams)
    figures["request_ratio"] = round(figures["edge"]["request_us"] / figures["nginx"]["request_us"], 2)
    figures["chunk_ratio"] = round(figures["edge"]["chunk_us"] / figures["nginx"]["chunk_us"], 2)
    met = figures["request_ratio"] <= GOALS["request_ratio_max"] and figures["chunk_ratio"] <= GOALS["chunk_ratio_max"]
    rig.report("edge_choice", figures, GOALS, met)


if __name__ == "__main__":
    main()
