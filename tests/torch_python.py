"""The Python that has torch. It is never the one that runs the tests of the gateway, nor the gateway."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-torch" / "bin" / "python"
MAKER = ROOT / "tests" / "workers" / "torch_host" / "samples" / "tiny.py"
PIPELINE_MAKER = MAKER.with_name("tiny_pipelines.py")
MAKING = """
import sys
from pathlib import Path
from tests.workers.torch_host.samples.tiny import make_model
for kind in sys.argv[2:]:
    make_model(Path(sys.argv[1]) / kind, kind)
"""
MAKING_MAX_S = 300


def torch_python() -> str:
    assert PYTHON.exists(), "there is no .venv-torch here; type `make torch`"
    return str(PYTHON)


def make_models(folder: Path, kinds: Sequence[str]) -> None:
    """Some of the tiny models that the worker's own tests use. Takes an import of torch, and so makes all at once."""
    _make("-c", MAKING, str(folder), *kinds)


def make_pipelines(folder: Path, kinds: Sequence[str]) -> None:
    """The same for pipelines of diffusers."""
    _make("-m", "tests.workers.torch_host.samples.tiny_pipelines", str(folder), *kinds)


def _make(*arguments: str) -> None:
    command = [torch_python(), *arguments]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=MAKING_MAX_S, check=False)
    assert made.returncode == 0, made.stderr[-2000:]


def hosted(path: Path, **keys: Any) -> dict[str, Any]:
    """A model on Transformers, hosted by a worker. One thread: on a busy machine more make it slower."""
    common = {"engine": "transformers", "python": torch_python(), "dtype": "float32", "threads": 1}
    return {"path": str(path), **common, "ctx_size": 512, "memory_mib": 100, **keys}


def bring_own_attention(folder: Path) -> None:
    """Let a Llama's folder be a model with code of its own, whose attention paged attention does not know."""
    shutil.copy(MAKER.with_name("own_attention.py"), folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own_attention.OwnConfig", "AutoModelForCausalLM": "own_attention.OwnForCausalLM"}
    config |= {"model_type": "own_attention", "architectures": ["OwnForCausalLM"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))


def painter(path: Path, **keys: Any) -> dict[str, Any]:
    """A pipeline of diffusers, hosted by a worker."""
    common = {"engine": "diffusers", "python": torch_python(), "threads": 1}
    return {"path": str(path), **common, "memory_mib": 100, **keys}
