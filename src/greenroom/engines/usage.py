"""Reads the token counts of an answer from its last bytes. Long bodies are never decoded as a whole.

llama.cpp sends `timings` in every answer; others send `usage` when asked to. The tail may begin anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec


@dataclass(frozen=True, slots=True)
class Usage:
    prompt: int
    completion: int
    cached: int = 0
    estimated: bool = False


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _OpenAi(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    prompt_n: int
    predicted_n: int
    cache_n: int = 0


class _WholeAnswer(msgspec.Struct):
    """A whole answer; all other fields are skipped."""

    usage: _OpenAi | None = None
    timings: _Timings | None = None


_Said = TypeVar("_Said")

# Objects inside a usage object; the largest known has two.
NESTED_MAX = 8

_openai = msgspec.json.Decoder(_OpenAi)
_timings = msgspec.json.Decoder(_Timings)
_answer = msgspec.json.Decoder(_WholeAnswer)


def from_usage(tail: bytes) -> Usage | None:
    """The last `usage` object of the answer."""
    whole = _whole(tail)
    said = whole.usage if whole is not None else _last(tail, b'"usage"', _openai)
    if said is None:
        return None
    details = said.prompt_tokens_details
    return Usage(said.prompt_tokens, said.completion_tokens, (details and details.cached_tokens) or 0)


def from_timings(tail: bytes) -> Usage | None:
    """From llama.cpp's `timings`, which count cached tokens apart from computed ones."""
    whole = _whole(tail)
    said = whole.timings if whole is not None else _last(tail, b'"timings"', _timings)
    return None if said is None else Usage(said.prompt_n + said.cache_n, said.predicted_n, said.cache_n)


def estimated(events: int) -> Usage:
    """A guess where the engine sent no count: one event is about one token."""
    return Usage(0, events, estimated=True)


def _whole(tail: bytes) -> _WholeAnswer | None:
    """A short answer that is not a stream, decoded at once; None otherwise."""
    if not tail.startswith(b"{"):
        return None
    try:
        return _answer.decode(tail)
    except msgspec.DecodeError:
        return None


def _last(tail: bytes, key: bytes, decoder: msgspec.json.Decoder[_Said]) -> _Said | None:
    """The JSON object after the last occurrence of this key, if the tail contains all of it."""
    at = tail.rfind(key)
    while at >= 0:
        start = tail.find(b"{", at)
        if start >= 0 and tail[at + len(key) : start].strip() == b":":
            return _object(tail, start, decoder)
        at = tail.rfind(key, 0, at)
    return None


def _object(tail: bytes, start: int, decoder: msgspec.json.Decoder[_Said]) -> _Said | None:
    """The object that begins here. Tries each closing brace: there are few, and none inside strings."""
    end = start
    for _ in range(NESTED_MAX):
        end = tail.find(b"}", end) + 1
        if end == 0:
            return None
        try:
            return decoder.decode(tail[start:end])
        except msgspec.ValidationError:
            return None
        except msgspec.DecodeError:
            continue
    return None
