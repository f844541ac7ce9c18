"""Runs the sequences of one request and sends their output, whole or as a stream.

Owns the life of these sequences: whatever happens, none goes on for a caller that is gone. An `AnswerFormat` writes the
answer: one for chat, one for completions.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...serving.errors import ApiError, encoded, new_id, too_long, unavailable
from ...serving.http import AnswerWriter
from ..engine.requests import InferenceEngine, PromptTooLong, UnknownToken
from ..failures import Failure
from ..text.output_stream import OutputListener, OutputStream
from ..text.tokens import Speller
from ..text.tool_calls import OutputPiece, ScoredToken
from .sampling_params import SamplingParams

Usage = Mapping[str, Any]


class AnswerFormat(ABC):
    """How one endpoint writes answers. Bytes are events of a stream, ready to be sent. `kind` and `chunk_kind` are its
    names of a whole answer and of an event."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: str, speller: Speller, params: SamplingParams) -> None:
        self._speller = speller
        self._wants_logprobs = params.sampling.logprobs is not None
        self._top = {"id": new_id(self.prefix), "object": self.kind, "created": int(time.time()), "model": model}
        # With include_usage, every event but the last has a null usage.
        chunk = encoded({**self._top, "object": self.chunk_kind, **({"usage": None} if params.tells_usage else {})})
        self._before = chunk[:-1] + b',"choices":[{"index":'

    @abstractmethod
    def opening(self, index: int) -> bytes | None:
        """The event before the first token of a choice, if there is one."""

    @abstractmethod
    def events(self, index: int, piece: OutputPiece) -> list[bytes]: ...

    @abstractmethod
    def finish(self, index: int, reason: str) -> bytes: ...

    def usage(self, usage: Usage) -> bytes:
        """The event after the last choice, if the caller asked for it."""
        return encoded({**self._top, "object": self.chunk_kind, "choices": [], "usage": usage})

    def whole(self, pieces: Sequence[OutputPiece], reasons: Sequence[str], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self._content(index, piece),
                "logprobs": self._logprobs(piece.chosen) if self._wants_logprobs else None,
                "finish_reason": reason,
            }
            for index, (piece, reason) in enumerate(zip(pieces, reasons, strict=True))
        ]
        return {**self._top, "choices": choices, "usage": usage}

    @abstractmethod
    def _content(self, index: int, piece: OutputPiece) -> dict[str, Any]:
        """What a whole choice says."""

    @abstractmethod
    def _logprobs(self, chosen: Sequence[ScoredToken]) -> dict[str, Any]: ...

    def _chunk(
        self, index: int, content: Mapping[str, Any], chosen: Sequence[ScoredToken] = (), reason: str | None = None
    ) -> bytes:
        logprobs = self._logprobs(chosen) if chosen else None
        rest = encoded({**content, "logprobs": logprobs, "finish_reason": reason})
        return b"%b%d,%b]}" % (self._before, index, rest[1:])


@dataclass(frozen=True, slots=True)
class Generation:
    """The sequences of one request, in the order of their choices, and the sizes of its prompts."""

    outputs: Sequence[OutputStream]
    prompts: Sequence[int]
    """Tokens of each prompt. The choices of one prompt follow each other."""


async def respond(
    engine: InferenceEngine, generation: Generation, dialect: AnswerFormat, answer: AnswerWriter, params: SamplingParams
) -> None:
    if params.streams:
        stream = _Stream(dialect, answer, generation)
        await stream.run(engine)
        # A slow client gets what was joined for it now.
        stream.flush()
        if params.tells_usage:
            stream.send(dialect.usage(usage_of(generation)))
        stream.send(b"[DONE]")
        answer.end_events()
        return
    whole = _Whole(generation)
    await whole.run(engine)
    reasons = [output.finish for output in generation.outputs]
    answer.whole(200, encoded(dialect.whole(whole.pieces, reasons, usage_of(generation))), headers_of(generation))


class _Run(OutputListener):
    """All sequences of one request, until they are over."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._left = len(generation.outputs)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, engine: InferenceEngine) -> None:
        """Submit all and wait until all are over. Raises the first error of one and ends the others."""
        outputs = self._generation.outputs
        try:
            for output in outputs:
                output.listener = self
            engine.submit(*(output.request for output in outputs))
            await self._over
        except PromptTooLong as error:
            raise too_long(str(error)) from None
        except UnknownToken as error:
            raise ApiError(str(error), code="unknown_token") from None
        except Failure as error:
            raise unavailable(str(error)) from None
        finally:
            for output in outputs:
                output.request.cancelled = True
                output.silence()

    def over(self, output: OutputStream) -> None:
        self._left -= 1
        error: Exception | None = output.error
        try:
            self._close(output)
        except Exception as mistake:
            # Raised from `run`, which would wait for ever otherwise.
            error = mistake
        if not self._over.done() and error is not None:
            self._over.set_exception(error)
        elif not self._over.done() and self._left == 0:
            self._over.set_result(None)

    def _close(self, output: OutputStream) -> None:
        """One of them is over."""


class _Whole(_Run):
    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self.pieces = [OutputPiece() for _ in generation.outputs]

    def say(self, output: OutputStream, piece: OutputPiece) -> None:
        self.pieces[output.index].add(piece)


class _Stream(_Run):
    """The events of all choices. While the client does not keep up, the output of a choice is joined to one event."""

    def __init__(self, dialect: AnswerFormat, answer: AnswerWriter, generation: Generation) -> None:
        super().__init__(generation)
        self._dialect = dialect
        self._answer = answer
        self._opened: set[int] = set()
        self._joined: dict[int, OutputPiece] = {}
        answer.on_relief = self.flush

    def say(self, output: OutputStream, piece: OutputPiece) -> None:
        if self._answer.is_choked:
            self._joined.setdefault(output.index, OutputPiece()).add(piece)
        else:
            self._write(output.index, piece)

    def _close(self, output: OutputStream) -> None:
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
