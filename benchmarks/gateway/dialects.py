"""What the translation of a dialect costs: CPU per request and per streamed chunk, beside a chat that is passed on.

One gateway in front of an engine that speaks OpenAI's chat alone, asked by each path in turn. A chunk is one event of
the engine; the best round of each path counts, because other load on the machine can only add.

    python -m benchmarks.gateway.dialects [--rounds 3] [--requests 5000] [--streams 50]
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.gateway.cost import CHUNK_S, CHUNKS
from benchmarks.rig.gateways import gateway
from benchmarks.rig.processes import engine_argv, own_cpu_s
from benchmarks.rig.result import Run, options_of
from benchmarks.rig.traffic import load

GOALS = {"chunk_ratio_max": 3.0}
PLAIN = "/v1/chat/completions"
PATHS = (PLAIN, "/v1/messages", "/v1/responses", "/api/chat")
MODEL = {
    "cmd": engine_argv("${PORT}", chunks=CHUNKS, chunk_s=CHUNK_S),
    "memory_mib": 100,
    "concurrency": 512,
    "preload": True,
}


def measure(port: int, pid: int, path: str, requests: int, streams: int) -> dict[str, float]:
    """One round of one path."""
    # The gateway's engine is its child: its time is not the gateway's.
    cpu_s, ask = partial(own_cpu_s, pid), partial(load, port=port, path=path)
    ask("requests", concurrency=16, count=500)
    before_s = cpu_s()
    busy = ask("requests", concurrency=16, count=requests)
    between_s = cpu_s()
    paced = ask("streams", concurrency=streams)
    after_s = cpu_s()
    if busy["count"] != requests or paced["chunks"] < streams * CHUNKS:
        raise SystemExit(f"{path}: not everything was answered: {busy}, {paced}")
    return {
        "request_us": 1e6 * (between_s - before_s) / requests,
        "chunk_us": 1e6 * (after_s - between_s) / (streams * CHUNKS),
        "chunks_per_read": paced["chunks_per_read"],
    }


def figures_of(rounds: int, requests: int, streams: int) -> dict[str, Any]:
    taken: dict[str, list[dict[str, float]]] = {path: [] for path in PATHS}
    with gateway(models={"mock": MODEL}) as own:
        for number in range(rounds):
            for path in PATHS:
                taken[path].append(measure(own.port, own.pid, path, requests, streams))
                shown = {name: round(value, 1) for name, value in taken[path][-1].items()}
                print(f"round {number + 1} {path:22}", shown, flush=True)
    figures: dict[str, Any] = {}
    for path in PATHS:
        best = {name: round(min(one[name] for one in taken[path]), 2) for name in taken[path][0]}
        plain = best if path == PLAIN else figures[PLAIN]
        ratios = {f"{name}_ratio": round(best[f"{name}_us"] / plain[f"{name}_us"], 2) for name in ("request", "chunk")}
        figures[path] = {**best, **ratios}
    return figures


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=5_000)
    parser.add_argument("--streams", type=int, default=50)
    options = parser.parse_args()
    run = Run("gateway_dialects", options)
    figures = figures_of(options.rounds, options.requests, options.streams)
    met = all(figures[path]["chunk_ratio"] <= GOALS["chunk_ratio_max"] for path in PATHS)
    run.report(figures, GOALS, met)


if __name__ == "__main__":
    main()
