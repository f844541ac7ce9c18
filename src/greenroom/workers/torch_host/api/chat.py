"""`/v1/chat/completions`: a conversation in, the next message out. Owns how such a request becomes sequences, and how
the answer is written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...serving.errors import ApiError, encoded, new_id
from ...serving.fields import Body, boolean, integer, mapping
from ...serving.http import AnswerWriter
from ..sandbox.grammar import JsonConstraint
from ..text.harmony import ANSWER_HEADER, HarmonyReader
from ..text.output_stream import OutputPiece, ScoredToken
from ..text.templates import read_messages
from ..text.tokens import Speller
from ..text.tool_calls import (
    CALL_TOKENS,
    CallFormat,
    CallReader,
    ToolCall,
    Tools,
    call_format_of,
    new_call_id,
    read_tools,
)
from .answering import answer_stream, answer_whole
from .model_context import ModelContext, Origin, OutputFormat
from .sampling_params import LOGPROBS_MAX, read_sampling_params


async def chat(model: ModelContext, body: Body, origin: Origin, answer: AnswerWriter) -> None:
    """Answer this conversation. Raises ApiError, before anything was sent or from a stream that has begun."""
    logprobs = _logprobs(body)
    params = read_sampling_params(body, logprobs, model.engine.limits.choices)
    tools = read_tools(body)
    messages = read_messages(body, "developer" in model.template.source, thinks=model.harmony is not None)
    switches = mapping(body, "chat_template_kwargs") or {}
    form = call_format_of(model.template.source)
    constraint = await _constraint(model, body, tools)
    prompt = await model.template.render(messages, tools.shown, switches, model.engine.context)
    if model.harmony is not None and constraint is not None:
        prompt += ANSWER_HEADER
    tokens = await model.text.encode(prompt, False, model.engine.context, "messages")
    model.check(tokens, "messages")

    reading = _reading(model, tools, constraint is not None)
    generation = model.generation([tokens], params, origin, constraint, reading=reading)
    dialect = ChatDialect(model.name, model.text.speller, form, params.tells_usage, logprobs is not None)
    if params.streams:
        await answer_stream(model.engine, generation, dialect, answer, params.tells_usage)
    else:
        await answer_whole(model.engine, generation, dialect, answer)


def _reading(model: ModelContext, tools: Tools, is_held: bool) -> OutputFormat:
    """How the answer is parsed. One that follows a schema has no marks of any format."""
    names = tools.names if tools.may_be_called else frozenset()
    if model.harmony is not None and not is_held:
        return OutputFormat(lambda: HarmonyReader(names), marks=model.harmony.marks, stops=model.harmony.stops)
    if not tools.may_be_called:
        return OutputFormat()
    return OutputFormat(lambda: CallReader(names), spoken=model.text.specials_spelled(CALL_TOKENS))


def _logprobs(body: Body) -> int | None:
    top = integer(body, "top_logprobs", 0, LOGPROBS_MAX)
    if boolean(body, "logprobs"):
        return top or 0
    if top:
        raise ApiError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None


async def _constraint(model: ModelContext, body: Body, tools: Tools) -> JsonConstraint | None:
    """A tool that must be called is a schema too; it takes precedence over response_format."""
    forced = tools.forced_schema(call_format_of(model.template.source))
    if forced is not None:
        return await model.grammars.constraint(forced, strict=False, param="tools")
    wanted = _response_schema(mapping(body, "response_format") or {})
    if wanted is None:
        return None
    schema, strict = wanted
    return await model.grammars.constraint(schema, strict, "response_format")


def _response_schema(wanted: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool] | None:
    kind = wanted.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}, True
    said = wanted.get("json_schema")
    if kind != "json_schema" or not isinstance(said, dict):
        raise ApiError(
            "response_format must be of type text, json_object or json_schema, the last with a json_schema object.",
            param="response_format",
        )
    schema = said.get("schema", {})
    if not isinstance(schema, dict):
        raise ApiError("response_format: json_schema.schema must be an object.", param="response_format")
    return schema, boolean(said, "strict")


class ChatDialect:
    def __init__(self, model: str, speller: Speller, form: CallFormat, tells_usage: bool, wants_logprobs: bool) -> None:
        self._speller = speller
        self._form = form
        self._wants_logprobs = wants_logprobs
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = model
        # With include_usage, every event but the last has a null usage.
        self._usage_part: dict[str, Any] = {"usage": None} if tells_usage else {}
        self._calls_said: dict[int, int] = {}
        chunk = encoded({**self._top("chat.completion.chunk"), **self._usage_part})
        self._before = chunk[:-1] + b',"choices":[{"index":'

    def opening(self, index: int) -> bytes:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def events(self, index: int, piece: OutputPiece) -> list[bytes]:
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

    def whole(self, pieces: Sequence[OutputPiece], reasons: Sequence[str], usage: Mapping[str, Any]) -> dict[str, Any]:
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

    def _message(self, piece: OutputPiece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            message["content"] = piece.text if piece.text.strip() else None
            message["tool_calls"] = [self._call(call) for call in piece.calls]
        return message

    def _call(self, call: ToolCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": new_call_id(self._form), "type": "function", "function": function}

    def _logprobs(self, chosen: Sequence[ScoredToken]) -> dict[str, Any]:
        content = [
            {**self._token(one.token, one.logprob), "top_logprobs": [self._token(*other) for other in one.top]}
            for one in chosen
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._speller.spell(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


# What the OpenAI API itself reports for an impossible token: JSON has no infinity.
LOGPROB_MIN = -9999.0


def finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
