"""Tokens of an answer, read once from its last bytes. Bodies are never decoded as a whole.

llama.cpp says `timings` in every answer; others say `usage` when asked to. The tail may begin anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

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


_openai = msgspec.json.Decoder(_OpenAi)
_timings = msgspec.json.Decoder(_Timings)


def from_usage(tail: bytes) -> Usage | None:
    """The last `usage` object of the answer."""
    found = _last_object(tail, b'"usage"')
    if found is None:
        return None
    try:
        said = _openai.decode(found)
    except msgspec.DecodeError:
        return None
    details = said.prompt_tokens_details
    return Usage(said.prompt_tokens, said.completion_tokens, (details and details.cached_tokens) or 0)


def from_timings(tail: bytes) -> Usage | None:
    """llama.cpp's `timings`: it counts tokens read from the cache apart from those computed."""
    found = _last_object(tail, b'"timings"')
    if found is None:
        return None
    try:
        said = _timings.decode(found)
    except msgspec.DecodeError:
        return None
    return Usage(said.prompt_n + said.cache_n, said.predicted_n, said.cache_n)


def estimated(events: int) -> Usage:
    """Nothing was said: one event is about one token."""
    return Usage(0, events, estimated=True)


def _last_object(tail: bytes, key: bytes) -> bytes | None:
    """The JSON object after the last occurrence of this key, if the tail holds all of it."""
    at = tail.rfind(key)
    while at >= 0:
        start = tail.find(b"{", at)
        between = tail[at + len(key) : start].strip() if start >= 0 else b""
        if between == b":":
            return _balanced(tail, start)
        at = tail.rfind(key, 0, at)
    return None


def _balanced(text: bytes, start: int) -> bytes | None:
    """From this brace to the one that closes it. These objects hold no strings with braces."""
    depth = 0
    for at in range(start, len(text)):
        if text[at] == 0x7B:
            depth += 1
        elif text[at] == 0x7D:
            depth -= 1
            if depth == 0:
                return text[start : at + 1]
    return None
