"""Same events, same effects: a list of events alone replays every decision, byte for byte, under any hash seed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from .scenarios import finish, mixed_scenario

ROOT = Path(__file__).parents[3]


def fingerprint() -> str:
    world = mixed_scenario()
    finish(world)
    return hashlib.sha256(repr(world.calls).encode()).hexdigest()


def test_the_effects_are_the_same_under_different_hash_seeds() -> None:
    program = "import tests.core.runs.test_replay as replay; print(replay.fingerprint())"
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {f"{fingerprint()}\n"}
