"""The contract of an engine: what it needs, how it starts, how usage is learned, what it can do.

An engine describes; it starts nothing itself. `runtime/` carries its launches out through `process/`. Most have a
process for each slot (`ProcessEngine`); some have workers that host many slots (`HostedEngine`, docs/adr/0009). An
engine of another package is a class that extends one of the two: docs/design/writing-an-engine.md.

`Usage` is read from the last bytes of an answer, which may begin anywhere; long bodies are never decoded as a whole.
llama.cpp sends `timings` in every answer; others send `usage` when asked to.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec

from greenroom.config.schema import Ability, Model
from greenroom.core.model import Claim, DeviceId, cuda_name
from greenroom.engines.estimates.estimate import Estimate
from greenroom.engines.identity import file_identity
from greenroom.errors import LoadFailed
from greenroom.process.spawn import Command


class Usage(msgspec.Struct, frozen=True):
    """The token counts of one answer; `estimated` if the engine sent none."""

    prompt: int
    completion: int
    cached: int = 0
    estimated: bool = False


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _OpenAi(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    prompt_n: int
    predicted_n: int
    cache_n: int = 0


class _WholeAnswer(msgspec.Struct):
    """A whole answer; all other fields are skipped."""

    usage: _OpenAi | None = None
    timings: _Timings | None = None


_Said = TypeVar("_Said")

# Objects inside a usage object; the largest known has two.
NESTED_MAX = 8

_openai = msgspec.json.Decoder(_OpenAi)
_timings = msgspec.json.Decoder(_Timings)
_answer = msgspec.json.Decoder(_WholeAnswer)


def from_usage(tail: bytes) -> Usage | None:
    """The last `usage` object of the answer."""
    whole = _whole(tail)
    said = whole.usage if whole is not None else _last(tail, b'"usage"', _openai)
    if said is None:
        return None
    details = said.prompt_tokens_details
    return Usage(said.prompt_tokens, said.completion_tokens, (details and details.cached_tokens) or 0)


def from_timings(tail: bytes) -> Usage | None:
    """From llama.cpp's `timings`, which count cached tokens apart from computed ones."""
    whole = _whole(tail)
    said = whole.timings if whole is not None else _last(tail, b'"timings"', _timings)
    return None if said is None else Usage(said.prompt_n + said.cache_n, said.predicted_n, said.cache_n)


def estimated(events: int) -> Usage:
    """A guess where the engine sent no count: one event is about one token."""
    return Usage(0, events, estimated=True)


def _whole(tail: bytes) -> _WholeAnswer | None:
    """A short answer that is not a stream, decoded at once; None otherwise."""
    if not tail.startswith(b"{"):
        return None
    try:
        return _answer.decode(tail)
    except msgspec.DecodeError:
        return None


def _last(tail: bytes, key: bytes, decoder: msgspec.json.Decoder[_Said]) -> _Said | None:
    """The JSON object after the last occurrence of this key, if the tail contains all of it."""
    at = tail.rfind(key)
    while at >= 0:
        start = tail.find(b"{", at)
        if start >= 0 and tail[at + len(key) : start].strip() == b":":
            return _object(tail, start, decoder)
        at = tail.rfind(key, 0, at)
    return None


def _object(tail: bytes, start: int, decoder: msgspec.json.Decoder[_Said]) -> _Said | None:
    """The object that begins here. Tries each closing brace: there are few, and none inside strings."""
    end = start
    for _ in range(NESTED_MAX):
        end = tail.find(b"}", end) + 1
        if end == 0:
            return None
        try:
            return decoder.decode(tail[start:end])
        except msgspec.ValidationError:
            return None
        except msgspec.DecodeError:
            continue
    return None


# Requests at once for a program of which nothing is known.
CONCURRENCY = 8

# What an engine inherits of the gateway's environment. Keys, tokens and unknown variables are not passed on.
INHERITED = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"),
    )
)
# Which GPUs a program sees, and in which order.
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
INHERITED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "ROCR_", "HIP_", "HSA_", "GGML_", "LLAMA_", "VLLM_", "SGLANG_")
# Names of secrets end so. An engine that inherited an API key would also ask the gateway for it.
_SECRET_ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")


class Listens(Enum):
    """How the gateway reaches the engine. No other process can take a socket in our private directory."""

    PORT = "port"
    SOCKET = "socket"


class UsageSource(Enum):
    """How tokens are counted: from figures the engine always sends, or by asking for them."""

    TIMINGS = "timings"
    ASK = "ask"


class Split(Enum):
    """How a model lies on several GPUs: by the memory that is free on each, or with the same share on all."""

    PROPORTIONAL = "proportional"
    EQUAL = "equal"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine can do with one model. No field follows from another, nor from where the engine runs."""

    # None if only the running engine knows; then it is asked for anything.
    abilities: frozenset[Ability] | None = None
    # It can leave the GPU and keep its weights in host memory.
    can_sleep: bool = False
    # It keeps a cache of prompt prefixes, apart for each X-Tenant-Id and X-Cache-Tag that it is sent.
    keeps_prefixes: bool = False
    # It takes as much GPU memory as it finds free; the core starts it alone on each of its GPUs.
    sizes_itself: bool = False
    # It can be spread over several GPUs.
    can_split: Split | None = None


@dataclass(frozen=True, slots=True)
class LaunchPlace:
    """Where an engine listens, and the devices it may use.

    `gpus` are those it may see, in the order it counts them; None: this machine has none to plan with.
    """

    claim: Claim
    port: int | None = None
    socket: str | None = None
    gpus: tuple[DeviceId, ...] | None = None

    @property
    def shares(self) -> tuple[int, ...]:
        """MiB on each of its GPUs, in their order; equal shares where nothing was claimed."""
        return tuple(self.claim.get(gpu, 1) for gpu in self.gpus or ())


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start it, and the path that answers 200 once it is ready (None: a running process is ready)."""

    command: Command
    check_path: str | None


