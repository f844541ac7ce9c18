"""What answers tell of themselves, and when each is sent.

Owns the headers: how long a request waited, which model and version answers, and what it cost. The cost of a stream is
told at its end: in a trailer, and in a comment. What is not known of a cache is `unknown`, and `false` where none is
used.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from greenroom.dialects.dialect import Route
from greenroom.engines.base import Engine
from greenroom.engines.usage import Usage, estimated
from greenroom.http.headers import Headers
from greenroom.http.relays.relay import Relay, TailReader
from greenroom.library.records import Version, shown_as
from greenroom.runtime.loop import Ticket
from greenroom.serving.request import Candidate
from greenroom.serving.routes import UPSTREAM

WAIT: Final = b"x-queue-wait-ms"
MODEL: Final = b"x-model"
VERSION: Final = b"x-model-version"
REPO_ID: Final = b"x-model-repo-id"
CACHE_HIT: Final = b"x-cache-hit"
TOKENS_REUSED: Final = b"x-cache-tokens-reused"
GPU_TIME: Final = b"x-gpu-time-ms"
NOT_CACHED: Final[Headers] = [(CACHE_HIT, b"false"), (TOKENS_REUSED, b"0")]
NOT_KNOWN: Final[Headers] = [(CACHE_HIT, b"unknown"), (TOKENS_REUSED, b"0")]
# What the end of a stream tells.
TRAILER: Final = (b"trailer", GPU_TIME)
# Longer numbers are no figures.
_DIGITS_MAX: Final = 12
# What ids of repositories and paths have, besides letters and digits; anything else is escaped.
_PLAIN: Final = "/:@._-+,= "


def version_headers(version: Version | None, *, to_operator: bool) -> Headers:
    """Two headers; none for a model that is not under version control."""
    if version is None:
        return []
    repo_id = quote(shown_as(version.repo_id, to_operator=to_operator), safe=_PLAIN)
    return [(VERSION, b"%d" % version.number), (REPO_ID, repo_id.encode("ascii"))]


def model_header(name: str) -> tuple[bytes, bytes]:
    return MODEL, quote(name, safe=_PLAIN).encode("ascii")


def wait_ms(ticket: Ticket, now: float) -> int:
    """How long a request waited for its slot, or has waited so far."""
    waited_s = (ticket.granted_at or now) - ticket.arrived
    return round(waited_s * 1000) if waited_s > 0 else 0


def unless_told(route: Route, candidate: Candidate) -> Headers | None:
    """What an answer says of its prefix where its engine does not; None where the engine's answer passes as it is."""
    if route is UPSTREAM:
        return None
    return NOT_CACHED if candidate.is_not_cached or route.is_promptless else NOT_KNOWN


class AnswerFacts(TailReader):
    """Of one answer with text. The last bytes are read once, at the first question."""

    __slots__ = ("_engine", "_wait_ms", "is_read", "usage")

    def __init__(self, engine: Engine, *, is_stream: bool, wait_ms: int | None = None) -> None:
        """With `wait_ms`, the wait for the slot, a stream ends with a comment."""
        self.is_stream, self.has_comment = is_stream, wait_ms is not None
        self._engine = engine
        self._wait_ms = wait_ms or 0
        self.is_read = False
        self.usage: Usage | None = None

    def of(self, tail: bytes) -> Usage | None:
        """Tokens and time, from the last bytes of a complete answer; None if they do not tell."""
        if not self.is_read:
            self.is_read = True
            self.usage = self._engine.usage(tail, stream=self.is_stream)
        return self.usage

    def headers(self, tail: bytes) -> Headers:
        said = self.of(tail)
        if said is None:
            return []
        headers: Headers = []
        if said.cached is not None:
            headers.append((CACHE_HIT, b"true" if said.cached else b"false"))
            headers.append((TOKENS_REUSED, b"%d" % said.cached))
        return headers + self.trailers(tail)

    def trailers(self, tail: bytes) -> Headers:
        """What the head of a stream could not tell."""
        said = self.of(tail)
        return [] if said is None or said.gpu_ms is None else [(GPU_TIME, b"%d" % round(said.gpu_ms))]

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
