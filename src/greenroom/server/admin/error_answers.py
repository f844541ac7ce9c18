"""Every way a management request can fail, as the one error shape of the gateway.

Owns the translation of the framework's own errors. Never renders: `render.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from greenroom.errors import BadRequest, GatewayBug, GreenroomError, MethodNotAllowed, NotFound
from greenroom.server import render

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
    status, headers, body = render.response(error, state.get("request_id", ""), to_operator=to_operator)
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
        allowed = (error.headers or {}).get("Allow", "")
        return error_answer(
            request.scope, MethodNotAllowed(f"{asked} is not possible; it takes {allowed}."), error.headers
        )
    return error_answer(request.scope, BadRequest(f"{asked}: {error.detail}"))


def nothing_at(path: str) -> NotFound:
    return NotFound(f"There is nothing at {path}. /api/v1/openapi.json describes what there is.")


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    mistakes = error.errors()
    message = "; ".join(f"{_param(mistake)}: {mistake['msg']}" for mistake in mistakes[:MISTAKES_SHOWN_MAX])
    if mistakes[0]["loc"][0] == "body" and "json" not in request.headers.get("content-type", ""):
        message += ". Send the body as JSON, with Content-Type: application/json"
    return error_answer(request.scope, BadRequest(message, param=_param(mistakes[0])))


def _param(mistake: Mapping[str, Any]) -> str:
    """`("body", "evict", 0)` is `evict.0`. A body that is no JSON at all has only a position."""
    where = [] if mistake["type"] == "json_invalid" else mistake["loc"][1:]
    return ".".join(str(part) for part in where) or str(mistake["loc"][0])
