"""What an operator can say. The one source of option names, defaults and the sentence that explains each.

The JSON schema, `config.example.yaml` and the reference in the docs are generated from these classes. Nothing here
reads files: `loader.py` does. Nothing here decides: unknown keys, wrong types and broken rules (`rules.py`) are
refused, meaning is given elsewhere.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from greenroom.config import coresidency, rules
from greenroom.config.kinds import (
    COUNT_MAX,
    Count,
    CountFromZero,
    EnginePort,
    FactorFromZero,
    LeaseSeconds,
    LiftSeconds,
    LookSeconds,
    Mib,
    MibAboveZero,
    ModelId,
    Name,
    NotBool,
    Overtakes,
    RoutePattern,
    Seconds,
    SecondsAboveZero,
    TenantName,
    TenantWeight,
)
from greenroom.config.kinds import RESERVED_IDS as RESERVED_IDS
from greenroom.config.kinds import Section as Section
from greenroom.config.report import break_on
from greenroom.config.server_section import ApiKey as ApiKey
from greenroom.config.server_section import Heartbeat as Heartbeat
from greenroom.config.server_section import Server as Server

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]

PRIORITY_NAMES = {"high": 0, "normal": 1, "low": 2}


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class Group(Section):
    """Models that share a rule. Models in no group are one more group, with the defaults below."""

    members: tuple[ModelId, ...]
    """Its models, by id; a model is in one group at most."""
    swap: bool = True
    """Only one member is ready at a time."""
    exclusive: bool = True
    """A member that comes sends the members of all other groups away."""
    persistent: bool = False
    """Members of other groups do not send its members away."""


class Matrix(Section):
    """Sets of models that may be ready together; a set allows every part of it too."""

    vars: dict[Name, ModelId] = {}
    """Short names for models, to be used in sets and evict_costs; they win over ids."""
    evict_costs: dict[Name, Count] = {}
    """What sending a model away costs, by short name or id; 1 when not given. The set that costs least is chosen."""
    sets: dict[Name, str]
    """Sets by name: a & b is both together, a | b one of them, +name another set, ( ) as needed; first wins ties."""


class Company(Section):
    """Who may be ready together: groups or a matrix, one of them."""

    groups: dict[Name, Group] | None = None
    """Groups by name; {} has one model ready at a time."""
    matrix: Matrix | None = None
    """Sets of models. A model in no set is ready alone."""

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        break_on(coresidency.of_company(self))
        return self


class Scheduler(Section):
    """Who goes next, and how many may wait."""

    policy: str = "default"
    """Who goes first and when models change places: default, fifo, or one that an installed package registers."""
    swapper: str = "memory"
    """Who has to leave for a newcomer: memory, coordinator (idle ones only), or one that an installed package has."""
    queue_depth_max: Count = 1_000
    """Requests that may wait at once; one more is answered 503 queue_full with Retry-After."""
    overtakes_max: Overtakes = 8
    """How often requests for a ready model may go before an older one for a cold model once its batch is over."""
    residency_swaps: FactorFromZero = 2
    """While others wait a model stays ready for at least this many times as long as bringing it took."""
    batch_swaps: FactorFromZero = 5
    """And serves a batch of at most this many times as long as it takes to bring it and to end its answers."""
    lift_s: LiftSeconds = 60
    """Waiting this long lifts a request by one class of priority."""
    deadline_high_s: SecondsAboveZero = 5
    """Waiting this long, a request of high priority insists on its model; never later than server.wait_max_s."""
    deadline_normal_s: SecondsAboveZero = 60
    """The same for normal priority."""
    deadline_low_s: SecondsAboveZero = 240
    """The same for low priority."""
    recency_s: SecondsAboveZero = 600
    """How long ago requests still count, to a third, for how likely a model is to be asked for again."""
    tenant_weights: dict[TenantName, TenantWeight] = {}
    """Shares between tenants who wait for the same model; 1 for those who are not named."""
    backoff_s: SecondsAboveZero = 5
    """Pause after a first failed load; doubled with each further one."""
    backoff_max_s: SecondsAboveZero = 300
    """Longest pause between failed loads."""
    keep_alive_max_s: Seconds | None = None
    """The longest `keep_alive` a caller gets; -1, which is for ever, becomes this too. No bound when not given."""
    fit_memory: bool = True
    """Whether models have to fit into memory together; false: company alone says who may be ready at once."""
    company: Company | None = None
    """Rules about who may be ready together, as groups or as a matrix; without any only memory counts."""

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        break_on(rules.of_scheduler(self))
        return self


class Gpu(Section):
    """A simulated GPU: a budget without hardware."""

    memory_mib: MibAboveZero
    """Its memory."""
    margin_mib: Mib = 512
    """Memory that is never planned with, for drivers and contexts."""


class Memory(Section):
    """How memory is seen: where the figures of GPUs come from, and what is kept free."""

    probe: Literal["auto", "nvml", "file", "none"] = "auto"
    """nvml: NVIDIA's own figures; file: GPUs that a file describes; none: no GPUs; auto: nvml where it works."""
    file: str | None = None
    """probe file: a JSON file that describes GPUs and what others use of them, read at every look."""
    look_every_s: LookSeconds = 5
    """GPUs are looked at this often, besides whenever something has happened."""
    gpu_margin_mib: Mib = 512
    """Memory of each GPU that is never planned with, for drivers and contexts."""
    green_room_mib: Mib | None = None
    """Host memory for models that are asleep; what models may use of the host when not given."""
    spare_worker: bool = True
    """Keep a worker ready for each Python that hosts models: the next start, also after a crash, takes no imports."""


