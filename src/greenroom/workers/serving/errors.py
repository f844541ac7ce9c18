"""The errors of this API, as OpenAI's clients expect them. Owns the shape of an error body. The worker cannot use the
gateway's error tree: it imports nothing of greenroom."""

from __future__ import annotations

import json
import secrets
from typing import Any

MESSAGE_CHARS_MAX = 2_048


class ApiError(Exception):
    """The request fails with this status. The message says what, which, and what to do."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str = "invalid_request"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {
            "message": self.message[:MESSAGE_CHARS_MAX],
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()


def too_long(message: str) -> ApiError:
    return ApiError(message, code="context_length_exceeded")


def failed(message: str) -> ApiError:
    """The model failed at a valid request."""
    return ApiError(message, status=500, code="model_failed")


def unavailable(message: str) -> ApiError:
    """The model cannot answer now; a retry may work."""
    return ApiError(message, status=503, code="unavailable")


def unsupported(message: str, param: str | None = None) -> ApiError:
    return ApiError(message, param=param, code="unsupported")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def encoded(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"
