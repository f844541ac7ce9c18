"""The headers by which callers tell the gateway something, and those by which an answer tells them something.

Owns their names, how each of the first is read, and when each of the second is sent. The first are never forwarded; a
value that cannot be is answered with BadRequest. Answers tell how long they waited, which model and version they are
of, and what they cost; the cost is also told in a comment at the end of a stream, and for the request's record. What is
not known is left out; `false` and 0 stand where no cache is used, not where nothing is known of one.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from greenroom.config.schema import Heartbeat
from greenroom.engines.base import Engine
from greenroom.engines.usage import Usage, estimated
from greenroom.errors import BadRequest
from greenroom.http.headers import Headers
from greenroom.http.relays.relay import Relay
from greenroom.http.request import Head
from greenroom.library.versions import Version, told_as
from greenroom.server.inference.body import peek
from greenroom.tenancy.keys import parse_priority

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


# --- what answers tell ----------------------------------------------------------------------------------------------

WAIT: Final = b"x-queue-wait-ms"
MODEL: Final = b"x-model"
VERSION: Final = b"x-model-version"
REPO_ID: Final = b"x-model-repo-id"
CACHE_HIT: Final = b"x-cache-hit"
TOKENS_REUSED: Final = b"x-cache-tokens-reused"
GPU_TIME: Final = b"x-gpu-time-ms"
NOT_CACHED: Final[Headers] = [(CACHE_HIT, b"false"), (TOKENS_REUSED, b"0")]
# Longer numbers are no figures.
_DIGITS_MAX: Final = 12
# What ids of repositories and paths have, besides letters and digits; anything else is escaped.
_PLAIN: Final = "/:@._-+,= "


def version_headers(version: Version | None, *, to_operator: bool) -> Headers:
    """Two headers; none for a model that is not under version control."""
    if version is None:
        return []
    repo_id = quote(told_as(version.repo_id, to_operator=to_operator), safe=_PLAIN)
    return [(VERSION, b"%d" % version.number), (REPO_ID, repo_id.encode("ascii"))]


def model_header(name: str) -> tuple[bytes, bytes]:
    return MODEL, quote(name, safe=_PLAIN).encode("ascii")


class AnswerFacts:
    """Of one answer with text. The last bytes are read once, at the first question."""

    __slots__ = ("_engine", "_stream", "_wait_ms", "is_read", "usage")

    def __init__(self, engine: Engine, stream: bool, wait_ms: int) -> None:
        self._engine = engine
        self._stream = stream
        self._wait_ms = wait_ms
        self.is_read = False
        self.usage: Usage | None = None

    def of(self, tail: bytes) -> Usage | None:
        """Tokens and time, from the last bytes of a complete answer; None if they do not tell."""
        if not self.is_read:
            self.is_read = True
            self.usage = self._engine.usage(tail, stream=self._stream)
        return self.usage

    def headers(self, tail: bytes) -> Headers:
        said = self.of(tail)
        if said is None:
            return []
        headers: Headers = []
        if said.cached is not None:
            headers.append((CACHE_HIT, b"true" if said.cached else b"false"))
            headers.append((TOKENS_REUSED, b"%d" % said.cached))
        if said.gpu_ms is not None:
            headers.append((GPU_TIME, b"%d" % round(said.gpu_ms)))
        return headers

    def comment(self, tail: bytes) -> bytes:
        """`: facts cache_hit=true cache_tokens_reused=512 gpu_time_ms=40 queue_wait_ms=0`, as a whole event."""
        known = {name[2:].replace(b"-", b"_"): value for name, value in self.headers(tail)}
        known[b"queue_wait_ms"] = b"%d" % self._wait_ms
        return b": facts %b\n\n" % b" ".join(b"%b=%b" % pair for pair in known.items())


def usage_of(
    engine: Engine, relay: Relay, stream: bool, facts: AnswerFacts | None, *, estimates: bool = True
) -> Usage | None:
    """Tokens and time of an answer that has ended, as far as it and its headers tell.

    Of a stream that does not tell, or was left, the events are counted if `estimates`.
    """
    said = engine.usage(relay.tail(), stream=stream) if facts is None else facts.of(relay.tail())
    if said is None and not relay.events and (first := relay.first()):
        # llama.cpp tells the tokens of embeddings before the embeddings.
        said = engine.usage(first, stream=stream)
    if said is None:
        return estimated(relay.events) if estimates and relay.events else None
    if said.gpu_ms is None and (gpu_ms := _number(relay.headers, GPU_TIME)) is not None:
        said.gpu_ms = float(gpu_ms)
    return said


def _number(headers: Headers, wanted: bytes) -> int | None:
    for name, value in headers:
        if name == wanted:
            return int(value) if value.isdigit() and len(value) <= _DIGITS_MAX else None
    return None
