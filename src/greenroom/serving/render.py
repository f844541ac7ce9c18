"""Errors as callers see them. The only place that builds error responses.

Owns the shape of error bodies and events, and how much of an error is shown: all of it to operators, `public` and a
request id to other callers. Engine text is bounded and cleaned; bugs of ours are shown in neutral words only. Never
logs and never sends.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import msgspec

from greenroom.dialects.dialect import Dialect
from greenroom.dialects.openai import OPENAI
from greenroom.errors import GatewayBug, GreenroomError, InvalidKey, ModelLoading, PostOnly, RateLimited

Header = tuple[bytes, bytes]

DETAILS_BYTES_MAX = 4_096
MESSAGE_BYTES_MAX = 2_048
# Clients obey Retry-After; for a model that is loading they should come back after two minutes at most.
LOADING_RETRY_AFTER_MAX_S = 120

# Extra fields of an error for operators only: which models hold how much of which device.
OPERATORS_FIELDS = frozenset({"memory"})

_TERMINAL_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?", re.DOTALL)
# Line breaks and tabs stay: an engine's last lines are lines.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Of a limit that is exceeded, as headers and in the body.
_RATES = ((b"x-ratelimit-limit", "limit"), (b"x-ratelimit-remaining", "remaining"), (b"x-ratelimit-reset", "resetAt"))
_HEADER_SAFE = re.compile(r"[!-~]{1,128}")


class Words(NamedTuple):
    """The text of an error as a caller sees it."""

    message: str
    details: str | None


def words(error: BaseException, request_id: str, *, to_operator: bool) -> Words:
    """The text for an operator, or for other callers. Cleaned and bounded."""
    shown = _shown(error, request_id)
    message, details = shown.message, shown.details
    if not to_operator:
        message = shown.public
        if not shown.details_are_the_callers:
            details = None
        if request_id and shown.is_recorded and (message, details) != (shown.message, shown.details):
            message += f" An operator finds more under request {request_id}."
    return Words(_clean(message, MESSAGE_BYTES_MAX), None if details is None else _clean(details, DETAILS_BYTES_MAX))


def response(
    error: BaseException, request_id: str, *, to_operator: bool, dialect: Dialect = OPENAI
) -> tuple[int, list[Header], bytes]:
    """Status, headers and body that answer a request with this error, as its dialect shapes them."""
    shown = _shown(error, request_id)
    headers = [(b"content-type", b"application/json")]
    if _HEADER_SAFE.fullmatch(request_id):
        headers.append((b"x-request-id", request_id.encode("ascii")))
    retry_after_s = _retry_after_s(shown)
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    if shown.final:
        headers.append((b"x-should-retry", b"false"))
    if isinstance(shown, RateLimited) and "limit" in shown.beside:
        for name, key in _RATES:
            headers.append((name, b"%d" % shown.beside[key]))
    if isinstance(shown, InvalidKey):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(shown, PostOnly):
        headers.append((b"allow", b"POST"))
    return shown.status, headers, error_body(shown, request_id, to_operator=to_operator, dialect=dialect)


def error_body(error: BaseException, request_id: str, *, to_operator: bool, dialect: Dialect = OPENAI) -> bytes:
    """`{"error": {message, type, code, param, details, …}}`; extra fields of the error follow."""
    shown = _shown(error, request_id)
    return _encoded(shown, _core_of(shown, request_id, to_operator), request_id, to_operator, dialect)


def error_event(
    error: BaseException, request_id: str, *, to_operator: bool, dialect: Dialect = OPENAI, number: int = 0
) -> bytes:
    """The one event that ends a stream which has already begun with 200. `number` is its place in that."""
    shown = _shown(error, request_id)
    core = _core_of(shown, request_id, to_operator)
    whole = {**core, "status": shown.status, "retry_after_s": _retry_after_s(shown)}
    return dialect.errors.event(_encoded(shown, whole, request_id, to_operator, dialect), number)


def _shown(error: BaseException, request_id: str) -> GreenroomError:
    """The error itself if callers may see it; else a neutral one, because its text could hold secrets."""
    if isinstance(error, GreenroomError) and not isinstance(error, GatewayBug):
        return error
    which = f" Its log has more under request {request_id}." if request_id else ""
    return _Neutral(f"Something went wrong inside the gateway.{which}")


class _Neutral(GreenroomError):
    """Stands for a bug of ours, without its text. Not a GatewayBug, so that it is shown as it is."""


def _core_of(error: GreenroomError, request_id: str, to_operator: bool) -> dict[str, Any]:
    told = words(error, request_id, to_operator=to_operator)
    return {
        "message": told.message,
        "type": error.type,
        "code": error.code,
        "param": None if error.param is None else _clean(error.param, MESSAGE_BYTES_MAX),
        "details": told.details,
    }


def _encoded(
    error: GreenroomError, core: dict[str, Any], request_id: str, to_operator: bool, dialect: Dialect
) -> bytes:
    # Extra fields must not replace those that every client relies on.
    kept_back = core.keys() if to_operator else core.keys() | OPERATORS_FIELDS
    beside = {name: value for name, value in error.beside.items() if name not in kept_back}
    try:
        whole = dialect.errors.body(error.status, {**core, **beside}, request_id)
        return msgspec.json.encode(whole, enc_hook=str)
    except (TypeError, ValueError, RecursionError):
        # If an extra value cannot be JSON, the error is sent without the extra fields.
        return msgspec.json.encode(dialect.errors.body(error.status, core, request_id))


def _retry_after_s(error: GreenroomError) -> int | None:
    wait_s = error.retry_after_s
    if wait_s is None or not math.isfinite(wait_s):
        return None
    whole_s = max(1, math.ceil(wait_s))
    return min(whole_s, LOADING_RETRY_AFTER_MAX_S) if isinstance(error, ModelLoading) else whole_s


def _clean(text: str, bytes_max: int) -> str:
    """Without control characters, and bounded. The end is kept: the last lines say why."""
    # Cut first, to bound the work: a character has at most four bytes, and removed ones leave room.
    text = text[-4 * bytes_max :]
    text = _CONTROL.sub("", _TERMINAL_CODE.sub("", text))
    encoded = text.encode("utf-8", "replace")
    return encoded[-bytes_max:].decode("utf-8", "ignore")
