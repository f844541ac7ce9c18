"""What the management API answers, as published shapes. The OpenAPI schema is generated from these classes.

Owns names and meaning of fields; `snapshot.py` fills them in. Never reads the gateway.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from greenroom.access.keys import parse_priority
from greenroom.base.names import public_name
from greenroom.config.marks import Described

Tier = Literal["ready", "asleep", "cold"]


def _read_priority(said: object) -> int:
    """Raises BadRequest, which passes through validation; validation's own error would list every type of the field."""
    if isinstance(said, float) and said.is_integer():
        said = int(said)
    return parse_priority(said, param="priority")


Priority = Annotated[str | int, BeforeValidator(_read_priority)]
# A model as callers know it.
ModelName = Annotated[str, AfterValidator(public_name)]


# The five words that clients of llama.cpp know. Everywhere else a model's place is its tier.
class StatusWord(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"
    FAILED = "failed"


class View(Described):
    model_config = ConfigDict(frozen=True)


# --- /v1/models -----------------------------------------------------------------------------------------------------


class ModelStatus(View):
    value: StatusWord
    eta_s: float | None = None
    """Seconds until it is loaded, while it is loading and if that was learned."""
    retry_in_s: float | None = None
    """Seconds until a failed model is tried again."""
    last_error: str | None = None
    """Why its last load failed or how its process ended, until a load succeeds."""


class ModelCard(View):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["greenroom"] = "greenroom"
    name: str | None
    description: str | None
    aliases: list[str]
    capabilities: list[str] | None
    """Its `abilities` (chat, embeddings, images …); null when only its engine knows."""
    status: ModelStatus
    meta: dict[str, Any]
    """The operator's `metadata`, with `tier`, `quantization` and `memory_mib` (what it needs when ready)."""


class ModelList(View):
    object: Literal["list"] = "list"
    data: list[ModelCard]


# --- /health --------------------------------------------------------------------------------------------------------


HealthWord = Literal["healthy", "draining", "failed", "saturated", "out_of_memory"]


class Health(View):
    status: HealthWord
    """draining: shutting down; failed: no model can be loaded at present, or the scheduler or its policy raised an
    error within the last minute, which the log has; saturated: the queue is full; out_of_memory: the last load of a
    model ran out of GPU memory, until it may be tried again."""
    leaseStore: Literal["up", "down"] | None  # noqa: N815
    """Where GPUs are shared with other gateways: while their store is down, only models that are loaded are served."""
    keyFile: Literal["ok", "stale"] | None  # noqa: N815
    """Where keys are read from a file. stale: it cannot be used, and the keys that were read before count; the status
    says why."""
    uptime: int
    modelsLoaded: int  # noqa: N815
    queueDepth: int  # noqa: N815


class ProbeAnswer(View):
    """The answer of /healthz and /readyz."""

    status: Literal["ok", "starting", "draining", "no_version", "catching_up", "saturated"]


# --- /api/v1/status -------------------------------------------------------------------------------------------------


class QueueView(View):
    depth: int
    max: int
    avg_wait_ms: float | None
    """Of requests that were served lately; null before the first."""


class DeviceView(View):
    id: str
    kind: Literal["gpu", "host"]
    capacity_mib: int
    margin_mib: int
    """Never planned with."""
    used_mib: int
    """Held by models and leases."""
    free_mib: int
    """What can still be planned with; promised memory is not free."""
    foreign_mib: int
    """Used by processes that belong to no model and no lease."""


class MovingView(View):
    kind: Literal["load", "wake", "sleep", "prepare", "unload"]
    since_s: float | None
    """Null while it waits for memory that is being freed."""
    eta_s: float | None


class SlotView(View):
    id: str
    model: ModelName
    revision: int
    tier: Tier
    moving: MovingView | None
    leaving_to: Tier | None
    """Takes no further requests and goes there when its answers are done."""
    in_flight: int
    concurrency: int
    last_used_s_ago: float | None
    last_priority: int | None
    """The priority of its last request, lower goes first; null before the first."""
    memory: dict[str, int]
    """MiB by device."""
    unload_in_s: float | None
    """Seconds until it leaves because it is idle; null while it answers, and if it has no idle limit."""
    pid: int | None


class NeedView(View):
    """The memory its next load is planned with, with the figures behind it."""

    gpu_mib: int
    host_mib: int
    source: str
    """declared, measured, raised (it ran out of memory before), budget (gpu_memory_budget_mib), what it was estimated
    from (gguf, safetensors, file size, name), or unknown."""
    measured_gpu_mib: int | None
    """The most it was seen to use on GPUs; null if that was never seen."""
    measured_host_mib: int | None
    estimated_gpu_mib: int | None
    """Estimated from its file or its name; null if that is impossible, or memory_mib was declared."""
    estimated_host_mib: int | None
    estimate_error: float | None
    """How far the estimate was from what was measured: 0.05 is 5 % too much."""


class CacheView(View):
    """What its engine tells of its KV cache, if it tells anything."""

    kv_used: float
    """The share in use, from 0 to 1; of several slots the fullest."""
    prefix_queries: int | None
    """Prompt tokens looked up in it since its slots started; null where its engine does not count them."""
    prefix_hits: int | None
    """Of those, tokens that were there."""
    kv_tokens: int | None
    """How many tokens it holds, of all slots together; null where its engine does not tell."""


class LastError(View):
    code: str
    message: str


class ModelView(View):
    id: str
    tier: Tier
    status: StatusWord
    engine: str
    capabilities: list[str] | None
    """Its `abilities`; null when only its engine knows."""
    quantization: str | None
    """As configured, else as its files tell."""
    revision: int
    pinned: bool
    priority: int
    ttl_s: float
    in_flight: int
    waiting: int
    concurrency: int | None
    """Requests answered at once; null while only the engine knows."""
    last_used_s_ago: float | None
    memory: dict[str, int]
    """MiB by device, of all its slots."""
    need: NeedView
    unload_in_s: float | None
    """Seconds until the last of its slots leaves because it is idle, if that is known."""
    moving: MovingView | None
    slots: list[SlotView]
    failures: int
    """Failed loads and crashes since it last answered."""
    retry_in_s: float | None
    """Seconds until it is tried again, while requests for it are refused after repeated failures."""
    last_error: LastError | None
    """Why its last load failed or how its process ended, until a load succeeds."""
    missing: str | None
    """What its engine lacks on this machine and what to type, for admins; null if nothing is known to be missing."""
    cache: CacheView | None
    no_sleep: str | None
    """Why it is unloaded where its engine could sleep; null if it sleeps, or its engine never does."""
    versioned: bool
    """Under version control: its weights can be changed while it serves."""
    pid: int | None


class ModelStatusList(View):
    models: list[ModelView]


class WaitingView(View):
    id: str
    position: int
    model: ModelName
    tenant: str
    waited_s: float


class ProbeView(View):
    """How memory is seen."""

    kind: Literal["nvml", "file", "simulated", "none"]
    looked_s_ago: float
    failure: str | None
    """Why the last look failed; the figures are those of the one before."""
    pids_visible: bool
    """False: on some GPU processes cannot be seen (a container). What is used beyond all claims is foreign there."""


class GpuView(View):
    id: str
    index: int
    """In the order of the PCI bus; a model's `devices` may call it gpu0, gpu1 …"""
    name: str
    total_mib: int
    """What can be allocated, without what the driver keeps for itself."""
    used_mib: int
    """By all processes, as the driver reports it; on a simulated GPU, what models and leases hold."""
    foreign_mib: int
    """Of that, by processes that belong to no model and no lease."""
    free_mib: int
    """What can still be planned with, after claims, promises, foreign processes and the margin."""
    weights_mib: int
    """Weights of models that are ready, as far as they are known."""
    kv_mib: int
    """Their KV caches, in the same way."""
    other_mib: int
    """The rest of `used_mib`: contexts, buffers, other processes, and models of which nothing is known."""
    utilisation: int | None
    """Percent of the time that something ran on it; null where that cannot be seen."""
    temperature_c: int | None


class ConnectionsView(View):
    open: int
    stats: dict[str, int]
    """What the edge counted since start."""


class LeaseStoreView(View):
    """The store by which GPUs are shared with other gateways."""

    up: bool
    since_s: float
    why: str | None
    """Why it cannot be used."""
    grace_left_s: float
    """A store that is new, or lost its data, grants nothing for this long, so that holders can renew first."""
    slots_without_lease: int
    """Models that run though the store has granted their memory elsewhere."""


class GreenRoomView(View):
    """Host memory of models that are asleep."""

    size_mib: int | None
    """`memory.green_room_mib`; null: as much as the host has."""
    used_mib: int
    """Held by models that are asleep, falling asleep or waking."""
    free_mib: int | None
    """What is left of its size, as far as the host has it."""
    models: list[ModelName]
    """Models that are asleep."""


class StatusView(View):
    version: str
    build: Literal["pure", "compiled"]
    """Whether the hot path runs as Python or as machine code."""
    started: str
    """RFC 3339."""
    uptime_s: float
    draining: bool
    addresses: list[str]
    queue: QueueView
    lease_store: LeaseStoreView | None
    """null where this gateway keeps leases itself."""
    key_problems: list[str]
    """What is wrong with the key file. Its last good keys count until it is mended."""
    devices: list[DeviceView]
    green_room: GreenRoomView
    probe: ProbeView
    gpus: list[GpuView]
    """What was seen at the last look; `devices` is what is planned with."""
    models: list[ModelView]
    other_slots: list[SlotView]
    """Slots of models that are no longer configured, and leases of other programs."""
    waiting: list[WaitingView]
    """The first in the queue, at most 100."""
    counters: dict[str, int]
    connections: ConnectionsView


# --- requests, decisions, logs --------------------------------------------------------------------------------------


class RequestView(View):
    """One request. Times are from its arrival, in seconds; what is not known yet is null."""

    id: str
    model: str
    asked_as: str
    tenant: str
    route: str
    arrived_at: float
    client: str | None
    stream: bool
    priority: int
    state: Literal["waiting", "serving", "done"]
    slot: str | None
    model_version: int | None
    """Which weights answer, of a model under version control; as its header says, unless heartbeats came first."""
    model_repo_id: str | None
    wait_s: float | None
    first_byte_s: float | None
    total_s: float | None
    status: int | None
    error_code: str | None
    error_message: str | None
    """The error as a key without `admin` sees it."""
    reason: str | None
    """What went wrong, for admin keys only."""
    details: str | None
    """The last lines of its engine, for admin keys only."""
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    """Prompt tokens that were not computed again; null where the engine does not tell."""
    gpu_time_ms: int | None
    """How long its engine computed; null where it does not tell."""
    audio_s: float | None
    """Seconds of sound that were heard or made; null where the engine does not tell."""
    pictures: int | None
    """Pictures that were made; null where the engine does not tell."""
    estimated: bool
    chunks: int


class RequestList(View):
    requests: list[RequestView]
    """Running ones, then ended ones, each with the newest first."""


DecisionKind = Literal["load", "wake", "sleep", "prepare", "unload", "abort", "reject", "cut", "recall"]


class DecisionList(View):
    decisions: list[dict[str, Any]]
    """Newest last. Each has `seq` (counted in this run), `at` (Unix time), `what` was decided, its subject, `why`."""


class LogLines(View):
    model: ModelName
    lines: list[str]
    """Oldest first."""


# --- orders ---------------------------------------------------------------------------------------------------------


class Order(Described):
    """The body of a request. No text is read as a number or a boolean, and no number as a boolean."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


# An array of JSON is a list, which a strict tuple would refuse.
FromList = Field(strict=False)


class GovernedOrder(Order):
    """An order that needs a token where operations are signed."""

    verifiedOpToken: Any = None  # noqa: N815
    """Proof that the operation was approved: an object or a text. Read where the configuration has `governance`, and
    ignored elsewhere; the header `X-Verified-Op-Token` may carry it instead."""


# --- errors ---------------------------------------------------------------------------------------------------------


class ErrorView(View):
    """Further fields may stand beside these."""

    message: str
    type: str
    code: str
    param: str | None
    details: str | None


class ErrorBody(View):
    error: ErrorView
