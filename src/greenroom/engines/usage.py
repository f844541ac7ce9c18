"""What an answer cost: tokens, and the time its engine computed, as the engine tells them.

Read from the last bytes of an answer, which may begin anywhere; long bodies are never decoded as a whole. llama.cpp
sends `timings` in every answer; others send `usage` when asked to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from greenroom.engines.usage_shapes import LlamacppTimings, OpenAiUsage, WholeAnswer


@dataclass(slots=True, init=False)
class Usage:
    """The token counts of one answer; `estimated` if the engine did not send both."""

    prompt: int
    completion: int
    # Tokens of the prompt that were not computed again, and how long the engine computed; None if it does not tell.
    cached: int | None
    gpu_ms: float | None
    estimated: bool

    def __init__(
        self,
        prompt: int,
        completion: int,
        cached: int | None = None,
        gpu_ms: float | None = None,
        estimated: bool = False,
    ) -> None:
        self.prompt = prompt
        self.completion = completion
        self.cached = cached
        self.gpu_ms = gpu_ms
        self.estimated = estimated


_Said = TypeVar("_Said")

# No answer has as many tokens or takes as many milliseconds.
FIGURE_MAX: Final = 10**12

# Objects inside a usage object; the largest known has two.
NESTED_MAX: Final = 8

_openai: Final = msgspec.json.Decoder(OpenAiUsage)
_timings: Final = msgspec.json.Decoder(LlamacppTimings)
_answer: Final = msgspec.json.Decoder(WholeAnswer)


def from_usage(tail: bytes) -> Usage | None:
    """From the last `usage` object of the answer; None if that does not tell how long the answer is. If it tells only
    that, the prompt is 0 and the whole is an estimate."""
    whole = _whole(tail)
    said = whole.usage if whole is not None else _last(tail, b'"usage"', _openai)
    if said is None:
        return None
    prompt, completion = said.prompt_tokens, said.completion_tokens
    prompt = _sound(said.input_tokens if prompt is None else prompt)
    completion = _sound(said.output_tokens if completion is None else completion)
    if completion is None:
        # Of embeddings all tokens are the prompt's.
        completion = _rest(said.total_tokens, prompt)
    if completion is None:
        return None
    if prompt is None:
        prompt = _rest(said.total_tokens, completion)
    details = said.prompt_tokens_details or said.input_tokens_details
    cached = None if details is None else details.cached_tokens
    return Usage(prompt or 0, completion, _sound(cached), _sound_ms(said.gpu_time_ms), estimated=prompt is None)


def from_timings(tail: bytes) -> Usage | None:
    """From llama.cpp's `timings`, which count cached tokens apart from computed ones."""
    whole = _whole(tail)
    said = whole.timings if whole is not None else _last(tail, b'"timings"', _timings)
    if said is None:
        return None
    is_timed = said.prompt_ms is not None or said.predicted_ms is not None
    gpu_ms = _sound_ms((said.prompt_ms or 0.0) + (said.predicted_ms or 0.0)) if is_timed else None
    cached = _sound(said.cache_n)
    return Usage(said.prompt_n + (cached or 0), said.predicted_n, cached, gpu_ms)


def _sound(tokens: int | None) -> int | None:
    """The figure, unless no answer can have it: engines of other makers send what they like."""
    return tokens if tokens is not None and 0 <= tokens <= FIGURE_MAX else None


def _sound_ms(figure: float | None) -> float | None:
    return figure if figure is not None and 0.0 <= figure <= FIGURE_MAX else None


def _rest(total: int | None, part: int | None) -> int | None:
    return None if total is None or part is None else _sound(total - part)


def estimated(events: int) -> Usage:
    """A guess where the engine sent no count: one event is about one token."""
    return Usage(0, events, estimated=True)


def _whole(tail: bytes) -> WholeAnswer | None:
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