class StayWarm(Section):
    """How long a model stays ready without a request, by its category, where neither it nor its caller says."""

    llm_s: Seconds = 300
    """Language models, and whatever has no category of its own; 0 = for ever, as for the others."""
    vision_s: Seconds = 60
    """Models that look at images."""
    diffusion_s: Seconds = 900
    """Models that make images; they take longest to load."""


class Leases(Section):
    """Memory for other programs, and who else may use these GPUs."""

    store: str | None = None
    """redis://… or rediss://… where several gateways or hosts share GPUs; kept by this gateway when not given."""
    host: Name | None = None
    """The name of this machine in that store; its own name when not given."""
    ttl_s: LeaseSeconds = 30
    """A holder that is not heard of for this long has lost its lease."""
    wait_max_s: Seconds = 3_600
    """The longest that a lease may be waited for."""

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        break_on(rules.of_leases(self))
        return self


class Host(Section):
    """This machine's memory, which is the budget where there are no GPUs."""

    memory_mib: MibAboveZero | None = None
    """Memory models may use; three quarters of the machine's when not given."""
    margin_mib: Mib = 0
    """Memory of that which is never planned with."""


class Ports(Section):
    """Ports for engines that listen on TCP; they are bound to loopback."""

    first: EnginePort = 21_000
    """First port of the range."""
    last: EnginePort = 21_999
    """Last port of the range."""

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        break_on(rules.of_ports(self))
        return self


class Log(Section):
    """What is written to standard error. LOG_LEVEL and LOG_FORMAT in the environment win."""

    level: LogLevel = LogLevel.INFO
    """debug, info, warning or error."""
    format: LogFormat = LogFormat.TEXT
    """text for people, json for machines."""


