"""The management API: listings, health, metrics, status, events, and orders. An ASGI application behind the edge.

Owns how the routes are put together and what they share: errors in one shape, HEAD, paths that no route may see, and
the permission that each route requires, which the front door checks first. Every handler is a coroutine on the loop
that owns the scheduler's state; none runs in a thread, where that state could change meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

import greenroom
from greenroom.base.detached import run_detached
from greenroom.errors import BadRequest, GatewayBug, GreenroomError, MethodNotAllowed, NotFound, shown
from greenroom.http.request import Head
from greenroom.server import render
from greenroom.server.admin.docs_page import docs_page
from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.governed import GovernedRoutes
from greenroom.server.admin.governed_models import GovernedModels
from greenroom.server.admin.leases import LeaseRoutes
from greenroom.server.admin.models.downloads import DownloadRoutes
from greenroom.server.admin.models.library import LibraryRoutes
from greenroom.server.admin.models.listing import Listing, ModelStatuses
from greenroom.server.admin.models.llama_swap import LlamaSwapRoutes
from greenroom.server.admin.models.loads import LoadRoutes, PinRoutes
from greenroom.server.admin.models.model_openapi import with_model_routes
from greenroom.server.admin.models.native import NativeRoutes
from greenroom.server.admin.models.ollama import OllamaRoutes
from greenroom.server.admin.models.versions import VersionRoutes
from greenroom.server.admin.operating import Caches, Operating
from greenroom.server.admin.remote import RemoteRoutes
from greenroom.server.admin.reports.capabilities import CapabilityRoutes
from greenroom.server.admin.reports.clients import ClientRoutes, LimitRoutes
from greenroom.server.admin.reports.explaining import Explaining
from greenroom.server.admin.reports.history import HistoryRoutes
from greenroom.server.admin.reports.memory import Gpus
from greenroom.server.admin.reports.queue import QueueRoutes
from greenroom.server.admin.reports.snapshot import Snapshot
from greenroom.server.admin.reports.streams import Streams
from greenroom.server.admin.reports.usage import UsageRoutes
from greenroom.server.admin.reports.watching import Watching
from greenroom.server.admin.simulating import Simulating
from greenroom.server.admin.views import ErrorBody
from greenroom.server.asgi import LazyRoute, Message, scope_of
from greenroom.server.inference.jobs.routes import JobRoutes
from greenroom.server.inference.pictures import PictureRoutes
from greenroom.server.inference.routes import dialect_of
from greenroom.tenancy.keys import Permission

# This many mistakes of one request are named.
MISTAKES_SHOWN_MAX = 3


def add_error_answers(app: FastAPI) -> None:
    app.add_exception_handler(GreenroomError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)


def error_answer(
    scope: MutableMapping[str, Any], error: GreenroomError, extra: Mapping[str, str] | None = None
) -> Response:
    """The rendered error. Its request id is left out: the bridge adds it to every answer."""
    state = scope.get("state", {})
    to_operator = bool(state.get("is_admin"))
    dialect = dialect_of(scope["path"].encode("utf-8", "replace"))
    status, headers, body = render.response(
        error, state.get("request_id", ""), to_operator=to_operator, dialect=dialect
    )
    answer = Response(body, status, extra)
    answer.raw_headers += [(name, value) for name, value in headers if name != b"x-request-id"]
    return answer


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GreenroomError)
    return error_answer(request.scope, error)


async def _on_bug(request: Request, error: Exception) -> Response:
    """The framework raises the bug again after this answer, and the bridge logs it."""
    return error_answer(request.scope, GatewayBug(repr(error)))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    asked = f"{request.method} {path}"
    if error.status_code == 404:
        return error_answer(request.scope, nothing_at(path))
    if error.status_code == 405:
        allowed = _allowed(request)
        meant = f" Perhaps {request.method} /api{path} is meant." if _is_below_api(request) else ""
        refusal = MethodNotAllowed(f"{asked} is not possible; it takes {allowed}.{meant}")
        return error_answer(request.scope, refusal, {"Allow": allowed})
    return error_answer(request.scope, BadRequest(f"{asked}: {error.detail}"))


def _allowed(request: Request) -> str:
    """Each method has a route of its own; the framework names those of the first one only."""
    routes = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return ", ".join(sorted({method for route in routes for method in route.methods}))


def _is_below_api(request: Request) -> bool:
    """True if the same call is possible below /api, where most orders are."""
    scope = {**request.scope, "path": f"/api{request.scope['path']}"}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)


def nothing_at(path: str) -> NotFound:
    return NotFound(f"There is nothing at {shown(path)}. /api/v1/openapi.json describes what there is.")


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    mistakes = error.errors()
    message = "; ".join(f"{_param(mistake)}: {_words_of(mistake)}" for mistake in mistakes[:MISTAKES_SHOWN_MAX])
    if mistakes[0]["loc"][0] == "body" and "json" not in request.headers.get("content-type", ""):
        message += ". Send the body as JSON, with Content-Type: application/json"
    return error_answer(request.scope, BadRequest(message, param=_param(mistakes[0])))


def _words_of(mistake: Mapping[str, Any]) -> str:
    match mistake["type"]:
        case "model_attributes_type":
            return "a JSON object is wanted, {…}"
        case "string_unicode":
            return "holds half of a surrogate pair, which is no character"
        case _:
            return str(mistake["msg"])


def _param(mistake: Mapping[str, Any]) -> str:
    """`("body", "evict", 0)` is `evict.0`. A body that is no JSON at all has only a position."""
    where = [] if mistake["type"] == "json_invalid" else mistake["loc"][1:]
    return ".".join(str(part) for part in where) or str(mistake["loc"][0])


OPENAPI_PATH = "/api/v1/openapi.json"
DOCS_PATH = "/api/v1/docs"
# The permission that each route requires. Routes that are not named here require an admin's key.
_NEEDS: Final[Mapping[tuple[str, str], Permission]] = {
    ("GET", "/health"): Permission.ASK,
    ("GET", "/healthz"): Permission.ASK,
    ("GET", "/readyz"): Permission.ASK,
    ("GET", "/metrics"): Permission.ASK,
    ("GET", "/v1/capabilities"): Permission.ASK,
    ("GET", "/v1/models"): Permission.ASK,
    ("GET", "/models"): Permission.ASK,
    ("GET", "/props"): Permission.ASK,
    ("GET", "/slots"): Permission.ASK,
    ("POST", "/models/load"): Permission.LOAD,
    ("POST", "/models/unload"): Permission.LOAD,
    ("GET", "/running"): Permission.ASK,
    ("GET", "/unload"): Permission.LOAD,
    ("POST", "/api/models/unload"): Permission.LOAD,
    ("POST", "/api/models/unload/{model_id:path}"): Permission.LOAD,
    ("GET", "/logs"): Permission.READ,
    ("GET", "/logs/stream"): Permission.READ,
    ("GET", "/logs/stream/{model_id:path}"): Permission.READ,
    ("GET", "/api/events"): Permission.READ,
    ("GET", "/"): Permission.ASK,
    ("GET", "/api/tags"): Permission.ASK,
    ("GET", "/api/ps"): Permission.ASK,
    ("GET", "/api/version"): Permission.ASK,
    ("POST", "/api/show"): Permission.ASK,
    ("POST", "/api/pull"): Permission.DOWNLOAD,
    ("DELETE", "/api/delete"): Permission.DELETE,
    ("GET", "/v1/models/inventory"): Permission.ASK,
    ("GET", "/v1/models/loaded"): Permission.ASK,
    ("GET", "/v1/models/stats"): Permission.ASK,
    ("GET", "/v1/models/{model_id:path}"): Permission.ASK,
    ("POST", "/v1/cache/flush"): Permission.ASK,
    ("GET", "/v1/jobs"): Permission.ASK,
    ("POST", "/v1/jobs"): Permission.ASK,
    ("GET", "/v1/jobs/{job_id}"): Permission.ASK,
    ("DELETE", "/v1/jobs/{job_id}"): Permission.ASK,
    ("GET", "/v1/jobs/{job_id}/result"): Permission.ASK,
    ("GET", "/v1/images/img-{picture}"): Permission.ASK,
    ("GET", "/api/v1/models"): Permission.ASK,
    ("GET", "/api/v1/models/{model_id:path}"): Permission.ASK,
    ("GET", "/api/v1/requests/{request_id}"): Permission.ASK,
    ("GET", "/api/v1/usage"): Permission.ASK,
    ("GET", "/status"): Permission.ASK,
    ("GET", "/api/v1/models/{model_id:path}/versions"): Permission.ASK,
    ("GET", "/update-model/{task_id}"): Permission.READ,
    ("GET", "/api/v1/status"): Permission.READ,
    ("GET", "/api/v1/events"): Permission.READ,
    ("GET", "/api/v1/requests"): Permission.READ,
    ("GET", "/api/v1/queue"): Permission.READ,
    ("GET", "/api/v1/history"): Permission.READ,
    ("GET", "/api/v1/limits"): Permission.READ,
    ("GET", "/api/v1/timeline"): Permission.READ,
    ("GET", "/api/v1/clients"): Permission.READ,
    ("GET", "/api/v1/config"): Permission.READ,
    ("GET", "/api/v1/remotes"): Permission.READ,
    ("GET", "/api/v1/decisions"): Permission.READ,
    ("GET", "/api/v1/gpus"): Permission.READ,
    ("GET", "/api/v1/operations"): Permission.READ,
    ("POST", "/api/v1/explain"): Permission.READ,
    ("GET", "/api/v1/simulate"): Permission.READ,
    ("POST", "/api/v1/simulate"): Permission.READ,
    ("GET", "/api/v1/models/{model_id:path}/logs"): Permission.READ,
    ("GET", "/api/v1/models/{model_id:path}/logs/stream"): Permission.READ,
    ("GET", OPENAPI_PATH): Permission.READ,
    ("GET", DOCS_PATH): Permission.READ,
    ("POST", "/v1/models/load"): Permission.LOAD,
    ("GET", "/v1/models/load/{task_id}"): Permission.LOAD,
    ("POST", "/v1/models/unload"): Permission.LOAD,
    ("POST", "/api/v1/models/{model_id:path}/load"): Permission.LOAD,
    ("POST", "/api/v1/models/{model_id:path}/unload"): Permission.LOAD,
    ("POST", "/api/v1/models/{model_id:path}/sleep"): Permission.LOAD,
    ("POST", "/api/v1/models/{model_id:path}/prepare"): Permission.LOAD,
    ("POST", "/v1/models/download"): Permission.DOWNLOAD,
    ("GET", "/v1/models/download"): Permission.DOWNLOAD,
    ("GET", "/v1/models/download/{job_id}"): Permission.DOWNLOAD,
    ("DELETE", "/v1/models/download/{job_id}"): Permission.DOWNLOAD,
    ("DELETE", "/v1/models/inventory/{model_id:path}"): Permission.DELETE,
    ("POST", "/api/v1/reload"): Permission.RELOAD,
    ("GET", "/api/v1/leases"): Permission.LEASE,
    ("POST", "/api/v1/leases"): Permission.LEASE,
    ("GET", "/api/v1/leases/{lease_id}"): Permission.LEASE,
    ("DELETE", "/api/v1/leases/{lease_id}"): Permission.LEASE,
    ("POST", "/api/v1/leases/{lease_id}/renew"): Permission.LEASE,
}
_DESCRIPTION = "Ask models; see which there are and what they are doing; order them about."


# Named by its place in the document: given as a class, it would be compiled again for every route.
_SCHEMAS: Final = "#/components/schemas/"
_ERROR_ANSWER: Final = {
    "description": "What went wrong.",
    "content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{ErrorBody.__name__}"}}},
}


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Describes errors, and the routes to models too, which this application does not serve."""
        document = super().openapi()
        body = ErrorBody.model_json_schema(ref_template=_SCHEMAS + "{model}")
        schemas = {**document["components"]["schemas"], **body.pop("$defs"), ErrorBody.__name__: body}
        return with_model_routes({**document, "components": {**document["components"], "schemas": schemas}})


