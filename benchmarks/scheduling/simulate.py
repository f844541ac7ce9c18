"""What `greenroom simulate` costs: memory for each million requests, requests a second, and cases with a green room.

Writes a trace whose rows are out of order (within an hour of each other), plays it with the command itself and watches
the process. Memory is the peak beyond that of a trace of a thousand rows. CPU time with a green room is per event and
per swap, beside the same requests without, over machines of one and two GPUs that are hardly, well and too much used:
with a green room more swaps happen.

    python -m benchmarks.scheduling.simulate [--millions 1] [--requests 20000]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.rig.result import Run, options_of

MIB_PER_MILLION_MAX = 300.0
# CPU time of an event with a green room, compared with one without.
GREEN_ROOM_MAX = 1.25
CONFIG = """
gpus: [{memory_mib: 24576}]
models:
  large:  {cmd: "engine --port ${PORT}", memory_mib: 20480, concurrency: 64}
  chat:   {cmd: "engine --port ${PORT}", memory_mib: 9216, concurrency: 64}
  coder:  {cmd: "engine --port ${PORT}", memory_mib: 12288, concurrency: 64, priority: high}
  small:  {cmd: "engine --port ${PORT}", memory_mib: 10240, concurrency: 64}
  embed:  {cmd: "engine --port ${PORT}", memory_mib: 2048, concurrency: 64}
  speech: {cmd: "engine --port ${PORT}", memory_mib: 4096, concurrency: 64, priority: low}
"""
MODELS = ("large", "chat", "coder", "small", "embed", "speech")
TENANTS = 5_000
RATE = 4.0
SHUFFLED_S = 3_600.0
GREEN_ROOM_MIB = 65_536
GPUS = (1, 2)
RATES = (0.3, 1.0, 3.0)


@dataclass(frozen=True, slots=True)
class Played:
    cases: list[dict[str, Any]]
    peak_mib: float
    cpu_s: float
    took_s: float


def trace_of(path: Path, rows: int) -> Path:
    random, at = Random("simulate"), 0.0
    with path.open("w") as file:
        file.write("t,model,prompt_len,output_len,tenant\n")
        for _ in range(rows):
            at += random.expovariate(RATE)
            model, tenant = (
                MODELS[int(random.paretovariate(1.0)) % len(MODELS)],
                int(random.paretovariate(0.5)) % TENANTS,
            )
            prompt, output = (int(random.expovariate(1.0 / mean)) for mean in (300, 100))
            file.write(f"{at + random.random() * SHUFFLED_S:.3f},{model},{prompt},{output},t{tenant}\n")
    return path


def play(config: Path, *words: str) -> Played:
    """Run the command to its end, alone on one core."""
    began = time.monotonic()
    argv = [sys.executable, "-m", "greenroom", "simulate", "-c", str(config), *words, "--jobs", "1", "--json"]
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(argv)} ended with {process.returncode}")
        out.seek(0)
        cases = json.load(out)["cases"]
    return Played(cases, usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime, time.monotonic() - began)


def size_figures(folder: Path, config: Path, rows: int) -> dict[str, float]:
    few = play(config, "--trace", str(trace_of(folder / "few.csv", 1_000)), "--gpus", "4")
    many = play(config, "--trace", str(trace_of(folder / "many.csv", rows)), "--gpus", "4")
    if many.cases[0]["requests"] != rows:
        raise SystemExit(f"{many.cases[0]['requests']:,} of {rows:,} requests were played")
    cpu_s = many.cpu_s - few.cpu_s
    return {
        "rows": rows,
        "mib_per_million": round((many.peak_mib - few.peak_mib) / rows * 1e6, 1),
        "peak_mib": round(many.peak_mib),
        "requests_per_cpu_s": round(rows / cpu_s),
        "cpu_s": round(cpu_s, 1),
        "took_s": round(many.took_s, 1),
    }


def green_room_figures(config: Path, requests: int) -> dict[str, float]:
    nothing = play(config, "--seconds", "1")
    figures: dict[str, float] = {}
    for name, room_mib in (("without", 0), ("with", GREEN_ROOM_MIB)):
        cpu_s, events, swaps = 0.0, 0, 0
        for gpus, rate in product(GPUS, RATES):
            drawn = ("--gpus", str(gpus), "--rate", str(rate), "--seconds", str(int(requests / rate)))
            one = play(config, *drawn, "--green-room-mib", str(room_mib))
            cpu_s += one.cpu_s - nothing.cpu_s
            events += one.cases[0]["events"]
            swaps += one.cases[0]["swaps"]
        figures[f"{name}_room_cpu_s"] = round(cpu_s, 2)
        figures[f"{name}_room_us_per_event"] = round(cpu_s / events * 1e6, 1)
        figures[f"{name}_room_us_per_swap"] = round(cpu_s / swaps * 1e6)
    figures["green_room_ratio"] = round(figures["with_room_us_per_event"] / figures["without_room_us_per_event"], 2)
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("--millions", type=float, default=1.0, help="rows of the trace")
    parser.add_argument("--requests", type=int, default=20_000, help="of each machine with and without a green room")
    options = parser.parse_args(argv)
    run = Run("simulate", options)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "greenroom.yaml"
        config.write_text(CONFIG)
        figures = size_figures(Path(folder), config, int(options.millions * 1e6))
        print(*(f"{name:24} {value:>12,}" for name, value in figures.items()), sep="\n", flush=True)
        rooms = green_room_figures(config, options.requests)
        print(*(f"{name:24} {value:>12,}" for name, value in rooms.items()), sep="\n", flush=True)
    goals = {"mib_per_million_max": MIB_PER_MILLION_MAX, "green_room_ratio_max": GREEN_ROOM_MAX}
    met = figures["mib_per_million"] <= MIB_PER_MILLION_MAX and rooms["green_room_ratio"] <= GREEN_ROOM_MAX
    run.report({**figures, **rooms}, goals, met)


if __name__ == "__main__":
    main()
