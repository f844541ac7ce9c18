"""Starts a worker program by its name, under the Python of its engine: `python launch.py torch_host.main --control …`.

Owns nothing but the way in. This folder becomes the package `workers`, so that programs and what they share find each
other by relative imports without the rest of greenroom, which that Python need not have.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

if __name__ == "__main__":
    here = str(Path(__file__).parent)
    package = types.ModuleType("workers")
    package.__path__ = [here]
    sys.modules["workers"] = package
    # Python puts the folder of a program first; its files must not be found under a second name.
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.exit(importlib.import_module(f"workers.{sys.argv[1]}").main(sys.argv[2:]))