def make_management(gateway: Gateway, streams: Streams | None = None) -> Management:
    """`streams` counts the streams of events and logs; by default its own."""
    app = _empty_app()
    began = gateway.clock()

    def uptime_s() -> float:
        # By the monotonic clock, which is never set.
        return gateway.clock() - began

    def look() -> Snapshot:
        return Snapshot(gateway, uptime_s())

    streams = streams or Streams(lambda: gateway.is_draining, gateway.clock)
    # Their paths come before those that take any id.
    DownloadRoutes(lambda: gateway.downloads).add_to(app)
    loads = LoadRoutes(gateway)
    loads.add_to(app)
    NativeRoutes(gateway, loads, look).add_to(app)
    library = LibraryRoutes(gateway, look)
    library.add_to(app)
    Listing(gateway.catalog, gateway.resolver, gateway.tasks, look).add_to(app)
    OllamaRoutes(gateway, library, look).add_to(app)
    LlamaSwapRoutes(gateway, streams, look).add_to(app)
    CapabilityRoutes(gateway, look).add_to(app)
    Watching(gateway, streams, look, uptime_s).add_to(app)
    Operating(gateway, streams, look).add_to(app)
    PinRoutes(gateway).add_to(app)
    VersionRoutes(gateway).add_to(app)
    QueueRoutes(gateway).add_to(app)
    HistoryRoutes(gateway).add_to(app)
    LimitRoutes(gateway).add_to(app)
    Explaining(gateway).add_to(app)
    Simulating(gateway).add_to(app)
    UsageRoutes(gateway).add_to(app)
    ClientRoutes(gateway).add_to(app)
    RemoteRoutes(gateway).add_to(app)
    Gpus(gateway).add_to(app)
    LeaseRoutes(gateway).add_to(app)
    Caches(gateway).add_to(app)
    JobRoutes(lambda: gateway.jobs, lambda: gateway.edge.bodies).add_to(app)
    PictureRoutes(lambda: gateway.pictures, gateway.clock).add_to(app)
    _add_docs(app, gateway)
    # One of them takes any id, so it is asked last.
    ModelStatuses(gateway.catalog, gateway.tasks, look).add_to(app)
    models = GovernedModels(gateway, library.users_of)
    governed = GovernedRoutes(app.routes, lambda: gateway.governance, models)
    return Management(app, governed, lambda: gateway.governance.rules is not None)


