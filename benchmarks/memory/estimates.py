"""What the gateway knows of GPU memory, against a real GPU: estimates, memory of past loads, other processes.

Makes Transformers models with random weights (sizes, dtypes, kinds of attention), serves each with a context of its own
through a running gateway that was told nothing of their memory, and compares what the gateway planned with to what NVML
showed for the model's process at most, with its context full:

  1. the first load is planned by an estimate from the files' headers;
  2. each model is stopped, and its memory is watched until it is back;
  3. a new gateway, started where the first one was, plans with what that one measured;
  4. an undeclared process takes 20 GB, and a load must evict models that it did not evict before.

    python -m benchmarks.memory.estimates [--models FOLDER] [--python PYTHON] [--only SHAPE …]

Needs an NVIDIA GPU of 96 GB, an interpreter with torch and Transformers (--python; this one when not given), and about
50 GB of disk for the models, which are kept in FOLDER.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.memory import report
from benchmarks.memory.gateway import HOLDER_SHAPE, HOLDERS, MemoryGateway, memory_gateway, undeclared_process
from benchmarks.memory.models import CONFIGURATIONS, SHAPES, Configuration
from benchmarks.memory.nvml import GpuWatch, Return
from benchmarks.memory.report import Encounter, Load, Row
from benchmarks.rig.processes import memory_mib
from benchmarks.rig.random_models import make
from benchmarks.rig.result import Run, options_of

LOADS_AT_ONCE = 4
FOREIGN_MIB = 20 * 1024
# What two holders and the margin leave of the GPU: enough for the newcomer, but not beside the undeclared process.
ROOM_MIB = 22_000
MARGIN_MIB = 512
NEWCOMER = "llama-8b-bf16"
# The gateway probes every five seconds.
NOTICE_MAX_S = 15.0


# --- estimated and remembered ---------------------------------------------------------------------------------------


def loads(gateway: MemoryGateway, watch: GpuWatch, served: list[Configuration]) -> dict[str, Load]:
    """Load all of them, some at a time, fill their contexts, and see what each was given and what it took."""
    names = [one.id for one in served]
    with ThreadPoolExecutor(LOADS_AT_ONCE) as pool:
        figures = dict(zip(names, pool.map(gateway.figure, names), strict=True))
        answers = dict(zip(names, pool.map(gateway.fill, served), strict=True))
    claims = gateway.claims_mib()
    return {
        name: Load(figures[name], claims[name], watch.peaks_mib[answer.pid], _host_mib(answer.pid), answer)
        for name, answer in answers.items()
    }


def _host_mib(pid: int) -> float:
    """Pages of files do not count: they are the page cache's, which gives them back."""
    return memory_mib(pid, "RssAnon", "RssShmem")


def returns(gateway: MemoryGateway, watch: GpuWatch, loaded: dict[str, Load]) -> dict[str, Return]:
    """Stop one after the other and watch the memory of each come back."""
    return {name: watch.returns(load.answer.pid, partial(gateway.unload, name)) for name, load in loaded.items()}


# --- an undeclared process -------------------------------------------------------------------------------------------


def encounter(gateway: MemoryGateway, watch: GpuWatch, python: str, newcomer: Configuration) -> Encounter:
    """What a load of the newcomer evicts: before, while and after an undeclared process holds memory."""
    _ready(gateway, *HOLDERS)
    before = gateway.evicted_for(newcomer.id)
    with undeclared_process(python, FOREIGN_MIB) as pid:
        foreign_mib, noticed_s = _foreign(gateway, lambda mib: mib >= FOREIGN_MIB)
        is_named = [one["pid"] for one in gateway.gpu()["strangers"]] == [pid]
        during = gateway.evicted_for(newcomer.id)
        gateway.fill(newcomer)
        ready, used_mib = gateway.ready(), watch.used_mib()
        gateway.unload(newcomer.id)
    _foreign(gateway, lambda mib: mib < FOREIGN_MIB // 2)
    _ready(gateway, *HOLDERS)
    after = gateway.evicted_for(newcomer.id)
    return Encounter(before, during, after, foreign_mib, noticed_s, is_named, ready, used_mib)


def _ready(gateway: MemoryGateway, *models: str) -> None:
    for model in models:
        gateway.complete(model, 64)


def _foreign(gateway: MemoryGateway, is_so: Callable[[int], bool]) -> tuple[int, float]:
    """What the gateway counts as foreign, once `is_so` holds for it, and how long that took."""
    began = time.monotonic()
    while not is_so(mib := gateway.foreign_mib()):
        if time.monotonic() - began > NOTICE_MAX_S:
            raise SystemExit(f"after {NOTICE_MAX_S:g} s the gateway counts {mib} MiB as foreign")
        time.sleep(0.05)
    return mib, time.monotonic() - began


# --- all of it ------------------------------------------------------------------------------------------------------


def rows(watch: GpuWatch, start: Any, served: list[Configuration]) -> list[Row]:
    with start() as gateway:
        report.show_card(watch.card(), gateway.ask("/api/v1/gpus"))
        first = loads(gateway, watch, served)
        gone = returns(gateway, watch, first)
    with start() as gateway:
        second = loads(gateway, watch, served)
        returns(gateway, watch, second)
    return [Row(one, first[one.id], gone[one.id], second[one.id]) for one in served]


def measure(run: Run, options: argparse.Namespace, folders: Path, home: Path) -> None:
    served = [one for one in CONFIGURATIONS if not options.only or one.shape in options.only]
    newcomer = next((one for one in served if one.shape == NEWCOMER), served[-1])
    with GpuWatch().open() as watch:
        card = watch.card()
        holder_mib = int(card.total_mib - card.reserved_mib - MARGIN_MIB - ROOM_MIB) // len(HOLDERS)
        start = partial(memory_gateway, home, folders, options.python, served, holder_mib)
        found = rows(watch, start, served)
        report.show_rows(found, folders)
        with start() as gateway:
            met = encounter(gateway, watch, options.python, newcomer)
    report.show_encounter(met)
    report.report_goals(run, found, met)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--models", type=Path, default=Path("build", "memory-gpu"), help="where the models are kept")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch and Transformers")
    parser.add_argument("--only", nargs="*", default=[], choices=list(SHAPES), help="only these models")
    options = parser.parse_args()
    run, folders = Run("memory_gpu", options, report.versions(options.python)), options.models.absolute()
    # One process writes them all: some fill the GPU while they are drawn.
    make(options.python, "benchmarks.memory.models", folders, [options.only and [*options.only, HOLDER_SHAPE]])
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as home:
        measure(run, options, folders, Path(home))


if __name__ == "__main__":
    main()
