"""The contract of an engine: what it needs, how it starts, how usage is learned, what it can do.

An engine describes; it starts nothing itself. `runtime/` carries its launches out through `process/`. Most have a
process for each slot (`ProcessEngine`); some have workers that host many slots (`HostedEngine`, docs/adr/0009); one has
no process at all (`RemoteEngine`). An engine of another package is a class that extends one of the first two:
docs/design/writing-an-engine.md.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, Literal, Protocol

from greenroom.config.schema import Ability, Model
from greenroom.core.model import Claim, DeviceId, cuda_name
from greenroom.engines.estimates.estimate import Estimate
from greenroom.engines.identity import file_identity
from greenroom.engines.usage import Usage, from_usage
from greenroom.errors import LoadFailed
from greenroom.process.spawn import Command

# Starts a worker program of ours by its name, under any Python.
LAUNCH: Final = str(Path(__file__).parent.parent / "workers" / "launch.py")
# Requests at once for a program of which nothing is known.
CONCURRENCY = 8
# The same for a provider, which serves more than an engine of this machine does.
REMOTE_CONCURRENCY: Final = 16

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


# Routes of their own that requests to models may use.
LLAMACPP_PATHS: Final = frozenset({"/completion", "/infill", "/tokenize", "/detokenize", "/apply-template"})
VLLM_PATHS: Final = frozenset({"/tokenize", "/detokenize", "/pooling", "/score"})


class Listens(Enum):
    """How the gateway reaches the engine. No other process can take a socket in our private directory."""

    PORT = "port"
    SOCKET = "socket"


class UsageSource(Enum):
    """How tokens are counted: from figures the engine always sends, or by asking for them."""

    TIMINGS = "timings"
    ASK = "ask"


class Split(Enum):
    """How a model lies on several GPUs: by the memory that is free on each, the same share on all, or whole parts."""

    PROPORTIONAL = "proportional"
    EQUAL = "equal"
    PARTS = "parts"


# Numbers of GPUs that divide the attention heads of most models.
SPLIT_COUNTS: Final = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine can do with one model. No field follows from another, nor from where the engine runs."""

    # None if only the running engine can tell; then any request is passed to it.
    abilities: frozenset[Ability] | None = None
    # It can leave the GPU and keep its weights in host memory.
    can_sleep: bool = False
    # It reuses prompt prefixes between requests of one tenant and tag only. False: it reuses none. None: not known.
    keeps_prefixes: bool | None = None
    # It reuses other things that it computed, such as parts of pictures, for any caller.
    keeps_results: bool = False
    # It sizes itself by the GPU memory it sees while it starts; the core starts it alone on each of its GPUs.
    sizes_itself: bool = False
    # It can be spread over several GPUs; None: it cannot.
    can_split: Split | None = None
    # In equal shares: the numbers of GPUs it can be spread over.
    split_counts: tuple[int, ...] = SPLIT_COUNTS
    # In whole parts: MiB of each by its name, and what every GPU needs beside them and beside what one GPU would.
    parts: Mapping[str, int] = field(default_factory=dict)
    beside_mib: int = 0
    # It takes all that it is given, so what is measured says nothing about its need.
    fills_claim: bool = False
    # It loads its weights with its first request, so what is measured only counts where it is more than the estimate.
    loads_later: bool = False
    # It only sleeps where it has left a GPU: on a machine without one it is unloaded instead.
    sleeps_off_gpu_only: bool = False
    # The argument or variable of the operator without which it could sleep.
    kept_awake_by: str | None = None
    # How many slots it has that requests can name by `id_slot`, as llama.cpp does; each holds its last prompt.
    prompt_slots: int = 0
    # It runs elsewhere and is paid for: it takes no memory here, never sleeps and never leaves.
    is_remote: bool = False
    # As configured or as its files tell; the catalogue reads it.
    quantization: str | None = None