class Model(Section):
    """One model: what callers ask for, which engine runs it, what it needs."""

    engine: Literal["llamacpp", "transformers", "command"] | None = None
    """llamacpp, transformers or command; inferred from path (a .gguf file or a folder) or cmd when not given."""
    path: str | None = None
    """llamacpp, transformers: the model file, or the folder with config.json and safetensors; relative paths start at
    the folder of the configuration file."""
    cmd: str | tuple[str, ...] | None = None
    """command: the program and its arguments, split like a shell would, never run by one. ${PORT} is a free port;
    ${GPUS}, ${GPU_COUNT} and ${TENSOR_SPLIT} are its GPUs, how many, and the MiB on each: where none of these stands it
    is never spread over several."""
    cmd_stop: str | tuple[str, ...] | None = None
    """command: a program that stops the engine, instead of SIGTERM; ${PID} and ${PORT} are replaced."""
    check_endpoint: str = "/health"
    """command: path that answers 200 once the engine is ready; "none" when the process being up is enough."""
    listener: Literal["own", "any"] = "own"
    """command: own: only the engine's own process tree may hold the port; any: anybody (containers of a daemon)."""
    env: dict[str, str] = {}
    """Further environment variables of the engine; of the gateway's own it gets only PATH, HOME, CUDA_… and such."""
    cwd: str | None = None
    """Working directory of the engine."""
    program: str | None = None
    """llamacpp: the llama-server binary to run; otherwise the one on PATH, otherwise the embedded build."""
    python: str | None = None
    """llamacpp, transformers: Python interpreter that has the engine's packages; the gateway's own when not given."""
    ctx_size: CountFromZero = 4096
    """llamacpp, transformers: context length in tokens; 0 takes the model's own."""
    cache_type_k: CacheType = "f16"
    """llamacpp: how the keys of the KV cache are kept."""
    cache_type_v: CacheType = "f16"
    """llamacpp: how its values are kept; anything but f16, bf16 and f32 needs flash attention."""
    n_gpu_layers: Annotated[int, Field(ge=-1, le=COUNT_MAX), NotBool] = -1
    """llamacpp: layers on the GPU; -1 puts all there if there is one."""
    flash_attn: Literal["auto", "on", "off"] = "auto"
    """llamacpp: flash attention."""
    parallel: Annotated[int, Field(ge=1, le=256), NotBool] = 4
    """llamacpp: requests answered at once; they share the context."""
    threads: Count | None = None
    """llamacpp, transformers: CPU threads; the engine's own choice when not given."""
    embedding: bool = False
    """llamacpp, transformers: serve embeddings instead of text."""
    reranking: bool = False
    """llamacpp: serve /v1/rerank instead of text."""
    args: tuple[str, ...] = ()
    """llamacpp: further arguments for llama-server, as they are."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """transformers: the kind of numbers its weights are kept in; auto takes the files' own."""
    cache_tokens: Count | None = None
    """transformers: tokens that the KV cache holds for all requests together; four contexts when not given."""
    isolate: bool = False
    """transformers: a worker process of its own, so that no other model's fault can reach it, nor its own them."""
    trust_remote_code: bool = False
    """transformers: run Python code that lies in the model's folder. Only for folders you trust like a program."""
    allow_pickle: bool = False
    """transformers: load .bin files, which can run any code. Only for folders you trust like a program."""
    skip_check: bool = False
    """transformers: serve it without the comparison with plain Transformers, which refuses what answers otherwise."""
    aliases: tuple[ModelId, ...] = ()
    """Other ids this model answers to."""
    name: str | None = None
    """A name for people, shown in listings."""
    description: str | None = None
    """A sentence for people, shown in listings."""
    unlisted: bool = False
    """Leave it out of /v1/models; it can still be asked for."""
    metadata: dict[str, JsonValue] = {}
    """Anything; copied to listings."""
    use_model_name: str | None = None
    """The model name sent to the engine instead of the id asked for."""
    strip_params: tuple[str, ...] = ()
    """Top-level request fields removed before the engine sees them."""
    set_params: dict[str, JsonValue] = {}
    """Top-level request fields set to these values whatever the caller sent."""
    routes: tuple[RoutePattern, ...] = ()
    """Paths of its engine that every key may use behind /upstream/MODEL; * is one part, ** at the end all that follow.
    Keys with admin may use all."""
    memory_mib: Mib | None = None
    """Memory it needs when ready, on a GPU or, without GPUs, on the host; estimated from the file when not given."""
    host_memory_mib: Mib = 0
    """Host memory it needs besides, when it is on a GPU."""
    gpu_memory_budget_mib: MibAboveZero | None = None
    """At most so much GPU memory is planned for it, whatever is estimated or was measured."""
    device: Literal["auto", "cpu"] = "auto"
    """cpu: it runs on the host alone, also where there are GPUs."""
    devices: tuple[str, ...] = ()
    """Devices it must be placed on (gpu0, gpu1 or a GPU's UUID; host); any when not given."""
    concurrency: Count | None = None
    """Requests it answers at once; further ones wait. The engine's own number when not given."""
    priority: Literal["high", "normal", "low"] | Annotated[int, Field(ge=0, le=100), NotBool] = "normal"
    """Priority of its requests when they name none; lower numbers go first (high 0, normal 1, low 2)."""
    category: Literal["llm", "vision", "diffusion"] = "llm"
    """What kind of model it is: how long it stays warm depends on it, see stay_warm."""
    ttl_s: Seconds | None = None
    """Unload after this long without a request, unless its caller said keep_alive; 0 = never; else see stay_warm."""
    pinned: bool = False
    """Never evicted and never unloaded for being idle."""
    preload: bool = False
    """Loaded at start, and again after a crash, as long as there is room."""
    load_timeout_s: SecondsAboveZero = 600
    """A load that is not ready by then has failed."""
    stop_timeout_s: SecondsAboveZero = 10
    """How long the engine may take to stop before it is killed."""
    grace_s: Seconds = 30
    """How long running answers may go on when the model is unloaded by an operator or a changed configuration."""

    @model_validator(mode="before")
    @classmethod
    def _infer_engine(cls, said: Any) -> Any:
        """After this `engine` is never None: a model whose engine is in doubt is refused."""
        if isinstance(said, dict) and said.get("engine") is None and (engine := rules.inferred_engine(said)):
            return {**said, "engine": engine}
        return said

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        break_on(rules.of_model(self))
        return self


class Config(Section):
    """The whole file."""

    server: Server = Server()
    scheduler: Scheduler = Scheduler()
    gpus: tuple[Gpu, ...] = ()
    """Simulated GPUs, gpu0, gpu1 …, instead of those that memory.probe finds; a budget without hardware."""
    memory: Memory = Memory()
    stay_warm: StayWarm = StayWarm()
    leases: Leases = Leases()
    host: Host = Host()
    ports: Ports = Ports()
    log: Log = Log()
    state_dir: str = "~/.local/state/greenroom"
    """A directory of its own for the gateway's lock, identity and sockets; one gateway a directory."""
    model_roots: tuple[str, ...] = ()
    """Folders below which files of models must lie once links are resolved; anywhere when empty."""
    macros: dict[str, JsonValue] = {}
    """Names for values used below as ${name}."""
    models: dict[ModelId, Model] = {}
    """Models by id."""

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        break_on(rules.of_config(self))
        return self
