"""The management API: listings, health, metrics, status, events, and orders. An ASGI application behind the edge.

Owns how the routes are put together and what they share: errors in one shape, HEAD, paths that no route may see, and
the permission that each route requires, which the front door checks first. Every handler is a coroutine on the loop
that owns the scheduler's state; none runs in a thread, where that state could change meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

import greenroom
from greenroom.access.keys import Permission
from greenroom.api.asgi import scope_of
from greenroom.api.declared import DeclaredRoute, Routes, declared_routes, get, route_of
from greenroom.api.openapi import docs_page, with_model_routes
from greenroom.api.views import ErrorBody
from greenroom.base.detached import run_detached
from greenroom.errors import BadRequest, GatewayBug, GreenroomError, MethodNotAllowed, NotFound, shown
from greenroom.http.request import Head
from greenroom.runtime.shell import Shell
from greenroom.serving import render
from greenroom.serving.routes import dialect_of

# This many mistakes of one request are named.
MISTAKES_SHOWN_MAX = 3


def error_answer(scope: Scope, error: GreenroomError, extra: Mapping[str, str] | None = None) -> Response:
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


def empty_app() -> FastAPI:
    app = _App(
        title="Greenroom",
        version=greenroom.__version__,
        description=_DESCRIPTION,
        # It has a route of its own.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        responses={"default": _ERROR_ANSWER},
        # The gateway has its own metrics; no environment variable may make the framework send data.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.router.route_class = DeclaredRoute
    app.add_exception_handler(GreenroomError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)
    return app


class Docs(Routes):
    in_schema = False

    def __init__(self, app: FastAPI, shell: Shell) -> None:
        self._app = app
        self._shell = shell
        self._describing = asyncio.Lock()

    @get(OPENAPI_PATH, needs=Permission.READ)
    async def schema(self) -> Response:
        return JSONResponse(await self._described())

    @get(DOCS_PATH, needs=Permission.READ)
    async def docs(self) -> Response:
        if not self._shell.config.server.docs:
            raise nothing_at(DOCS_PATH)
        return docs_page(await self._described(), OPENAPI_PATH)

    async def _described(self) -> dict[str, Any]:
        """The document. At first it takes most of a second, and requests go on: the loop analyses one route at a time,
        as no thread may, and the rest is done in a thread."""
        async with self._describing:
            if self._app.openapi_schema is None:
                for route in declared_routes(self._app):
                    route.analyse()
                    await asyncio.sleep(0)
                await run_detached(self._app.openapi, "describe the API")
        return self._app.openapi()


class Management:
    """The application, and what its routes require: permissions, and tokens where operations are signed."""

    def __init__(self, application: ASGIApp, routes: Sequence[DeclaredRoute]) -> None:
        """`application` answers by these routes."""
        self._application = application
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # No route and no id has such characters, and route patterns ignore a line break at the end.
        if not scope["path"].isprintable():
            await error_answer(scope, nothing_at(scope["path"]))(scope, receive, send)
            return
        try:
            await self._application(_as_get(scope), receive, send)
        except GreenroomError as refusal:
            await error_answer(scope, refusal)(scope, receive, send)

    def needs(self, head: Head, path: bytes) -> Permission:
        """The permission that a request for this path requires. Matched by the routes that will answer it."""
        scope = _as_get(scope_of(head, path, {}))
        needed = Permission.MANAGE
        for route in self.routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return route.declared.needs
            if match is Match.PARTIAL and route.declared.needs is not Permission.MANAGE:
                # A key that may use the path is told which methods it takes.
                needed = route.declared.needs
        return needed

    def acts(self, head: Head, path: bytes) -> bool:
        """True if it is signed where operations are, whatever its method."""
        found = route_of(self.routes, _as_get(scope_of(head, path, {})))
        return found is not None and found[0].declared.signed is not None


def _as_get(scope: Scope) -> Scope:
    """HEAD is answered like GET; the bridge leaves the body out. Streams refuse it by `is_head`."""
    if scope["method"] != "HEAD":
        return scope
    return {**scope, "method": "GET", "state": {**scope.get("state", {}), "is_head": True}}
