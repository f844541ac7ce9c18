"""Models of random weights for GPU benchmarks: written once to a folder, by an interpreter with torch.

Importing this needs neither torch nor Greenroom: the benchmark reads the tables of models, another process writes them.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
# Written last, so that a folder that was left half-written is made anew.
WRITTEN: Final = "written.json"


def make(python: str, module: str, folders: Path, groups: Sequence[Sequence[str]]) -> None:
    """Have `module` write these models where they are missing: one process for each group, all at once."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    argv = [python, "-m", module, str(folders.absolute())]
    processes = [subprocess.Popen([*argv, *names], env=env, cwd=ROOT) for names in groups]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("the models could not be made")


def write_missing(root: Path, names: Sequence[str], write: Callable[[str, Path], str]) -> None:
    """Write each model that is not there yet; `write` says what it wrote."""
    for name in names:
        if not (root / name / WRITTEN).exists():
            began = time.monotonic()
            written = write(name, root / name)
            print(f"{name}: {written} in {time.monotonic() - began:.1f} s", flush=True)


def draw(config: Any, dtype: str) -> Any:
    """A model of random weights, drawn on the GPU where there is one: 16 GB take a second there."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
