"""What the gateway must know of an engine: what it needs, how it starts, how usage is learned, what it can do.

An engine describes; it never starts anything itself. `runtime/` carries its launches out through `process/`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from greenroom.config.schema import Model
from greenroom.core.model import Claim, Need
from greenroom.engines.usage import Usage
from greenroom.process.spawn import Command

# What an engine may see of the gateway's environment. Keys, tokens and anything unknown stay behind.
INHERITED = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"),
    )
)
INHERITED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "ROCR_", "HIP_", "HSA_", "GGML_", "LLAMA_")


class Listens(Enum):
    """How the gateway reaches the engine. A socket in our private directory cannot be taken by a stranger."""

    PORT = "port"
    SOCKET = "socket"


class UsageSource(Enum):
    """How tokens are counted: from what the engine says anyway, or by asking it to say."""

    TIMINGS = "timings"
    ASK = "ask"


class Ability(Enum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine shall listen, and what it may use where."""

    claim: Claim
    port: int | None = None
    socket: str | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start it, and the path that answers 200 once it is ready (None: being up is enough)."""

    command: Command
    check_path: str | None


class Engine(Protocol):
    name: str
    listens: Listens
    usage_source: UsageSource
    sizes_itself: bool
    can_split: bool

    def need(self, model: Model) -> Need:
        """What it will need when ready. Reads file sizes; called before the scheduler hears of the model."""
        ...

    def concurrency(self, model: Model) -> int:
        """How many requests it answers at once."""
        ...

    def launch(self, model_id: str, model: Model, place: Place) -> Launch:
        """How to start it there. Raises LoadFailed when something is missing, saying what to do."""
        ...

    def abilities(self, model: Model) -> frozenset[Ability] | None:
        """What it can do; None when only the engine knows."""
        ...

    def usage(self, tail: bytes, *, stream: bool) -> Usage | None:
        """Tokens of an answer, read once from its last bytes; None when they do not say."""
        ...


def environment(model: Model, **extra: str) -> dict[str, str]:
    """The engine's whole environment: the harmless part of ours, then what the operator gave, then ours for it."""
    kept = {
        name: value for name, value in os.environ.items() if name in INHERITED or name.startswith(INHERITED_PREFIXES)
    }
    return kept | model.env | extra
