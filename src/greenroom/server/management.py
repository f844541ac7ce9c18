"""The management API: listings, health, metrics, status, events, and orders. An ASGI application behind the edge.

Owns how its parts are put together and what no part should have to think of: errors in one shape, HEAD, paths that no
route may see. Who may call is decided before, by the front door. Every handler is a coroutine on the loop that owns the
scheduler's state; none runs in a thread, where that state could change under it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import HTMLResponse, Response

import greenroom
from greenroom.server.answers import add_error_answers, error_answer, nothing_at
from greenroom.server.asgi import Application, Message
from greenroom.server.cache import Caches
from greenroom.server.docs_page import HEADERS, docs_page
from greenroom.server.explaining import Explaining
from greenroom.server.gateway import Gateway
from greenroom.server.gpus import Gpus
from greenroom.server.leases import Leases
from greenroom.server.listing import Listing
from greenroom.server.model_status import ModelStatuses
from greenroom.server.operating import Operating
from greenroom.server.snapshot import Snapshot
from greenroom.server.streams import Streams
from greenroom.server.verbs import as_get
from greenroom.server.views import ErrorBody
from greenroom.server.watching import Watching

OPENAPI_PATH = "/api/v1/openapi.json"
DOCS_PATH = "/api/v1/docs"
_DESCRIPTION = "Which models there are, what they are doing, and how to order them about."


def make_management(gateway: Gateway) -> Application:
    app = _empty_app()
    began = gateway.clock()

    def uptime_s() -> float:
        # By the clock that is never set, unlike the wall's.
        return gateway.clock() - began

    def look() -> Snapshot:
        return Snapshot(gateway, uptime_s())

    streams = Streams(lambda: gateway.is_draining, gateway.clock)
    Listing(gateway.catalog, look).add_to(app)
    Watching(gateway, streams, look, uptime_s).add_to(app)
    Operating(gateway, streams, look).add_to(app)
    ModelStatuses(gateway.catalog, look).add_to(app)
    Explaining(gateway).add_to(app)
    Gpus(gateway).add_to(app)
    Leases(gateway).add_to(app)
    Caches(gateway).add_to(app)
    _add_docs(app, gateway)
    return _guarded(app)


def _empty_app() -> FastAPI:
    app = FastAPI(
        title="Greenroom",
        version=greenroom.__version__,
        description=_DESCRIPTION,
        openapi_url=OPENAPI_PATH,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_route_name,
        responses={"default": {"model": ErrorBody, "description": "What went wrong."}},
        # The gateway counts for itself; nothing may be sent anywhere because of a variable in the environment.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    add_error_answers(app)
    return app


def _route_name(route: APIRoute) -> str:
    return route.name


def _add_docs(app: FastAPI, gateway: Gateway) -> None:
    async def docs() -> Response:
        if not gateway.config.server.docs:
            raise nothing_at(DOCS_PATH)
        return HTMLResponse(docs_page(app.openapi(), OPENAPI_PATH), headers=HEADERS)

    app.get(DOCS_PATH, include_in_schema=False)(docs)


def _guarded(app: FastAPI) -> Application:
    async def application(
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        # No path of ours and no id has such characters, and the patterns of routes overlook a line break at the end.
        if not scope["path"].isprintable():
            await error_answer(scope, nothing_at(scope["path"]))(scope, receive, send)
        else:
            await app(as_get(scope), receive, send)

    return application
