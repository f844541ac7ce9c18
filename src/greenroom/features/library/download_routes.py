"""`/v1/models/download`: order models from the hub, watch the downloads, cancel them. For admins.

Owns the shapes of requests and answers, and the words of statuses: `pending`, `downloading`, `completed`, `failed` and
`cancelled` are queued, running, done, failed and cancelled inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Final, Literal

import msgspec
from fastapi import Query
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from greenroom.access.keys import Permission
from greenroom.api.asgi import caller_of, order_to_fetch
from greenroom.api.declared import NEVER, NeededOperation, Routes, SignedCall, delete, get, post
from greenroom.api.views import FromList, GovernedOrder, View
from greenroom.errors import BadRequest, NotFound, shown
from greenroom.features.library.downloads import ROUTE, DownloadFacts, DownloadFile, Downloads
from greenroom.library.orders import PATTERNS_MAX, DownloadOrder, OrderRules, read_order
from greenroom.runtime.operations.files import Operation, OperationError, OperationStatus

LISTED_MAX: Final = 1_000
Status = Literal["pending", "downloading", "completed", "failed", "cancelled"]
_STATUS: Final[dict[OperationStatus, Status]] = {
    OperationStatus.QUEUED: "pending",
    OperationStatus.RUNNING: "downloading",
    OperationStatus.DONE: "completed",
    OperationStatus.FAILED: "failed",
    OperationStatus.CANCELLED: "cancelled",
}


class DownloadAsked(GovernedOrder):
    """`model` or `url`."""

    model: str | None = None
    """An id of the hub, such as `org/name`; or the address of its page."""
    url: str | None = None
    """The address of a model's page or file on the hub, or of a file on one of `library.hosts`."""
    revision: str | None = None
    """A branch, tag or commit; `main` when not given."""
    quantization: str | None = None
    """Fetches the GGUF files with this word in their names, such as Q4_K_M, and what `include` adds."""
    include: Annotated[tuple[str, ...], Field(max_length=PATTERNS_MAX), FromList] = ()
    """Patterns of file names to fetch, such as `*.json`; all when not given."""
    exclude: Annotated[tuple[str, ...], Field(max_length=PATTERNS_MAX), FromList] = ()
    """Patterns of file names to leave out."""
    destination: str | None = None
    """A folder below one of the roots; when not given, the hub's cache if it is a root, else the first root."""

    def order(self, rules: OrderRules) -> DownloadOrder:
        """Raises BadRequest."""
        return read_order(rules, **self.model_dump(exclude={"verifiedOpToken"}))


class DownloadTaken(BaseModel):
    job_id: str
    status: Status = "pending"


class DownloadView(View):
    job_id: str
    status: Status
    model: str
    """The id on the hub, or the address."""
    commit: str | None = None
    progress: float | None = None
    """From 0 to 1."""
    bytes: int = 0
    total_bytes: int | None = None
    rate: float | None = None
    """Bytes per second, of the last ten seconds."""
    eta: float | None = None
    """Seconds left at this rate."""
    waiting: bool = False
    """Another process fetches the same files; this one waits for it."""
    destination: str = ""
    """Where the files are or will be; when completed the model itself."""
    files: tuple[DownloadFile, ...] = ()
    files_downloaded: int = 0
    files_total: int = 0
    created: float
    """Seconds since 1970."""
    duration_seconds: float | None = None
    error: OperationError | None = None


class DownloadList(BaseModel):
    object: Literal["list"] = "list"
    data: list[DownloadView]


def _download(call: SignedCall) -> NeededOperation:
    """By the id of the hub or the address, whichever is given."""

    def read_fetch(rules: OrderRules) -> DownloadOrder:
        try:
            return DownloadAsked.model_validate(call.fields).order(rules)
        except ValidationError as error:
            mistake = error.errors(include_url=False)[0]
            where = ".".join(map(str, mistake["loc"]))
            raise BadRequest(f"{where}: {mistake['msg']}", param=where) from None

    return NeededOperation("model-download", call.named("model", "url"), read_fetch=read_fetch)


@dataclass(frozen=True)
class DownloadRoutes(Routes):
    _downloads: Downloads

    @post(ROUTE, needs=Permission.DOWNLOAD, signed=_download, status_code=202)
    async def start_download(self, request: Request, response: Response, asked: DownloadAsked) -> DownloadTaken:
        """Fetch a model. Returns at once; files appear under their names when all of them are there."""
        order, caller = order_to_fetch(request, lambda: asked.order(self._downloads.rules)), caller_of(request)
        row = await self._downloads.submit(order, tenant=caller.tenant or caller.name, key=caller.name)
        response.headers["location"] = f"{ROUTE}/{row.id}"
        return DownloadTaken(job_id=row.id)

    @get(ROUTE, needs=Permission.DOWNLOAD)
    async def list_downloads(
        self,
        request: Request,
        status: Status | None = None,
        limit: Annotated[int, Query(ge=1, le=LISTED_MAX)] = 100,
    ) -> DownloadList:
        """The newest first. Those that have ended are kept for an hour."""
        rows = self._downloads.newest_first() if caller_of(request).may_list else ()
        wanted = (row for row in rows if status in (None, _STATUS[row.status]))
        return DownloadList(data=await self._views(list(islice(wanted, limit))))

    @get(ROUTE + "/{job_id}", needs=Permission.DOWNLOAD)
    async def show_download(self, job_id: str) -> DownloadView:
        """One download as it is now."""
        return await self._view(self._found(job_id))

    @delete(ROUTE + "/{job_id}", needs=Permission.DOWNLOAD, signed=NEVER)
    async def cancel_download(self, job_id: str) -> DownloadView:
        """End it. What it has fetched stays, and the same order goes on with it. One that has ended stays as it is."""
        return await self._view(await self._downloads.cancel(self._found(job_id).id))

    async def _view(self, row: Operation) -> DownloadView:
        return (await self._views([row]))[0]

    async def _views(self, rows: list[Operation]) -> list[DownloadView]:
        downloads = self._downloads
        facts = await downloads.facts(rows)
        return [view(row, one, downloads.ran_s(row)) for row, one in zip(rows, facts, strict=True)]

    def _found(self, job_id: str) -> Operation:
        row = self._downloads.get(job_id)
        if row is None:
            raise NotFound(f"Download job not found: {shown(job_id)}")
        return row


def view(row: Operation, facts: DownloadFacts, ran_s: float | None) -> DownloadView:
    is_done, is_running = row.status is OperationStatus.DONE, row.status is OperationStatus.RUNNING
    now = {
        "progress": 1.0 if is_done else facts.progress if facts.progress is None else round(facts.progress, 4),
        "rate": None if facts.rate is None or not is_running else round(facts.rate),
        "eta": None if facts.eta_s is None or not is_running else round(facts.eta_s, 1),
        "waiting": facts.waiting and is_running,
    }
    return DownloadView(
        **msgspec.structs.asdict(facts) | now,
        job_id=row.id,
        status=_STATUS[row.status],
        model=row.model,
        created=round(row.created, 3),
        duration_seconds=None if ran_s is None else round(ran_s, 3),
        error=row.error,
    )
