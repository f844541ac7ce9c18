"""How callers use jobs: `Prefer: respond-async` on a route to a model, and everything below /v1/jobs.

Owns the shapes of requests and answers, and which caller sees which job: those of its own tenant. All others look as if
they were not there. An admin sees all.
"""

from __future__ import annotations

import asyncio
import re
from itertools import islice
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import Query
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from greenroom.access.keys import Caller, Permission
from greenroom.api.asgi import asked_by_admin, body_of, caller_of
from greenroom.api.declared import NEVER, Routes, delete, get, post
from greenroom.base.detached import run_detached
from greenroom.config.marks import Described
from greenroom.dialects.dialect import Route
from greenroom.errors import (
    BadRequest,
    GreenroomError,
    JobCancelled,
    JobFailed,
    JobUnfinished,
    NotFound,
    ResultGone,
    shown,
)
from greenroom.features.jobs.job import route_of
from greenroom.features.jobs.jobs import JobFacts, Jobs
from greenroom.features.pictures.answers import HARMLESS
from greenroom.http.body import Body, BodyBudget, Spliced
from greenroom.http.exchange import Exchange
from greenroom.http.headers import Headers
from greenroom.http.request import Head
from greenroom.runtime.operations.files import Operation, OperationStatus
from greenroom.serving import render
from greenroom.serving.admitted import Admitted
from greenroom.serving.body.long_body import SHORT_BYTES
from greenroom.serving.requests import Inference
from greenroom.telemetry.logs import get_logger

_log = get_logger("jobs")

JOBS: Final = "/v1/jobs"
_ONE: Final = JOBS + "/{job_id}"
LISTED_MAX: Final = 1_000
# How soon a caller should ask again for a result that is not there.
POLL_S: Final = 1.0
_TARGET: Final = re.compile(r"/[!-~]*")


class JobError(BaseModel):
    code: str
    message: str


class JobView(Described):
    model_config = ConfigDict(frozen=True)

    id: str
    object: Literal["job"] = "job"
    status: OperationStatus
    route: str
    model: str
    created: float
    """Seconds since 1970, as the other times."""
    started: float | None = None
    ended: float | None = None
    retry: bool
    """It may run again if the gateway or the engine dies while it runs."""
    position: int | None = None
    """Its place in the queue."""
    progress: float | None = None
    """From 0 to 1; while it runs, what the engine reports, else by the usual time of this model's answers."""
    eta_s: float | None = None
    """Seconds until its result, if that can be said."""
    result_bytes: int = 0
    error: JobError | None = None
    request_id: str | None = None
    """Of the request that runs it, for /api/v1/requests."""
    tenant: str | None = None
    """For admins only."""


class JobList(BaseModel):
    object: Literal["list"] = "list"
    data: list[JobView]


class _JobBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/jobs; the request's own body stays raw."""

    route: str
    body: msgspec.Raw
    retry: bool = False


def view(row: Operation, facts: JobFacts, *, to_operator: bool) -> JobView:
    return JobView(
        id=row.id,
        status=row.status,
        route=row.route,
        model=row.model,
        created=round(row.created, 3),
        started=row.started,
        ended=row.ended,
        retry=row.retry,
        position=facts.position,
        progress=None if facts.progress is None else round(facts.progress, 3),
        eta_s=None if facts.eta_s is None else round(facts.eta_s, 1),
        result_bytes=row.result_bytes,
        error=None if row.error is None else JobError(code=row.error.code, message=row.error.message),
        request_id=facts.request_id,
        tenant=row.tenant if to_operator else None,
    )


# --- Prefer: respond-async ------------------------------------------------------------------------------------------


class AsyncRequests:
    """Requests to models whose callers prefer the answer later."""

    def __init__(self, jobs: Jobs, bodies: BodyBudget, inference: Inference) -> None:
        self._jobs = jobs
        self._bodies = bodies
        self._inference = inference
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, exchange: Exchange, admitted: Admitted, route: Route) -> None:
        """Answer 202 with the job. Returns at once."""
        task = asyncio.get_running_loop().create_task(self._answer(exchange, route, admitted.caller))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: Exchange, route: Route, caller: Caller) -> None:
        request_id = self._inference.ids.next()
        # The body is kept until the job is on disk, even if the client leaves meanwhile.
        body, exchange.body = exchange.body, Body(self._bodies)
        try:
            row = await self._jobs.submit(exchange.head, route, body, caller)
            shown_job = view(*self._jobs.facts([row])[0], to_operator=caller.admin)
            headers: Headers = [
                (b"content-type", b"application/json"),
                (b"preference-applied", b"respond-async"),
                (b"location", f"{JOBS}/{row.id}".encode()),
                (b"x-request-id", request_id.encode()),
            ]
            status, content = 202, shown_job.model_dump_json().encode()
        except Exception as error:
            if isinstance(error, GreenroomError):
                self._inference.refused(error)
            else:
                _log.bug("job could not be taken", error, request=request_id)
            status, headers, content = render.response(error, request_id, to_operator=caller.admin)
        finally:
            body.close()
        if not exchange.gone:
            exchange.respond(status, headers, content)


# --- /v1/jobs -------------------------------------------------------------------------------------------------------

_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["route", "body"],
                    "properties": {
                        "route": {"type": "string", "description": "A route to a model, such as /v1/chat/completions."},
                        "body": {"description": "What would be sent to that route."},
                        "retry": {"type": "boolean", "default": False, "description": "It may run twice."},
                    },
                }
            }
        },
    }
}