@dataclass(frozen=True, slots=True)
class LaunchPlace:
    """Where an engine listens, and the devices it may use. `gpus` are those it may see, in the order it counts them;
    None: this machine has none to plan with. `total_mib` and `free_mib` are the memory of each of them and what of it
    is really free, in that order."""

    claim: Claim
    port: int | None = None
    socket: str | None = None
    gpus: tuple[DeviceId, ...] | None = None
    total_mib: tuple[int, ...] = ()
    free_mib: tuple[int, ...] = ()

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
    None: this machine has none to plan with."""

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


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """What an engine tells of its KV cache: the share in use, and tokens looked up in it and found since its start.
    Then how large it is: in tokens, or in bytes. What it does not tell is None."""

    kv_used: float
    prefix_queries: int | None = None
    prefix_hits: int | None = None
    kv_tokens: int | None = None
    kv_bytes: int | None = None


class Describing(ABC):
    """What every engine says about itself and its models. The defaults are for one of which nothing more is known."""

    # The name in the configuration, and that of the entry point.
    name: str
    usage_source: UsageSource = UsageSource.ASK
    # It refuses requests for another model than it was started with, so each is sent with that name.
    checks_model_name: bool = False
    # The field of a request by which it keeps prefixes apart; None: the headers of `keeps_prefixes` do.
    salt_field: str | None = None
    # Its own paths that may be used behind /upstream, as in `routes`, where others control it; None: all of them.
    upstream_paths: tuple[str, ...] | None = None
    # Paths of APIs other than OpenAI's that it answers itself. What it does not is translated to chat, or refused.
    speaks: frozenset[str] = frozenset()
    # Fields of requests by which it is told of another host to connect to. What callers say there is not passed on.
    peer_fields: frozenset[str] = frozenset()
    # It refuses chats with tools of other types than `function`, most of which only servers of providers know.
    takes_functions_only: bool = False
    # It fetches media that requests name, so those to its own paths behind /upstream are looked into, too.
    fetches_media: bool = False
    # Its answers keep to a `response_format` of JSON, whatever the model says.
    keeps_json: bool = False
    # Where it tells figures of its cache; None if it does not.
    metrics_path: str | None = None
    # Where it tells how far a request is: GET <progress_path>?request=ID → {"progress": 0..1}, by X-Request-Id.
    progress_path: str | None = None

    def facts(self, model: Model) -> EngineFacts:
        """What it can do with this model. Reads file headers and never raises."""
        return EngineFacts()

    def estimate(self, model: Model, gpus: int) -> Estimate | None:
        """Memory it will take when ready on `gpus` GPUs, 0 for the host; None if nothing indicates it. Reads file
        headers and never raises: a missing or bad file fails its own load."""
        return None

    def unusable(self, model: Model) -> str | None:
        """Why a load would refuse its files, as far as they tell; None if they can be loaded. Never raises. Reads
        headers. A `path` that is not there is told elsewhere."""
        return None

    def estimate_asleep(self, model: Model, gpus: int) -> Estimate | None:
        """Memory it will take when asleep after it ran on `gpus` GPUs; None if nothing indicates it. Never raises."""
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
        Looks at files, quickly, and never raises: it is asked whenever the status is shown."""
        return None

    def usage(self, tail: bytes, *, stream: bool) -> Usage | None:
        """Tokens of an answer, from its last bytes; None if they do not tell."""
        return from_usage(tail)

    def cache_figures(self, metrics: bytes, model: Model) -> CacheFigures | None:
        """The figures in what `metrics_path` answered; None if there are none. Never raises."""
        return None


class CallEngine(Protocol):
    """A call to a running engine: method, target and JSON body → status and body. Raises OSError or ValueError."""

    @property
    def notes(self) -> dict[str, float]:
        """What the engine's class keeps of this process from one call to the next."""

    async def __call__(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]: ...


async def asked(call: CallEngine, method: str, target: str, body: bytes = b"") -> bytes:
    """The body of an answer with status 200. Raises LoadFailed for any other, OSError or ValueError."""
    status, answer = await call(method, target, body)
    if status != 200:
        said = answer[:200].decode("utf-8", "replace")
        raise LoadFailed(f"it answered {status} to {target.partition('?')[0]}" + (f": {said}" if said else ""))
    return answer


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
    def options(self, model: Model, gpus: tuple[DeviceId, ...] | None, claim: Claim) -> Mapping[str, object]:
        """Options that the worker runs this model with. `claim` has its MiB on each of its GPUs, as planned."""


class RemoteEngine(Describing):
    """No process of ours: a provider's API over TLS, which answers as OpenAI's does. Its models take no memory here,
    have no files and are ready at once; `runtime/moves/mover.py` makes the connections."""

    name = "remote"
    hosted: Literal[False] = False
    # A provider's own paths are not passed through: they would be called with the gateway's key.
    upstream_paths = ()

    def facts(self, model: Model) -> EngineFacts:
        return EngineFacts(is_remote=True)

    def estimate(self, model: Model, gpus: int) -> Estimate | None:
        return Estimate((), "remote")

    def concurrency(self, model: Model) -> int:
        return model.concurrency or REMOTE_CONCURRENCY


Engine = ProcessEngine | HostedEngine | RemoteEngine


def equal_counts(facts: EngineFacts) -> tuple[int, ...]:
    """The numbers of GPUs over which the core may spread a model in equal shares; empty if shares may differ."""
    return facts.split_counts if facts.can_split is Split.EQUAL else ()


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
