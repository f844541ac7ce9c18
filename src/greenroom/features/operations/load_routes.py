"""`/v1/models/load`, `/v1/models/unload`, `/api/v1/operations`: order a load, watch it, take a model away. For admins.
`/api/v1/models/{id}/pin`: keep a model where it is, or let it leave again, without a reload.

Owns the shapes of requests and answers. Statuses are `loading`, `completed` and `failed`; inside they are those of all
operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Final, Literal

from fastapi import Query
from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from greenroom.access.keys import Permission
from greenroom.api.asgi import caller_of, order_to_fetch, owner_of
from greenroom.api.declared import NeededOperation, Routes, SignedCall, by_body, get, of_all, post
from greenroom.api.listing import ModelPath, addressed, refuse_task
from greenroom.api.overview import refuse_while_draining
from greenroom.api.views import GovernedOrder, View
from greenroom.base.names import public_name
from greenroom.config.kinds import COUNT_MAX, MIB_MAX
from greenroom.errors import Unsupported
from greenroom.features.operations.loads import ROUTE, UNLOAD_ROUTE, LoadFacts, Loads
from greenroom.features.operations.moves import expect_movable
from greenroom.library.orders import DownloadOrder, OrderRules, read_order
from greenroom.runtime.adhoc_model import ModelOptions, check_backend
from greenroom.runtime.models import Models
from greenroom.runtime.operations.files import Operation, OperationError, OperationKind, OperationStatus
from greenroom.runtime.shell import Shell
from greenroom.serving.tasks import Tasks

OPERATIONS: Final = "/api/v1/operations"
LISTED_MAX: Final = 1_000
NAME_CHARS_MAX: Final = 4_096
Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]
Force = Annotated[bool, Query(description="Also if it is pinned.")]
Status = Literal["loading", "completed", "failed"]


class _Named(GovernedOrder):
    """`modelId` or `model`."""

    modelId: Name | None = None  # noqa: N815
    """An id, an alias, a path below a root, or an id of the hub."""
    model: Name | None = None
    """The same, by its other name."""

    @model_validator(mode="after")
    def _names_one(self) -> _Named:
        if (self.modelId is None) == (self.model is None):
            raise ValueError("say the model's name as modelId")
        return self

    @property
    def name(self) -> str:
        return self.modelId or self.model or ""


class LoadAsked(_Named):
    quantization: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """awq-4bit, gptq-4bit, fp16, bf16, or the name of a GGUF quantization such as Q4_K_M."""
    maxContextLength: Annotated[int, Field(ge=1, le=COUNT_MAX)] | None = None  # noqa: N815
    """Tokens of context."""
    gpuMemoryBudgetMB: Annotated[int, Field(ge=1, le=MIB_MAX)] | None = None  # noqa: N815
    """MiB of GPU memory that it may use."""
    evictModel: Name | None = None  # noqa: N815
    """A model that leaves for it, once this one is known and known to fit."""
    force: bool = False
    """That one leaves also if it is pinned."""
    backend: str | None = None
    """The engine; told by the files when not given."""
    device: Literal["cuda", "cpu"] | None = None

    @property
    def options(self) -> ModelOptions:
        return ModelOptions(
            backend=None if self.backend is None else check_backend(self.backend),
            device=self.device,
            quantization=self.quantization,
            ctx_size=self.maxContextLength,
            budget_mib=self.gpuMemoryBudgetMB,
        ).as_order


class LoadTaken(BaseModel):
    taskId: str  # noqa: N815
    status: Literal["loading"] = "loading"
    progress: float = 0.0
    eta: float | None = None
    """Seconds, by how long it took before."""


class LoadView(View):
    taskId: str  # noqa: N815
    status: Status
    modelId: str  # noqa: N815
    progress: float
    """From 0 to 1."""
    estimated: bool
    """`progress` is told by how long it took before, not by what was done."""
    eta: float | None = None
    """Seconds that are left."""
    gpuMemoryUsedMB: int | None = None  # noqa: N815
    loadTimeMs: int | None = None  # noqa: N815
    error: str | None = None
    errorCode: str | None = None  # noqa: N815


class UnloadAsked(_Named):
    grace_s: Annotated[float, Field(ge=0, le=3_600, allow_inf_nan=False)] | None = None
    """How long running answers may go on; the model's own `grace_s` when not given."""
    force: bool = False
    """Also if it is pinned."""


class UnloadView(BaseModel):
    modelId: str  # noqa: N815
    gpuMemoryFreedMB: int  # noqa: N815
    kvCacheFlushed: bool  # noqa: N815


class PinOrder(GovernedOrder):
    pinned: bool = True
    """False: it may be evicted, and leaves when it is idle."""


class Pinned(View):
    model: str
    pinned: bool


class MoveResult(View):
    gpu_mib: int
    """What a load took of GPUs, or what an unload freed."""
    took_s: float


class OperationView(View):
    """A row of the table of operations."""

    id: str
    """`taskId` or `job_id` where its own route tells more of it."""
    kind: OperationKind
    status: OperationStatus
    model: str
    key: str
    """The name of the API key that ordered it."""
    tenant: str
    created: float
    """Seconds since 1970, as the other times."""
    started: float | None = None
    ended: float | None = None
    error: OperationError | None = None
    result: MoveResult | None = None
    """Of a load or unload that is done."""


class OperationList(BaseModel):
    object: Literal["list"] = "list"
    data: list[OperationView]


def _load(call: SignedCall) -> NeededOperation:
    return load_of(call.named("modelId", "model"), call.names("evictModel"), call.text("quantization"))


