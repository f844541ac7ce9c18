"""Runs the sequences of one request and sends their output, whole or as a stream.

Owns the life of these sequences: whatever happens, none goes on for a caller that is gone. A `AnswerFormat` writes the
answer: one for chat, one for completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...serving.errors import ApiError, encoded, too_long, unavailable
from ...serving.http import AnswerWriter
from ..engine.requests import InferenceEngine, PromptTooLong, UnknownToken
from ..failures import Failure
from ..text.output_stream import OutputPiece, OutputStream

Usage = Mapping[str, Any]


class AnswerFormat(Protocol):
    """How one endpoint writes answers. Bytes are events of a stream, ready to be sent."""

    def opening(self, index: int) -> bytes | None:
        """The event before the first token of a choice, if there is one."""

    def events(self, index: int, piece: OutputPiece) -> list[bytes]: ...

    def finish(self, index: int, reason: str) -> bytes: ...

    def usage(self, usage: Usage) -> bytes:
        """The event after the last choice, if the caller asked for it."""

    def whole(self, pieces: Sequence[OutputPiece], reasons: Sequence[str], usage: Usage) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Generation:
    """The sequences of one request, in the order of their choices, and the sizes of its prompts."""

    outputs: Sequence[OutputStream]
    prompts: Sequence[int]
    """Tokens of each prompt. The choices of one prompt follow each other."""


async def answer_whole(
    engine: InferenceEngine, generation: Generation, dialect: AnswerFormat, answer: AnswerWriter
) -> None:
    pieces = [OutputPiece() for _ in generation.outputs]

    def keep(output: OutputStream, piece: OutputPiece) -> None:
        pieces[output.index].add(piece)

    for output in generation.outputs:
        output.on_piece = keep
    await generate(engine, generation)
    reasons = [output.finish for output in generation.outputs]
    body = encoded(dialect.whole(pieces, reasons, usage_of(generation)))
    answer.whole(200, body, headers_of(generation))


async def answer_stream(
    engine: InferenceEngine, generation: Generation, dialect: AnswerFormat, answer: AnswerWriter, tells_usage: bool
) -> None:
    stream = _Stream(dialect, answer, generation)
    for output in generation.outputs:
        output.on_piece = stream.say
    await generate(engine, generation, stream)
    # A slow client gets what was joined for it now.
    stream.flush()
    if tells_usage:
        stream.send(dialect.usage(usage_of(generation)))
    stream.send(b"[DONE]")
    answer.end_events()


class _Stream:
    """The events of all choices. While the client does not keep up, the output of a choice is joined to one event."""

    def __init__(self, dialect: AnswerFormat, answer: AnswerWriter, generation: Generation) -> None:
        self._dialect = dialect
        self._answer = answer
        self._generation = generation
        self._opened: set[int] = set()
        self._joined: dict[int, OutputPiece] = {}
        answer.on_relief = self.flush

    def say(self, output: OutputStream, piece: OutputPiece) -> None:
        if self._answer.is_choked:
            self._joined.setdefault(output.index, OutputPiece()).add(piece)
        else:
            self._write(output.index, piece)

    def over(self, output: OutputStream) -> None:
        if output.error is None:
            self.flush()
            self._open(output.index)
            self.send(self._dialect.finish(output.index, output.finish))

    def flush(self) -> None:
        joined, self._joined = self._joined, {}
        for index, piece in joined.items():
            self._write(index, piece)

    def send(self, event: bytes) -> None:
        # The head goes out with the first event: by then the cached tokens are known, and an error before it still
        # gets a status of its own.
        if not self._answer.has_begun:
            self._answer.begin_events(cache_headers_of(self._generation))
        self._answer.event(event)

    def _write(self, index: int, piece: OutputPiece) -> None:
        self._open(index)
        for event in self._dialect.events(index, piece):
            self.send(event)

    def _open(self, index: int) -> None:
        if index not in self._opened:
            self._opened.add(index)
            opening = self._dialect.opening(index)
            if opening is not None:
                self.send(opening)


async def generate(engine: InferenceEngine, generation: Generation, stream: _Stream | None = None) -> None:
    """Submit all sequences and wait until all are over. Raises the first error of one and ends the others."""
    over = asyncio.get_running_loop().create_future()
    left = len(generation.outputs)

    def on_over(output: OutputStream) -> None:
        nonlocal left
        left -= 1
        error: Exception | None = output.error
        try:
            if stream is not None:
                stream.over(output)
        except Exception as mistake:
            # Raised from `over`, which would never be set otherwise.
            error = mistake
        if not over.done() and error is not None:
            over.set_exception(error)
        elif not over.done() and left == 0:
            over.set_result(None)

    try:
        for output in generation.outputs:
            output.on_over = on_over
        engine.submit(*(output.request for output in generation.outputs))
        await over
    except PromptTooLong as error:
        raise too_long(str(error)) from None
    except UnknownToken as error:
        raise ApiError(str(error), code="unknown_token") from None
    except Failure as error:
        raise unavailable(str(error)) from None
    finally:
        for output in generation.outputs:
            output.request.cancelled = True
            output.silence()


def usage_of(generation: Generation) -> Usage:
    """Each prompt counts once, however many choices it has."""
    prompt, completion = sum(generation.prompts), sum(output.tokens for output in generation.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": _reused(generation) or 0},
        # Beyond OpenAI's: a stream has no other place for it.
        "gpu_time_ms": _gpu_time_ms(generation),
    }


def headers_of(generation: Generation) -> Mapping[str, str]:
    """The headers of a complete answer."""
    return {**cache_headers_of(generation), "x-gpu-time-ms": str(_gpu_time_ms(generation))}


def _gpu_time_ms(generation: Generation) -> int:
    return round(1000 * sum(output.end.compute_s for output in generation.outputs if output.end is not None))


def cache_headers_of(generation: Generation) -> Mapping[str, str]:
    """Empty while any of several prompts still waits for its place in the batch: the answer does not wait for it."""
    reused = _reused(generation)
    if reused is None:
        return {}
    return {"x-cache-hit": "true" if reused else "false", "x-cache-tokens-reused": str(reused)}


def _reused(generation: Generation) -> int | None:
    """Cached tokens of the first choice of each prompt; the other choices reuse that prompt. None: not known yet."""
    choices = max(len(generation.outputs) // max(len(generation.prompts), 1), 1)
    known = [output.request.cached_tokens for output in generation.outputs[::choices]]
    found = [tokens for tokens in known if tokens is not None]
    return sum(found) if len(found) == len(known) else None
