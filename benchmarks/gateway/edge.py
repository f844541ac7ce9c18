"""Is an HTTP edge of our own worth it? CPU per request and per streamed chunk of the bare edge, beside nginx.

Both stand in front of the same engine, one after the other, several rounds in one run; the best round of each counts,
because other load on the machine can only add. The numbers behind docs/adr/0002-own-http-edge.md.

    python -m benchmarks.gateway.edge [--rounds 3]
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import rig

# The goals of the whole gateway: what the bare edge leaves below them is what everything else may cost.
GOALS = {"request_ratio_max": 4.0, "chunk_ratio_max": 1.4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--streams", type=int, default=100)
    options = parser.parse_args()
    engine_port, own_port, nginx_port = rig.free_port(), rig.free_port(), rig.free_port()
    print(rig.machine())
    with (
        rig.python("rig/mock_engine.py", engine_port, "--chunks", "150", "--chunk-s", "0.02"),
        rig.python("gateway/bare_proxy.py", own_port, "--engine-port", str(engine_port)) as own,
        rig.nginx(nginx_port, engine_port) as nginx,
    ):
        sides = {"edge": (own_port, lambda: rig.cpu_s(own)), "nginx": (nginx_port, lambda: rig.cpu_s(nginx))}
        figures: dict[str, Any] = dict(
            rig.compare(sides, options.rounds, requests=options.requests, streams=options.streams)
        )
    figures["request_ratio"] = round(figures["edge"]["request_us"] / figures["nginx"]["request_us"], 2)
    figures["chunk_ratio"] = round(figures["edge"]["chunk_us"] / figures["nginx"]["chunk_us"], 2)
    met = figures["request_ratio"] <= GOALS["request_ratio_max"] and figures["chunk_ratio"] <= GOALS["chunk_ratio_max"]
    rig.report("edge_choice", figures, GOALS, met)


if __name__ == "__main__":
    main()
