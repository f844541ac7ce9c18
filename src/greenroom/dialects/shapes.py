"""How each dialect shapes an error: as the body of an answer, and inside of a stream that has begun."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

import msgspec


class Dialect(enum.Enum):
    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"
    RESPONSES = "responses"
    LLAMACPP = "llamacpp"


_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_shape(dialect: Dialect, status: int, error: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    """The body for an error, which has at least a `message`."""
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {**error, "type": kind}, "request_id": request_id or None}
    if dialect is Dialect.OLLAMA:
        return {"error": error["message"]}
    if dialect is Dialect.LLAMACPP:
        return {"error": {**error, "code": status}}
    return {"error": dict(error)}


def error_event_of(dialect: Dialect, body: bytes, number: int = 0) -> bytes:
    """The body of an error as the last event of a stream, whose number it is in a dialect that numbers events."""
    if dialect is Dialect.ANTHROPIC:
        return b"event: error\ndata: %b\n\n" % body
    if dialect is Dialect.OLLAMA:
        return body + b"\n"
    if dialect is Dialect.RESPONSES:
        error = msgspec.json.decode(body)["error"]
        flat = {
            "code": error.get("code") or error.get("type"),
            "message": error["message"],
            "param": error.get("param"),
        }
        event = {"type": "error", **flat, "sequence_number": number, "error": error}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)
    return b"data: %b\n\n" % body


def engine_error(dialect: Dialect, status: int, message: str) -> bytes:
    """An engine's own error, in the shape that the caller reads."""
    return msgspec.json.encode(error_shape(dialect, status, {"message": message, "type": "engine_error"}, ""))