class JobRoutes(Routes):
    def __init__(self, jobs: Jobs, bodies: BodyBudget) -> None:
        self._jobs = jobs
        self._bodies = bodies

    @post(JOBS, needs=Permission.ASK, signed=NEVER, status_code=202, openapi_extra=_BODY)
    async def submit_job(self, request: Request, response: Response) -> JobView:
        """Run a request to a model and keep its answer. Returns at once."""
        body = Body(self._bodies)
        try:
            asked, route = await self._order(request, body)
            row = await self._jobs.submit(
                _head(request, asked.route), route, body, caller_of(request), retry=asked.retry
            )
        finally:
            body.close()
        response.headers["location"] = f"{JOBS}/{row.id}"
        return self._view(request, row)

    async def _order(self, request: Request, body: Body) -> tuple[_JobBody, Route]:
        """The order and its route. The body of its request is put into `body`."""
        try:
            asked, content = await self._read(body_of(request))
            route = route_of(asked.route.partition("?")[0].encode("latin-1"))
            if route.form:
                raise BadRequest(
                    f"{asked.route} takes a form: send it to the route itself, with the header Prefer: respond-async.",
                    param="route",
                )
            for piece in (content,) if isinstance(content, bytes) else content.chunks():
                body.append(piece)
                await asyncio.sleep(0)
        except GreenroomError as error:
            self._jobs.count_refused(error, _head(request, JOBS), caller_of(request))
            raise
        return asked, route

    async def _read(self, body: Body) -> tuple[_JobBody, bytes | Spliced]:
        """The order, and the body of its request."""
        if len(body) <= SHORT_BYTES:
            asked = _read(body.read())
            return asked, bytes(asked.body)
        long = self._jobs.long_body(body)
        await long.scan()

        def read() -> tuple[_JobBody, bytes | Spliced]:
            order = _read(long.outline.text)
            return order, long.outline.put_back(bytes(order.body))

        return await long.in_thread(read)

    @get(JOBS, needs=Permission.ASK)
    async def list_jobs(
        self,
        request: Request,
        status: OperationStatus | None = None,
        limit: Annotated[int, Query(ge=1, le=LISTED_MAX)] = 100,
    ) -> JobList:
        """Jobs of the caller's tenant, the newest first; for an admin all."""
        rows = self._jobs.newest_first() if caller_of(request).may_list else ()
        mine = (row for row in rows if status in (None, row.status) and self._may_see(request, row))
        to_operator = asked_by_admin(request)
        shown_rows = list(islice(mine, limit))
        await self._jobs.look(shown_rows)
        told = self._jobs.facts(self._jobs.get(row.id) or row for row in shown_rows)
        return JobList(data=[view(row, facts, to_operator=to_operator) for row, facts in told])

    @get(_ONE, needs=Permission.ASK)
    async def show_job(self, request: Request, job_id: str) -> JobView:
        """One job as it is now."""
        await self._jobs.look([self._found(request, job_id)])
        return self._view(request, self._found(request, job_id))

    @delete(_ONE, needs=Permission.ASK, signed=NEVER)
    async def cancel_job(self, request: Request, job_id: str) -> JobView:
        """End it and free its engine. A job that has ended stays as it is."""
        return self._view(request, await self._jobs.cancel(self._found(request, job_id).id))

    @get(_ONE + "/result", needs=Permission.ASK, response_class=Response)
    async def job_result(self, request: Request, job_id: str) -> Response:
        """The answer, as the route itself would have given it: status, type and body. A stream is sent as collected."""
        row = self._found(request, job_id)
        if not row.status.is_over:
            raise JobUnfinished(f"The job {row.id} is {row.status.value}.", retry_after_s=POLL_S)
        if row.status is OperationStatus.CANCELLED:
            raise JobCancelled(f"The job {row.id} was cancelled and has no result.")
        found = await run_detached(lambda: self._jobs.read_result(row.id), "read a result")
        if found is None:
            raise _without_result(row)
        answer, pieces = found
        sent = StreamingResponse(pieces, answer.status)
        sent.raw_headers = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers if name not in HARMLESS
        ]
        sent.headers.update(HARMLESS)
        return sent

    def _view(self, request: Request, row: Operation) -> JobView:
        return view(*self._jobs.facts([row])[0], to_operator=asked_by_admin(request))

    def _found(self, request: Request, job_id: str) -> Operation:
        row = self._jobs.get(job_id)
        if row is None or not self._may_see(request, row):
            raise NotFound(f"There is no job {shown(job_id)}; results are kept for a while only.")
        return row

    def _may_see(self, request: Request, row: Operation) -> bool:
        """A tenant's other keys see a job if they see its model. Callers without a key have its id from its order."""
        caller = caller_of(request)
        if caller.admin or (caller.tenant is None and caller.name == row.key):
            return True
        return caller.tenant == row.tenant and (caller.name == row.key or caller.sees(row.model))


def _without_result(row: Operation) -> GreenroomError:
    if row.error is None:
        _log.warning("result is gone", job=row.id)
        return ResultGone(f"The result of {row.id} is gone: its file was removed. Send the request again.")
    error = {"code": row.error.code, "message": row.error.message}
    return JobFailed(f"The job {row.id} failed: {row.error.message}", beside={"job_error": error})


def _read(body: bytes) -> _JobBody:
    try:
        asked = msgspec.json.decode(body, type=_JobBody)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is JSON with `route`, `body` and optionally `retry`: {error}.") from error
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None
    if _TARGET.fullmatch(asked.route) is None:
        raise BadRequest(f"{shown(asked.route)} is no path.", param="route")
    return asked


def _head(request: Request, target: str) -> Head:
    """The head of the job's request: its own line, and the headers that came with the order."""
    headers = [(name, value) for name, value in request.headers.raw if name != b"content-type"]
    headers.append((b"content-type", b"application/json"))
    return Head(b"POST", target.encode("ascii"), headers, "1.1", "", keep_alive=False)
