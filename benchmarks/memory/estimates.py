"""What the gateway knows of GPU memory, against a real GPU: estimates, remembered figures, memory back, strangers.

Makes Transformers models with random weights (sizes, dtypes, kinds of attention), serves each with a context of its own
through a running gateway that was told nothing of their memory, and compares what the gateway planned with to what NVML
showed for the model's process at most, with its context full:

  1. the first load is planned by an estimate from the files' headers;
  2. each model is stopped, and its memory is watched until it is back;
  3. a new gateway, started where the first one was, plans with what that one measured;
  4. a process that nobody declared takes 20 GB, and other models have to leave than before.

    python -m benchmarks.memory.estimates [--models FOLDER] [--python PYTHON] [--only SHAPE …]

Needs an NVIDIA GPU of 96 GB, an interpreter with torch and Transformers (--python; this one when not given), and about
50 GB of disk for the models, which are kept in FOLDER.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import rig
from benchmarks.memory import report
from benchmarks.memory.gateway import HOLDERS, House, house, stranger
from benchmarks.memory.models import CONFIGURATIONS, Configuration
from benchmarks.memory.nvml import Eyes, Return, host_mib
from benchmarks.memory.report import Load, Meeting, Row

LOADS_AT_ONCE = 4
STRANGER_MIB = 20 * 1024
# Beside two holders and the margin so much of the GPU is left: enough for the newcomer, not for it and the stranger.
ROOM_MIB = 22_000
MARGIN_MIB = 512
NEWCOMER = "llama-8b-bf16"
# The gateway looks every five seconds.
NOTICE_MAX_S = 15.0


# --- estimated and remembered ---------------------------------------------------------------------------------------


def loads(home: House, eyes: Eyes, served: list[Configuration]) -> dict[str, Load]:
    """Load all of them, some at a time, fill their contexts, and see what each was given and what it took."""
    names = [one.id for one in served]
    with ThreadPoolExecutor(LOADS_AT_ONCE) as pool:
        figures = dict(zip(names, pool.map(home.figure, names), strict=True))
        spoken = dict(zip(names, pool.map(home.fill, served), strict=True))
    claims = home.claims_mib()
    return {
        name: Load(figures[name], claims[name], eyes.peaks_mib[said.pid], host_mib(said.pid), said)
        for name, said in spoken.items()
    }


def returns(home: House, eyes: Eyes, loaded: dict[str, Load]) -> dict[str, Return]:
    """Stop one after the other and watch the memory of each come back."""
    return {name: eyes.returns(load.spoken.pid, partial(home.unload, name)) for name, load in loaded.items()}


# --- a stranger -----------------------------------------------------------------------------------------------------


def meeting(home: House, eyes: Eyes, python: str, newcomer: Configuration) -> Meeting:
    """Who has to leave for the newcomer: before a stranger comes, while it is there, and after it has gone."""
    _ready(home, *HOLDERS)
    before = home.evicted_for(newcomer.id)
    with stranger(python, STRANGER_MIB) as pid:
        foreign_mib, noticed_s = _foreign(home, lambda mib: mib >= STRANGER_MIB)
        is_named = [one["pid"] for one in home.gpu()["strangers"]] == [pid]
        during = home.evicted_for(newcomer.id)
        home.fill(newcomer)
        ready, used_mib = home.ready(), eyes.used_mib()
        home.unload(newcomer.id)
    _foreign(home, lambda mib: mib < STRANGER_MIB // 2)
    _ready(home, *HOLDERS)
    after = home.evicted_for(newcomer.id)
    return Meeting(before, during, after, foreign_mib, noticed_s, is_named, ready, used_mib)


def _ready(home: House, *models: str) -> None:
    for model in models:
        home.speak(model, 64)


def _foreign(home: House, is_so: Callable[[int], bool]) -> tuple[int, float]:
    """What the gateway takes for undeclared, once it is so, and how long that took."""
    began = time.monotonic()
    while not is_so(mib := home.foreign_mib()):
        if time.monotonic() - began > NOTICE_MAX_S:
            raise SystemExit(f"after {NOTICE_MAX_S:g} s the gateway counts {mib} MiB of strangers")
        time.sleep(0.05)
    return mib, time.monotonic() - began


# --- all of it ------------------------------------------------------------------------------------------------------


def rows(eyes: Eyes, open_house: Any, served: list[Configuration]) -> list[Row]:
    with open_house() as home:
        report.show_card(eyes.card(), home.gpus())
        first = loads(home, eyes, served)
        gone = returns(home, eyes, first)
    with open_house() as home:
        second = loads(home, eyes, served)
        returns(home, eyes, second)
    return [Row(one, first[one.id], gone[one.id], second[one.id]) for one in served]


def measure(options: argparse.Namespace, folders: Path, home: Path) -> None:
    served = [one for one in CONFIGURATIONS if not options.only or one.shape in options.only]
    newcomer = next((one for one in served if one.shape == NEWCOMER), served[-1])
    with Eyes().open() as eyes:
        card = eyes.card()
        holder_mib = int(card.total_mib - card.reserved_mib - MARGIN_MIB - ROOM_MIB) // len(HOLDERS)
        open_house = partial(house, home, folders, options.python, served, holder_mib)
        found = rows(eyes, open_house, served)
        report.show_rows(found, folders)
        with open_house() as gateway:
            met = meeting(gateway, eyes, options.python, newcomer)
    report.show_meeting(met)
    report.show_goals(found, met)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("build", "memory-gpu"), help="where the models are kept")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch and Transformers")
    parser.add_argument("--only", nargs="*", default=[], metavar="SHAPE", help="only these models")
    options = parser.parse_args()
    folders = options.models.absolute()
    print(f"machine: {rig.machine()}; {report.versions(options.python)}", flush=True)
    subprocess.run(
        [options.python, str(rig.HERE.parent / "memory" / "models.py"), str(folders), *options.only], check=True
    )
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as home:
        measure(options, folders, Path(home))


if __name__ == "__main__":
    main()
