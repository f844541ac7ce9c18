"""How `/v1/chat/completions` is written: chunks of a stream, whole answers, log probabilities, calls of tools.

Owns the shape and nothing else. A stream's commonest event, a few letters of text, is put together from parts that were
encoded once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..text.output_stream import Chosen, Piece
from ..text.spelling import Speller
from ..text.tool_calls import Call
from ..text.tools import Form, new_call_id
from .written import encoded, new_id


class ChatDialect:
    def __init__(self, model: str, speller: Speller, form: Form, tells_usage: bool, wants_logprobs: bool) -> None:
        self._speller = speller
        self._form = form
        self._wants_logprobs = wants_logprobs
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = model
        # With include_usage, every event but the last says that there is none yet.
        self._usage_part: dict[str, Any] = {"usage": None} if tells_usage else {}
        self._calls_said: dict[int, int] = {}
        chunk = encoded({**self._top("chat.completion.chunk"), **self._usage_part})
        self._before = chunk[:-1] + b',"choices":[{"index":'

    def opening(self, index: int) -> bytes:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def events(self, index: int, piece: Piece) -> list[bytes]:
        events = []
        if piece.text and not (piece.chosen or piece.reasoning):
            events.append(
                b'%b%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]}'
                % (self._before, index, encoded(piece.text))
            )
        elif piece.chosen or piece.reasoning:
            delta = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
            delta |= {"content": piece.text} if piece.text or not piece.reasoning else {}
            events.append(self._chunk(index, delta, self._logprobs(piece.chosen) if piece.chosen else None))
        for call in piece.calls:
            place = self._calls_said.get(index, 0)
            self._calls_said[index] = place + 1
            events.append(self._chunk(index, {"tool_calls": [{"index": place, **self._call(call)}]}))
        return events

    def finish(self, index: int, reason: str) -> bytes:
        return self._chunk(index, {}, None, reason)

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        return encoded({**self._top("chat.completion.chunk"), "choices": [], "usage": usage})

    def whole(self, pieces: Sequence[Piece], reasons: Sequence[str], usage: Mapping[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": self._message(piece),
                "logprobs": self._logprobs(piece.chosen) if self._wants_logprobs else None,
                "finish_reason": reason,
            }
            for index, (piece, reason) in enumerate(zip(pieces, reasons, strict=True))
        ]
        return {**self._top("chat.completion"), "choices": choices, "usage": usage}

    def _top(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(
        self, index: int, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None = None, reason: str | None = None
    ) -> bytes:
        rest = encoded({"delta": delta, "logprobs": logprobs, "finish_reason": reason})
        return b"%b%d,%b]}" % (self._before, index, rest[1:])

    def _message(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            message["content"] = piece.text if piece.text.strip() else None
            message["tool_calls"] = [self._call(call) for call in piece.calls]
        return message

    def _call(self, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": new_call_id(self._form), "type": "function", "function": function}

    def _logprobs(self, chosen: Sequence[Chosen]) -> dict[str, Any]:
        content = [
            {**self._token(one.token, one.logprob), "top_logprobs": [self._token(*other) for other in one.top]}
            for one in chosen
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._speller.spell(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


# What the API itself says for a token that could not have come; JSON has no infinity.
LOGPROB_MIN = -9999.0


def finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