def _empty_app() -> FastAPI:
    app = _App(
        title="Greenroom",
        version=greenroom.__version__,
        description=_DESCRIPTION,
        # It has a route of its own.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_route_name,
        responses={"default": _ERROR_ANSWER},
        # The gateway has its own metrics; no environment variable may make the framework send data.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.router.route_class = LazyRoute
    add_error_answers(app)
    return app


def _route_name(route: APIRoute) -> str:
    return route.name


def _add_docs(app: FastAPI, gateway: Gateway) -> None:
    describing = asyncio.Lock()

    async def described() -> dict[str, Any]:
        """The document. At first it takes most of a second, and requests go on: the loop analyses one route at a time,
        as no thread may, and the rest is done in a thread."""
        async with describing:
            if app.openapi_schema is None:
                for route in app.routes:
                    if isinstance(route, LazyRoute):
                        route.analyse()
                        await asyncio.sleep(0)
                await run_detached(app.openapi, "describe the API")
        return app.openapi()

    async def schema() -> Response:
        return JSONResponse(await described())

    async def docs() -> Response:
        if not gateway.config.server.docs:
            raise nothing_at(DOCS_PATH)
        return docs_page(await described(), OPENAPI_PATH)

    app.get(OPENAPI_PATH, include_in_schema=False)(schema)
    app.get(DOCS_PATH, include_in_schema=False)(docs)


class Management:
    """The application, and what its routes require: permissions, and tokens where operations are signed."""

    def __init__(self, app: FastAPI, governed: GovernedRoutes, is_governed: Callable[[], bool]) -> None:
        """`is_governed` tells whether operations must be signed now; then `governed` answers."""
        self._app = app
        self._governed = governed
        self._is_governed = is_governed

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        # No route and no id has such characters, and route patterns ignore a line break at the end.
        if not scope["path"].isprintable():
            await error_answer(scope, nothing_at(scope["path"]))(scope, receive, send)
        elif not self._is_governed():
            await self._app(_as_get(scope), receive, send)
        else:
            try:
                await self._governed(self._app, _as_get(scope), receive, send)
            except GreenroomError as refusal:
                await error_answer(scope, refusal)(scope, receive, send)

    @property
    def routes(self) -> Iterator[tuple[str, str]]:
        """Every method and path there is."""
        for route in self._app.routes:
            assert isinstance(route, Route)
            yield from ((method, route.path) for method in route.methods or () if method != "HEAD")

    def needs(self, head: Head, path: bytes) -> Permission:
        """The permission that a request for this path requires. Matched by the routes that will answer it."""
        scope = _as_get(scope_of(head, path, {}))
        needed = Permission.MANAGE
        for route in self._app.routes:
            assert isinstance(route, Route)
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return _NEEDS.get((scope["method"], route.path), Permission.MANAGE)
            if match is Match.PARTIAL:
                # A key that may use the path is told which methods it takes.
                others = (_NEEDS[key] for method in route.methods or () if (key := (method, route.path)) in _NEEDS)
                needed = next(others, needed)
        return needed


def _as_get(scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """HEAD is answered like GET; the bridge leaves the body out. Streams refuse it by `is_head`."""
    if scope["method"] != "HEAD":
        return scope
    return {**scope, "method": "GET", "state": {**scope.get("state", {}), "is_head": True}}
