"""`python -m tests.sim.shared SEED` replays one seed; with `--seeds N` it plays many on all cores."""

from __future__ import annotations

import argparse
import sys

from tests.sim.shared.many import Figures, outcome, play_many

SHOWN_MAX = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.shared", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", help="replay this one")
    parser.add_argument("--seeds", type=int, default=200, metavar="N", help="play so many (default 200)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="beginning with this one")
    parser.add_argument("--jobs", type=int, default=None, metavar="N", help="on so many cores (default: all)")
    said = parser.parse_args()
    figures = Figures()
    if said.seed is not None:
        figures.take(*outcome(said.seed))
    else:
        for seed, came in play_many(range(said.first, said.first + said.seeds), said.jobs):
            figures.take(seed, came)
    for line in figures.lines():
        sys.stdout.write(line + "\n")
    for seed, why in sorted(figures.failures)[:SHOWN_MAX]:
        sys.stdout.write(f"\nseed {seed}: {why}\nreplay it: python -m tests.sim.shared {seed}\n")
    return 1 if figures.failures else 0


if __name__ == "__main__":
    sys.exit(main())
