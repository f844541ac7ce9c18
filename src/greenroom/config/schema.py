"""Every option an operator can set: its name, its default and the sentence that explains it.

The JSON schema, `config.example.yaml` and the reference in the docs are generated from these classes. The sections of
a model, the scheduler and the server are in files of their own, each with its rules; the rules between sections are
below. Other packages import every section from here. Unknown keys, wrong types and broken rules are refused, however a
`Config` is made. Reads no files: `loader.py` does.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue

from greenroom.config import kinds
from greenroom.config.kinds import (
    Count,
    EnginePort,
    LeaseSeconds,
    LookSeconds,
    Mib,
    MibAboveZero,
    MibPerSecond,
    ModelId,
    Name,
    NotBool,
    Seconds,
    SecondsAboveZero,
    Section,
    StoreAddress,
)
from greenroom.config.marks import FILE, RESTART, Example, Variable, lower
from greenroom.config.reader import Problem
from greenroom.config.sections import tasks
from greenroom.config.sections.governance import Governance, Quorum
from greenroom.config.sections.keys import (
    ApiKey,
    LimitStore,
    RateLimits,
    TenantLimits,
    Tenants,
    equal_api_keys,
    requests_per_minute,
)
from greenroom.config.sections.model import PRIORITY_NAMES, Ability, CacheType, Model, Vllm
from greenroom.config.sections.profiles import ClientProfile, Clients, Profile
from greenroom.config.sections.remotes import Remote, RemoteName
from greenroom.config.sections.scheduler import (
    Company,
    GroupSection,
    MatrixSection,
    SchedulerSection,
    problems_of_company,
)
from greenroom.config.sections.server import Heartbeat, Server
from greenroom.config.sections.tasks import Require, Task, Tasks
from greenroom.config.sections.versions import ModelVersions, Versions

# For drivers and contexts; the same for simulated GPUs and real ones.
GPU_MARGIN_MIB = 512


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class Gpu(Section):
    """A simulated GPU: a budget without hardware."""

    memory_mib: MibAboveZero
    """Its memory."""
    margin_mib: Mib = GPU_MARGIN_MIB
    """Memory that is never planned with, for drivers and contexts."""


class Memory(Section):
    """Where the figures of GPU memory come from, and what is kept free."""

    probe: Literal["auto", "nvml", "file", "none"] = "auto"
    """nvml: NVIDIA's own figures; file: GPUs described by a file; none: no GPUs; auto: nvml where it works."""
    file: Annotated[str | None, FILE] = None
    """probe file: a JSON file that describes GPUs and their use by other programs, read at every look."""
    look_every_s: LookSeconds = 5
    """How often GPUs are looked at, besides after every event."""
    gpu_margin_mib: Mib = GPU_MARGIN_MIB
    """Memory of each GPU that is never planned with, for drivers and contexts."""
    green_room_mib: Mib | None = None
    """Host memory for sleeping models; all host memory that models may use when not given."""
    spare_worker: bool = True
    """Keep a spare worker for each Python that hosts models: the next start, also after a crash, skips imports."""


class StayWarm(Section):
    """How long a model stays ready without requests, by category, if neither model nor caller says."""

    llm_s: Seconds = 300
    """Language models and models without a category; 0 = for ever, as for the others."""
    vision_s: Seconds = 60
    """Models that look at images."""
    embedding_s: Seconds = 300
    """Models that turn texts into vectors, or rank them."""
    diffusion_s: Seconds = 900
    """Models that make images; they take longest to load."""
    transcription_s: Seconds = 300
    """Models that write down speech."""
    speech_s: Seconds = 300
    """Models that speak."""


class Leases(Section):
    """Memory for other programs, and GPUs shared with other gateways."""

    store: StoreAddress | None = None
    """redis://… or rediss://… if several gateways or hosts share GPUs; kept by this gateway when not given."""
    host: Name | None = None
    """The name of this machine in that store; its own name when not given."""
    ttl_s: LeaseSeconds = 30
    """A holder that does not renew for this long loses its lease."""
    wait_max_s: Seconds = 3_600
    """The longest wait for a lease."""