@dataclass(frozen=True, slots=True)
class HostKey:
    """The worker that hosts a slot: slots with equal keys share one. `alone` is empty, or the slot with its own worker.

    `program` is what the worker runs, so that two programs in one Python never mix. `gpus` are those the worker uses;
    None: this machine has none to plan with.
    """

    program: str
    python: str
    gpus: tuple[DeviceId, ...] | None
    alone: str = ""
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None

    @property
    def bare(self) -> HostKey:
        """The key of a spare that this key may take."""
        return HostKey(self.program, self.python, gpus=None)

    @property
    def may_take_spare(self) -> bool:
        """True if a spare worker can serve this key: a spare is started without `env` and `cwd`."""
        return not self.env and self.cwd is None

    @property
    def visible(self) -> str | None:
        """The value of CUDA_VISIBLE_DEVICES, for a worker that was started before its GPUs were known."""
        return gpus_shown(self.gpus).get(GPUS_VARIABLE)


class Describing(ABC):
    """What every engine says about itself and its models. The defaults are for one of which nothing more is known."""

    # The name in the configuration, and that of the entry point.
    name: str
    usage_source: UsageSource = UsageSource.ASK

    def facts(self, model: Model) -> EngineFacts:
        """What it can do with this model. Reads file headers and never raises."""
        return EngineFacts()

    def estimate(self, model: Model, gpus: int) -> Estimate | None:
        """Memory it will take when ready on `gpus` GPUs, 0 for the host; None if nothing indicates it.

        Reads file headers and never raises: a missing or bad file fails its own load.
        """
        return None

    def estimate_asleep(self, model: Model) -> Estimate | None:
        """Memory it will take when asleep; None if nothing indicates it. Never raises."""
        return None

    def identity(self, model: Model) -> tuple[str, str]:
        """A short text for the files it would serve, and one for the program and its version."""
        return file_identity(self.files(model)), ""

    def concurrency(self, model: Model) -> int:
        """Requests it answers at once."""
        return model.concurrency or CONCURRENCY

    def files(self, model: Model) -> list[Path]:
        """The files a load reads, as far as known. Lists folders and never raises."""
        return [] if model.path is None else [Path(model.path)]

    def missing(self, model: Model) -> str | None:
        """What must be installed before it can be loaded, and what to type; None if nothing is known to be missing.

        Looks at files, quickly, and never raises: it is asked whenever the status is shown.
        """
        return None

    def usage(self, tail: bytes, *, stream: bool) -> Usage | None:
        """Tokens of an answer, from its last bytes; None if they do not tell."""
        return from_usage(tail)


class CallEngine(Protocol):
    """A call to a running engine: method, target and JSON body → status and body. Raises OSError or ValueError."""

    async def __call__(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]: ...


class ProcessEngine(Describing):
    """A process for each slot. One that can sleep carries `sleep` and `wake` out itself, by calls to its engine."""

    hosted: Literal[False] = False
    listens: Listens = Listens.PORT

    @abstractmethod
    def launch(self, model_id: str, model: Model, place: LaunchPlace) -> Launch:
        """How to start it there. Raises LoadFailed, which says what to do, if something is missing."""

    async def sleep(self, model: Model, call: CallEngine) -> None:
        """Free its GPU memory but what `estimate_asleep` says. It has no requests. Raises LoadFailed if it cannot."""
        raise LoadFailed(f"{self.name} cannot sleep.")

    async def wake(self, model: Model, call: CallEngine) -> None:
        """Return when it answers again. Raises LoadFailed if it does not; its process is ended then."""
        raise LoadFailed(f"{self.name} cannot sleep.")


class HostedEngine(Describing):
    """Worker programs, each of which hosts many slots and is told what to do through a control socket."""

    hosted: Literal[True] = True

    @abstractmethod
    def host_key(self, slot: str, model: Model, gpus: tuple[DeviceId, ...] | None) -> HostKey:
        """The worker that this slot belongs to."""

    @abstractmethod
    def launch_worker(self, key: HostKey, socket: str) -> Command:
        """How to start a worker that is controlled through this socket. The key of a spare has no GPUs."""

    @abstractmethod
    def options(self, model: Model, gpus: tuple[DeviceId, ...] | None) -> Mapping[str, object]:
        """Options that the worker runs this model with."""


Engine = ProcessEngine | HostedEngine


def environment(model: Model, place: LaunchPlace) -> dict[str, str]:
    """The engine's whole environment: the safe part of ours, the GPUs it may see, then the operator's `env`."""
    return _inherited() | gpus_shown(() if model.device == "cpu" else place.gpus) | model.env


def worker_environment(key: HostKey, own: Mapping[str, str]) -> dict[str, str]:
    """The same for a worker; `own` are the defaults of its program, which the operator's `env` overrides."""
    return _inherited() | gpus_shown(key.gpus) | dict(own) | dict(key.env)


def gpus_shown(gpus: tuple[DeviceId, ...] | None) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by UUID, since programs number GPUs in different orders. Empty, not absent, for none."""
    return {} if gpus is None else {GPUS_VARIABLE: ",".join(cuda_name(gpu) for gpu in gpus)}


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in INHERITED or _is_setting(name)}


def _is_setting(name: str) -> bool:
    return name.startswith(INHERITED_PREFIXES) and not name.endswith(_SECRET_ENDINGS)
