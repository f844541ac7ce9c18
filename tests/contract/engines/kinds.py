"""Every engine there is, as the contract suite wants it: models that say their name, and one that does not end.

To add an engine: describe it by a `Kind` and name it in KINDS.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import fake, served, tiny
from tests.models import tiny as tiny_gguf
from tests.models import tiny_hf
from tests.torch_python import hosted

# Wide enough that an answer of the longest context takes many seconds, so that its end is no accident.
HIDDEN, LAYERS = 512, 8
CONTEXT = 4096

Described = dict[str, Any]

# Programs and folders of stand-ins, for as long as the tests run.
_programs = tempfile.TemporaryDirectory(prefix="stand-ins-")


@dataclass(frozen=True, slots=True)
class Kind:
    """`named` makes a model that says its name and ends; `endless` one that goes on until its client leaves.

    `sleeps_in_process`: what sleeps is its own process, which keeps a part of the GPU. It cannot be prepared, and is
    lost with its process.
    """

    named: Callable[[str], Described]
    endless: Callable[[str], Described]
    can_sleep: bool = False
    sleeps_in_process: bool = False

    @property
    def outlives_its_process(self) -> bool:
        return self.can_sleep and not self.sleeps_in_process


def _stand_in(kind: str) -> Kind:
    """vLLM or SGLang, whose stand-in speaks as they are documented to."""
    folder = Path(_programs.name, kind)
    return Kind(
        named=lambda name: served(kind, folder),
        endless=lambda name: served(kind, folder, "--tokens", str(10**9)),
        can_sleep=True,
        sleeps_in_process=True,
    )


KINDS = {
    "command": Kind(named=lambda name: fake(name), endless=lambda name: fake(name, "--tokens", str(10**9))),
    "llamacpp": Kind(
        named=lambda name: tiny(tiny_gguf(name)),
        endless=lambda name: tiny(tiny_gguf(name, loop=True, hidden=HIDDEN, layers=LAYERS), ctx_size=CONTEXT),
    ),
    "transformers": Kind(
        named=lambda name: hosted(tiny_hf(name)),
        endless=lambda name: hosted(tiny_hf(name, loop=True, hidden=HIDDEN, layers=LAYERS), ctx_size=CONTEXT),
        can_sleep=True,
    ),
    "vllm": _stand_in("vllm"),
    "sglang": _stand_in("sglang"),
}