class JobsSection(Section):
    """Requests that are answered later: how much of them is kept in state_dir."""

    keep_s: SecondsAboveZero = 86_400
    """How long a result is kept, and how long a job may wait for its model."""
    count_max: Count = 1_000
    """Jobs kept at once. Ended ones make room for new ones; if none has ended, new ones are answered 503."""
    store_mib: MibAboveZero = 1_024
    """Disk space for their requests and results. Those of ended jobs make room, of the tenant that keeps most first."""
    unfinished_per_key_max: Count | None = None
    """Jobs of one key, and of one tenant, that have not ended; half of count_max when not given. Further ones are
    answered 429. Their requests may take no larger share of store_mib."""

    @property
    def unfinished_max(self) -> int:
        return self.unfinished_per_key_max or max(1, self.count_max // 2)


class Images(Section):
    """Pictures that are answered as URLs of this server (response_format url), and are kept in state_dir."""

    keep_s: SecondsAboveZero = 3_600
    """How long a URL is served."""
    count_max: Count = 1_000
    """Pictures kept at once. The oldest make room for new ones, of the tenant that keeps most first."""
    store_mib: MibAboveZero = 512
    """Disk space for them. An answer that is larger is refused with 507."""


def _folder(said: str) -> str:
    if not said.strip():
        raise ValueError("an empty text is no folder; name one, such as /srv/models")
    return said


Folder = Annotated[str, AfterValidator(_folder)]


class LibrarySection(Section):
    """Models on disk below model_roots, which can be asked for by path or hub id without being configured."""

    roots: Annotated[
        tuple[Folder, ...],
        FILE,
        Example(["/srv/more-models"]),
        Variable("MODEL_BASE_PATH", "Folders of models, separated as in PATH; added.", adds=True),
        Variable("HF_HOME", "Its folder `hub` is added beside other folders of models.", adds=True),
        Variable("HF_HUB_CACHE", "The same folder, named itself; wins over HF_HOME.", adds=True),
        Variable("TRANSFORMERS_CACHE", "The same where neither of them is set.", adds=True),
    ] = ()
    """Further folders whose models can be asked for; MODEL_BASE_PATH and `serve --models` add to them. Unlike
    model_roots, they do not restrict the paths in models."""
    download: Annotated[bool, Variable("ENABLE_DOWNLOADS", "Whether a load by hub id fetches what is not on disk.")] = (
        False
    )
    """A load by hub id may fetch what is not on disk. Keys with admin may order downloads in any case."""
    hosts: Annotated[tuple[Name, ...], Example(["files.example.org"])] = ()
    """Hosts besides the hub's own that the URL of a download may name."""
    downloads_max: Annotated[int, Field(ge=1, le=16), NotBool] = 2
    """Downloads at the same time; further ones wait."""
    bandwidth_mib_s: Annotated[MibPerSecond | None, Example(50)] = None
    """MiB per second for all downloads together; unlimited when not given."""
    adhoc_models_max: Annotated[int, Field(ge=1, le=10_000), NotBool] = 100
    """Models outside of `models` that are remembered; those not used for longest leave."""
    exclusive: bool = True
    """Of these models, only one configuration of a path is ready at a time."""


class Runner(Section):
    """How this gateway names itself in /v1/capabilities."""

    id: Name | None = None
    """Its name; the name of its machine when not given."""
    type: Name | None = None
    """What it is; greenroom-VERSION when not given."""


class Host(Section):
    """This machine's memory, which is the budget if there are no GPUs."""

    memory_mib: Annotated[MibAboveZero | None, Example(6144)] = None
    """Memory models may use; three quarters of the machine's when not given."""
    margin_mib: Mib = 0
    """Part of it that is never planned with."""


class Ports(Section):
    """Ports for engines that listen on TCP; they are bound to loopback."""

    first: EnginePort = 21_000
    """First port of the range."""
    last: EnginePort = 21_999
    """Last port of the range."""

    def _problems(self) -> Iterator[Problem]:
        if self.first > self.last:
            yield Problem(("first",), f"may not be more than last ({self.last})")


def _level(text: str) -> str:
    return {"warn": "warning"}.get(text.lower(), text.lower())


class Log(Section):
    """Logging to standard error."""

    level: Annotated[LogLevel, Variable("LOG_LEVEL", "debug, info, warning or error.", _level)] = LogLevel.INFO
    """debug, info, warning or error."""
    format: Annotated[LogFormat, Variable("LOG_FORMAT", "text or json.", lower)] = LogFormat.TEXT
    """text for people, json for machines."""


class Config(Section):
    """The whole file."""

    server: Server = Server()
    scheduler: SchedulerSection = SchedulerSection()
    gpus: Annotated[tuple[Gpu, ...], RESTART] = ()
    """Simulated GPUs, gpu0, gpu1 …, instead of those found by memory.probe; a budget without hardware."""
    memory: Annotated[Memory, RESTART] = Memory()
    stay_warm: StayWarm = StayWarm()
    limits: Annotated[LimitStore, RESTART] = LimitStore()
    tenants: Annotated[
        Tenants,
        Example({"default": {"requests_per_minute": 50}, "lab": {"requests_per_minute": 500, "queue_depth_max": 100}}),
        Variable(
            "DEFAULT_RATE_LIMIT",
            "Requests per minute of each tenant without a limit of its own, as in 100req/min.",
            requests_per_minute,
            key="default.requests_per_minute",
        ),
        Variable(
            "TENANT_RATE_LIMIT_*",
            "The same for the tenant of this name; `default` wins over DEFAULT_RATE_LIMIT.",
            requests_per_minute,
            key="*.requests_per_minute",
        ),
    ] = {}
    """What each tenant may use, by its name; `default` is for tenants that are not named. Each of those has the limits
    to itself if callers have keys; without keys, where anyone can make up a name, they share them."""
    profiles: Annotated[
        dict[Name, Profile],
        Example({"editors": {"keys": ["team-*"], "default_model": "chat", "clients": {"bot-*": {"priority": "low"}}}}),
    ] = {}
    """What callers get without asking and may ask at most, by key, tenant and client; see docs/profiles.md."""
    clients: Clients = Clients()
    leases: Annotated[Leases, RESTART] = Leases()
    governance: Governance = Governance()
    jobs: JobsSection = JobsSection()
    images: Images = Images()
    library: LibrarySection = LibrarySection()
    versions: Versions = Versions()
    vllm: Vllm = Vllm()
    remotes: dict[RemoteName, Remote] = {}
    """Providers of models that run elsewhere, by a name of your own (see docs/remote.md)."""
    runner: Runner = Runner()
    host: Annotated[Host, RESTART] = Host()
    ports: Annotated[Ports, RESTART] = Ports()
    log: Log = Log()
    state_dir: Annotated[str, RESTART, FILE] = "~/.local/state/greenroom"
    """A directory of its own for the gateway's lock, identity, sockets, jobs and pictures; one gateway a directory."""
    model_roots: Annotated[tuple[Folder, ...], FILE, Example(["/srv/models"])] = ()
    """Model files must be below one of these folders once links are resolved; anywhere when empty. What is below them
    can be asked for by path or hub id without an entry in models (see library)."""
    macros: dict[str, JsonValue] = {}
    """Names for values used below as ${name}."""
    tasks: Annotated[
        Tasks,
        Example({"coding": {"candidates": ["chat", "writer"], "prefer_first_s": 10, "set_params": {"temperature": 0}}}),
    ] = {}
    """Names for purposes, which callers ask for like models, each with the models that can serve it; also read from
    tasks.yaml beside this file."""
    models: dict[ModelId, Model] = {}
    """Models by id."""

    @property
    def roots(self) -> tuple[str, ...]:
        """Folders whose models can be asked for without being configured."""
        return (*self.model_roots, *self.library.roots)

    def _problems(self) -> Iterator[Problem]:
        yield from kinds.clashes((name, model.aliases) for name, model in self.models.items())
        for problem in equal_api_keys(self.server.api_keys):
            yield Problem(("server", "api_keys", *problem.where), problem.message)
        yield from _company_problems(self)
        yield from _memory_problems(self)
        yield from _version_problems(self)
        for name, model in self.models.items():
            if model.remote is not None and model.remote not in self.remotes:
                known = ", ".join(self.remotes) or "none"
                yield Problem(("models", name, "remote"), f"there is no {model.remote} in remotes; there are: {known}")
        for problem in tasks.of_models(self.tasks, self.models, self.remotes):
            yield Problem(("tasks", *problem.where), problem.message)


def _company_problems(config: Config) -> Iterator[Problem]:
    company = config.scheduler.company
    if company is not None:
        aliases_of = {name: model.aliases for name, model in config.models.items()}
        for problem in problems_of_company(company, aliases_of):
            yield Problem(("scheduler", "company", *problem.where), problem.message)


def _memory_problems(config: Config) -> Iterator[Problem]:
    memory = config.memory
    if (memory.probe == "file") != (memory.file is not None):
        yield Problem(("memory", "file"), "goes with probe: file, and only with it")
    if config.gpus and memory.probe in ("nvml", "file"):
        yield Problem(("gpus",), f"are simulated and cannot be had beside memory.probe: {memory.probe}")


def _version_problems(config: Config) -> Iterator[Problem]:
    default = config.versions.default
    if default is not None and (default not in config.models or config.models[default].versions is None):
        yield Problem(("versions", "default"), f"there is no model {default} under version control (key `versions`)")
    if config.versions.state_file is not None and config.governance.is_on:
        yield Problem(
            ("versions", "state_file"),
            "does not go together with signed operations: whoever writes the file would change models without a token",
        )
