"""What an answer tells beside its body: how long it waited, which model and version it is of, and what it cost.

Owns the names of these headers and when each is sent. The cost is also told in a comment at the end of a stream,
and for the request's record. What is not known is left out; `false` and 0 stand where no cache is used, not where
nothing is known of one.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from greenroom.engines.base import Engine
from greenroom.engines.usage import Usage, estimated
from greenroom.http.headers import Headers
from greenroom.http.relays.relay import Relay
from greenroom.library.versions import Version, told_as

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