def load_of(name: str, evicted: tuple[str, ...] = (), quantization: str | None = None) -> NeededOperation:
    """A load, which may fetch the model first."""

    def read_fetch(rules: OrderRules) -> DownloadOrder:
        return read_order(rules, model=name, quantization=quantization)

    return NeededOperation("model-load", name, evicted, read_fetch=read_fetch, quantization=quantization)


@dataclass(frozen=True)
class LoadRoutes(Routes):
    _shell: Shell
    _models: Models
    _tasks: Tasks
    _loads: Loads

    @post(ROUTE, needs=Permission.LOAD, signed=_load, status_code=202)
    async def start_load(self, request: Request, response: Response, asked: LoadAsked) -> LoadTaken:
        """Make a model ready. Returns at once; `GET /v1/models/load/{taskId}` tells how far it is."""
        refuse_while_draining(self._shell)
        refuse_task(self._tasks, self._shell.catalog, request, asked.name)
        evict = () if asked.evictModel is None else (asked.evictModel,)
        taken = await begin(self._loads, request, asked.name, asked.options, evict, force=asked.force)
        response.headers["location"] = f"{ROUTE}/{taken.taskId}"
        return taken

    @get(ROUTE + "/{task_id}", needs=Permission.LOAD)
    async def show_load(self, request: Request, task_id: str) -> LoadView:
        """One load as it is now; it is kept for an hour after its end."""
        loads, caller = self._loads, caller_of(request)
        row = loads.get(task_id, None if caller.models is None else caller.name)
        progress, facts = await loads.progress(row), await loads.facts(row)
        return LoadView(
            taskId=row.id,
            status="completed" if row.status is OperationStatus.DONE else "failed" if row.status.is_over else "loading",
            modelId=row.model,
            progress=round(progress.share, 3),
            estimated=progress.is_estimated,
            eta=None if progress.eta_s is None else round(progress.eta_s, 1),
            gpuMemoryUsedMB=facts.gpu_mib,
            loadTimeMs=None if facts.took_s is None else round(1000 * facts.took_s),
            error=None if row.error is None else row.error.message,
            errorCode=None if row.error is None else row.error.code,
        )

    @post(UNLOAD_ROUTE, needs=Permission.LOAD, signed=by_body("model-unload", "modelId", "model"))
    async def unload_model(self, request: Request, asked: UnloadAsked) -> UnloadView:
        """Stop a model. Waiting requests are rejected, running answers may go on for `grace_s`, then are cut."""
        refuse_while_draining(self._shell)
        shell = self._shell
        refuse_task(self._tasks, shell.catalog, request, asked.name)
        entry = await self._models.resolver.named(asked.name, asker=caller_of(request))
        owner, force = owner_of(request), asked.force
        facts = await self._loads.unload(entry.id, asked.grace_s, name=asked.name, force=force, **owner)
        return UnloadView(modelId=asked.name, gpuMemoryFreedMB=facts.gpu_mib or 0, kvCacheFlushed=True)

    @get(OPERATIONS, needs=Permission.READ)
    async def list_operations(
        self, kind: OperationKind | None = None, limit: Annotated[int, Query(ge=1, le=LISTED_MAX)] = 100
    ) -> OperationList:
        """Loads, unloads, downloads and jobs, the newest first. Those that have ended are kept for an hour, jobs as
        long as their results."""
        loads = self._loads
        rows = list(islice((row for row in loads.operations() if kind in (None, row.kind)), limit))
        facts = {row.id: await loads.facts(row) for row in rows if row.kind.is_move}
        return OperationList(data=[_operation(row, facts.get(row.id)) for row in rows])

    @post("/api/v1/models/{model_id:path}/pin", needs=Permission.MANAGE, signed=of_all("config-reload"))
    async def pin(self, request: Request, model_id: ModelPath, order: PinOrder | None = None) -> Pinned:
        """Never evict this model and never unload it for being idle, or no longer. It is not loaded by this.

        It holds until the gateway restarts or the model is changed by a reload; `pinned` in the configuration stays.
        """
        refuse_task(self._tasks, self._shell.catalog, request, model_id)
        entry, pinned = addressed(self._shell.catalog, request), order is None or order.pinned
        expect_movable(self._shell, entry)
        if entry.spec.is_remote:
            raise Unsupported(f"{entry.id} is remote: it takes no memory here, and is always there.", param="model")
        await self._models.pin(entry.id, pinned)
        return Pinned(model=public_name(entry.id), pinned=pinned)


async def begin(
    loads: Loads, request: Request, name: str, options: ModelOptions, evict: tuple[str, ...], *, force: bool
) -> LoadTaken:
    """Order a load for the caller of this request."""

    def fetch() -> DownloadOrder:
        return order_to_fetch(request, lambda: loads.order_for(name, options))

    owner = owner_of(request)
    row = await loads.submit(name, options, evict, caller_of(request), fetch, force=force, **owner)
    progress = await loads.progress(row)
    return LoadTaken(taskId=row.id, eta=None if progress.eta_s is None else round(progress.eta_s, 1))


def _operation(row: Operation, facts: LoadFacts | None) -> OperationView:
    told = facts if row.status is OperationStatus.DONE else None
    took_s, mib = (None, None) if told is None else (told.took_s, told.gpu_mib)
    return OperationView(
        id=row.id,
        kind=row.kind,
        status=row.status,
        model=row.model,
        key=row.key,
        tenant=row.tenant,
        created=round(row.created, 3),
        started=row.started,
        ended=row.ended,
        error=row.error,
        result=None if took_s is None or mib is None else MoveResult(gpu_mib=mib, took_s=round(took_s, 3)),
    )
