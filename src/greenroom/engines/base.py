"""What the gateway must know of an engine: what it needs, how it starts, how usage is learned, what it can do.

An engine describes; it never starts anything itself. `runtime/` carries its launches out through `process/`. Most have
a process for each slot (`ProcessEngine`); some have workers that host many (`HostedEngine`, docs/adr/0009).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal, Protocol

from greenroom.config.schema import Model
from greenroom.core.model import Claim, DeviceId, cuda_name
from greenroom.engines.estimates.estimate import Estimate
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
class LaunchPlace:
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


@dataclass(frozen=True, slots=True)
class HostKey:
    """Which worker hosts a slot: those with the same key share one. `alone` is empty, or the slot that has its own.

    `gpus` are those the worker uses; None: this machine has none to plan with.
    """

    python: str
    gpus: tuple[DeviceId, ...] | None
    alone: str = ""
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None

    @property
    def may_take_spare(self) -> bool:
        """A worker that was started before anybody knew for whom has no environment of anyone's."""
        return not self.env and self.cwd is None

    @property
    def visible(self) -> str | None:
        """The GPUs as CUDA's variable names them, to be told to one that was started before they were known."""
        return gpus_shown(self.gpus).get(GPUS_VARIABLE)


class Describing(Protocol):
    """What every engine says of itself and of its models."""

    name: str
    usage_source: UsageSource

    def sizes_itself(self, model: Model) -> bool:
        """True if it takes as much GPU memory as it finds free; the core starts it alone on each of its GPUs."""
        ...

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

    def files(self, model: Model) -> list[Path]:
        """The files a load reads, as far as they can be told. Looks at folders, and never raises."""
        ...

    def abilities(self, model: Model) -> frozenset[Ability] | None:
        """What it can do; None when only the engine knows."""
        ...

    def usage(self, tail: bytes, *, stream: bool) -> Usage | None:
        """Tokens of an answer, read once from its last bytes; None when they do not say."""
        ...


class ProcessEngine(Describing, Protocol):
    """A program of its own for each slot. It cannot sleep."""

    hosted: Literal[False]
    listens: Listens

    def launch(self, model_id: str, model: Model, place: LaunchPlace) -> Launch:
        """How to start it there. Raises LoadFailed when something is missing, saying what to do."""
        ...


class HostedEngine(Describing, Protocol):
    """Workers of ours, each of which hosts many slots that sleep in host memory."""

    hosted: Literal[True]

    def host_key(self, slot: str, model: Model, gpus: tuple[DeviceId, ...] | None) -> HostKey:
        """Which worker this slot belongs into."""
        ...

    def launch_worker(self, key: HostKey, socket: str) -> Command:
        """How to start a worker that is controlled through this socket. One that is to be a spare has a bare key."""
        ...

    def options(self, model: Model, gpus: tuple[DeviceId, ...] | None) -> Mapping[str, object]:
        """What the worker is told of how to run this model."""
        ...

    def estimate_asleep(self, model: Model) -> Estimate | None:
        """What it will take when asleep; None when it has nothing to go by. Never raises."""
        ...


Engine = ProcessEngine | HostedEngine


def environment(model: Model, place: LaunchPlace) -> dict[str, str]:
    """The engine's whole environment: the harmless part of ours, the GPUs it may see, then what the operator gave."""
    return _inherited() | gpus_shown(() if model.device == "cpu" else place.gpus) | model.env


def worker_environment(key: HostKey, own: Mapping[str, str]) -> dict[str, str]:
    """The same for a worker; `own` is what its program wants unless the operator says otherwise."""
    return _inherited() | gpus_shown(key.gpus) | dict(own) | dict(key.env)


def gpus_shown(gpus: tuple[DeviceId, ...] | None) -> dict[str, str]:
    """By id: programs number GPUs in more than one order. Empty, not absent, where it shall see none."""
    return {} if gpus is None else {GPUS_VARIABLE: ",".join(cuda_name(gpu) for gpu in gpus)}


def _inherited() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name in INHERITED or name.startswith(INHERITED_PREFIXES)
    }
