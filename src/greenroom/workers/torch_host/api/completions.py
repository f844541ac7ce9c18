"""`/v1/completions`: text or tokens in, their continuation out. The older endpoint, with its own shapes. Owns how such
a request becomes sequences, and how the answer is written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...serving.errors import encoded, new_id, unsupported
from ...serving.fields import Body, boolean, integer
from ...serving.http import AnswerWriter
from ..text.output_stream import OutputPiece, ScoredToken
from ..text.tokens import Speller
from .answering import answer_stream, answer_whole
from .chat import finite
from .model_context import ModelContext, Origin, inputs_of, read_inputs
from .sampling_params import LOGPROBS_MAX, SEQUENCES_MAX, read_sampling_params


async def complete(model: ModelContext, body: Body, origin: Origin, answer: AnswerWriter) -> None:
    """Answer with continuations. Raises ApiError, before anything was sent or from a stream that has begun."""
    logprobs = integer(body, "logprobs", 0, LOGPROBS_MAX)
    params = read_sampling_params(body, logprobs, model.engine.limits.choices)
    echoes = boolean(body, "echo")
    _refuse_what_is_not_done(body, params.choices, echoes and logprobs is not None)
    prompts = await read_inputs(model, inputs_of(body, "prompt", SEQUENCES_MAX), "prompt")
    generation = model.generation(prompts, params, origin, continues=True)
    dialect = CompletionDialect(
        model.name,
        model.text.speller,
        _echo(model, prompts, params.choices) if echoes else None,
        params.tells_usage,
        logprobs is not None,
    )
    if params.streams:
        await answer_stream(model.engine, generation, dialect, answer, params.tells_usage)
    else:
        await answer_whole(model.engine, generation, dialect, answer)


def _echo(model: ModelContext, prompts: Sequence[Sequence[int]], choices: int) -> list[str]:
    """The prompt as the beginning of each choice. Stop sequences and logprobs do not apply to it."""
    special = model.text.special
    texts = [model.text.decode([token for token in prompt if token not in special]) for prompt in prompts]
    return [text for text in texts for _ in range(choices)]


def _refuse_what_is_not_done(body: Body, choices: int, echoes_logprobs: bool) -> None:
    if body.get("suffix"):
        raise unsupported("suffix is not supported: leave it out.", "suffix")
    best_of = integer(body, "best_of", 1, SEQUENCES_MAX)
    if best_of is not None and best_of != choices:
        raise unsupported("best_of is only supported when it equals n: leave it out.", "best_of")
    if echoes_logprobs:
        raise unsupported("echo and logprobs cannot be had together: leave one out.", "echo")


class CompletionDialect:
    def __init__(
        self, model: str, speller: Speller, echo: Sequence[str] | None, tells_usage: bool, wants_logprobs: bool
    ) -> None:
        self._speller = speller
        self._echo = echo
        self._wants_logprobs = wants_logprobs
        self._top = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        chunk = encoded({**self._top, **({"usage": None} if tells_usage else {})})
        self._before = chunk[:-1] + b',"choices":[{"index":'

    def opening(self, index: int) -> bytes | None:
        return self._chunk(index, self._echo[index]) if self._echo and self._echo[index] else None

    def events(self, index: int, piece: OutputPiece) -> list[bytes]:
        return [self._chunk(index, piece.text, piece.chosen)]

    def finish(self, index: int, reason: str) -> bytes:
        return self._chunk(index, "", (), reason)

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        return encoded({**self._top, "choices": [], "usage": usage})

    def whole(self, pieces: Sequence[OutputPiece], reasons: Sequence[str], usage: Mapping[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": (self._echo[index] if self._echo else "") + piece.text,
                "logprobs": self._logprobs(piece.chosen) if self._wants_logprobs else None,
                "finish_reason": reason,
            }
            for index, (piece, reason) in enumerate(zip(pieces, reasons, strict=True))
        ]
        return {**self._top, "choices": choices, "usage": usage}

    def _chunk(self, index: int, text: str, chosen: Sequence[ScoredToken] = (), reason: str | None = None) -> bytes:
        logprobs = self._logprobs(chosen) if chosen else None
        rest = encoded({"text": text, "logprobs": logprobs, "finish_reason": reason})
        return b"%b%d,%b]}" % (self._before, index, rest[1:])

    def _logprobs(self, chosen: Sequence[ScoredToken]) -> dict[str, Any]:
        return {
            "tokens": [self._text(one.token) for one in chosen],
            "token_logprobs": [finite(one.logprob) for one in chosen],
            "top_logprobs": [{self._text(token): finite(value) for token, value in one.top} for one in chosen],
            "text_offset": [one.offset for one in chosen],
        }

    def _text(self, token: int) -> str:
        """The token's text. Bytes of incomplete characters are escaped, so that different tokens stay different."""
        text, raw = self._speller.spell(token)
        return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
