"""What the gateway must know of an engine: what it needs, how it starts, how usage is learned, what it can do.

An engine describes; it never starts anything itself. `runtime/` carries its launches out through `process/`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from greenroom.config.gpu_names import cuda_name
from greenroom.config.schema import Model
from greenroom.core.model import Claim, DeviceId
from greenroom.engines.estimate import Estimate
from greenroom.engines.usage import Usage
from greenroom.process.spawn import Command

# What an engine may see of the gateway's environment. Keys, tokens and anything unknown stay behind.
INHERITED = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"),
    )
)
# Which GPUs a program sees, and in which order.
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
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
    """Where an engine shall listen, and what it may use where.

    `gpus` are those it may see, in the order in which it shall count them; None: this machine has none to plan with.
    """

    claim: Claim
    port: int | None = None
    socket: str | None = None
    gpus: tuple[DeviceId, ...] | None = None

    @property
    def shares(self) -> tuple[int, ...]:
        """How much of it shall lie on each of its GPUs, in their order; equal parts where nothing was claimed."""
        return tuple(self.claim.get(gpu, 1) for gpu in self.gpus or ())


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

    def can_split(self, model: Model) -> bool:
        """Whether it can be spread over several GPUs."""
        ...

    def estimate(self, model: Model, gpus: int) -> Estimate | None:
        """What it will take when ready on so many GPUs, 0 for the host; None when it has nothing to go by.

        Reads headers of files, and never raises: a file that is missing or bad fails its own load.
        """
        ...

    def identity(self, model: Model) -> tuple[str, str]:
        """Which files it would serve, and which program of which version would; each a short text."""
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


def environment(model: Model, place: Place) -> dict[str, str]:
    """The engine's whole environment: the harmless part of ours, the GPUs it may see, then what the operator gave."""
    kept = {
        name: value for name, value in os.environ.items() if name in INHERITED or name.startswith(INHERITED_PREFIXES)
    }
    gpus = () if model.device == "cpu" else place.gpus
    if gpus is not None:
        # By id: programs number GPUs in more than one order. Empty, not absent, where it shall see none.
        kept[GPUS_VARIABLE] = ",".join(cuda_name(gpu) for gpu in gpus)
    return kept | model.env
