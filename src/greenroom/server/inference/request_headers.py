"""The headers by which callers tell the gateway something: their names, and how each is read.

They are never forwarded. A value that cannot be is answered with BadRequest.
"""

from __future__ import annotations

from typing import Final

from greenroom.config.schema import Heartbeat
from greenroom.errors import BadRequest
from greenroom.http.request import Head
from greenroom.server.inference.body import peek
from greenroom.tenancy.tenants import parse_priority

TENANT_HEADER: Final = b"x-tenant-id"
CLIENT_HEADER: Final = b"x-client-id"
# The headers that are for the gateway; one pass over a request's headers finds them.
OUR_HEADERS: Final = frozenset(
    (
        *(b"x-priority", TENANT_HEADER, CLIENT_HEADER, b"x-heartbeat", b"x-request-timeout-s"),
        *(b"x-cache-mode", b"x-cache-tag", b"x-facts"),
    )
)
# White space behind a value is no part of it, and the parser leaves it there.
SPACE: Final = b" \t"
_HEARTBEATS: Final = {kind.value.encode(): kind for kind in Heartbeat}
CLIENT_CHARS_MAX: Final = 128


def said_in(head: Head) -> dict[bytes, bytes]:
    """What a request tells the gateway by headers; of one that is repeated, the last."""
    return {name: value.rstrip(SPACE) for name, value in head.headers if name in OUR_HEADERS}


def said_tenant(head: Head) -> bytes | None:
    """The tenant that a request names, by the same header as `said_in` goes by: the last one."""
    found: bytes | None = None
    for name, value in head.headers:
        if name == TENANT_HEADER:
            found = value.rstrip(SPACE)
    return found


def client_named(head: Head) -> str:
    """The client that a request names in its body, as far as that is read, or by its header; empty if neither."""
    if head.client:
        return head.client
    found = b""
    for name, value in head.headers:
        if name == CLIENT_HEADER:
            found = value.rstrip(SPACE)
    return client_of(found)


def client_of(raw: bytes) -> str:
    return raw.decode("latin-1")[:CLIENT_CHARS_MAX]


def said_priority(in_body: str | int | None, said: dict[bytes, bytes]) -> int | None:
    """The priority that a request names in its body, else by its header; None if it names none."""
    if in_body is not None:
        return parse_priority(in_body)
    in_header = said.get(b"x-priority")
    return None if in_header is None else parse_priority(in_header, param="X-Priority")


def heartbeat_of(said: dict[bytes, bytes], default: Heartbeat) -> Heartbeat:
    raw = said.get(b"x-heartbeat")
    if raw is None:
        return default
    if raw not in _HEARTBEATS:
        raise BadRequest("X-Heartbeat is comment, chunk or off.", param="X-Heartbeat")
    return _HEARTBEATS[raw]


def wants_facts(raw: bytes) -> bool:
    if raw not in (b"comment", b"off"):
        raise BadRequest("X-Facts is comment or off.", param="X-Facts")
    return raw == b"comment"


def budget_s_of(said: dict[bytes, bytes]) -> float | None:
    """How long the whole answer may take, by the request's header."""
    raw = said.get(b"x-request-timeout-s")
    return None if raw is None else peek.read_budget_s(raw.decode("latin-1"), param="X-Request-Timeout-S")


def smaller(one: float | None, other: float | None) -> float | None:
    """The smaller of two budgets, either of which may be missing."""
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)
