"""OpenAI's chat as every engine takes it: written from a conversation, and its answers read as deltas.

Owns the body that engines get and the reading of their answers, whole or as events. Fields that the engine sends
besides are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from greenroom.dialects.neutral import (
    NOTHING,
    Conversation,
    Delta,
    Fields,
    Image,
    NamedChoice,
    Part,
    Reasoning,
    Text,
    Tokens,
    ToolDelta,
    ToolResult,
    ToolUse,
    Turn,
)
from greenroom.errors import EngineFault

CHAT_PATH: Final = b"/v1/chat/completions"
# A whole answer, or one event of it. Longer ones are no text, and to decode and encode them holds up all callers.
TEXT_BYTES_MAX: Final = 8 * 1024 * 1024
_ERROR_BYTES_MAX: Final = 64 * 1024
_DONE: Final = b"[DONE]"
_PICTURE: Final = b'"type":"image_url"'

_encode: Final = msgspec.json.Encoder().encode


# --- the question ---------------------------------------------------------------------------------------------------


def chat_fields(asked: Conversation, *, model: Raw, stream: bool) -> Fields:
    """The fields of a chat request. A stream always tells its tokens."""
    fields: dict[str, Any] = {"model": model, "messages": _messages(asked.turns)}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if asked.tokens_max is not None:
        fields["max_tokens"] = asked.tokens_max
    if asked.stops:
        fields["stop"] = asked.stops
    fields |= asked.sampling
    if asked.tools:
        fields |= _tools(asked)
    if asked.schema is not None:
        schema = {"name": "answer", "schema": asked.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif asked.any_json:
        fields["response_format"] = {"type": "json_object"}
    if asked.thinks is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": asked.thinks}
    if asked.effort is not None:
        fields["reasoning_effort"] = asked.effort
    return {name: value if isinstance(value, Raw) else Raw(_encode(value)) for name, value in fields.items()}


def has_images(fields: Fields) -> bool:
    """True if a chat that was written here has a picture. Quotes inside of texts are escaped."""
    return _PICTURE in bytes(fields.get("messages", NOTHING))


def _tools(asked: Conversation) -> dict[str, Any]:
    tools = []
    for tool in asked.tools:
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.schema}
        if tool.description:
            function["description"] = tool.description
        if tool.is_strict is not None:
            function["strict"] = tool.is_strict
        tools.append({"type": "function", "function": function})
    fields: dict[str, Any] = {"tools": tools}
    if isinstance(asked.tool_choice, NamedChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": asked.tool_choice.tool}}
    elif asked.tool_choice is not None:
        fields["tool_choice"] = asked.tool_choice
    if asked.one_tool_at_once:
        fields["parallel_tool_calls"] = False
    return fields


def _messages(turns: tuple[Turn, ...]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in turns:
        # Results come right after the calls, before what the user says besides.
        for part in turn.parts:
            if isinstance(part, ToolResult):
                messages.append(_result(part))
        rest = [part for part in turn.parts if not isinstance(part, ToolResult)]
        if rest or not turn.parts:
            messages.append(_message(turn.role, rest))
    return messages


def _result(part: ToolResult) -> dict[str, Any]:
    message = {"role": "tool", "tool_call_id": part.id, "content": _content(part.parts)}
    return message if part.name is None else {**message, "name": part.name}


def _message(role: str, parts: Sequence[Part]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": _content(parts)}
    if reasoning := "\n".join(part.text for part in parts if isinstance(part, Reasoning)):
        message["reasoning_content"] = reasoning
    calls = [part for part in parts if isinstance(part, ToolUse)]
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
        message["content"] = message["content"] or None
    return message


def _content(parts: Sequence[Part]) -> str | list[dict[str, Any]]:
    """Plain text where there is nothing else: many templates take no list."""
    if not any(isinstance(part, Image) for part in parts):
        return "\n".join(part.text for part in parts if isinstance(part, Text))
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Text):
            content.append({"type": "text", "text": part.text})
        elif isinstance(part, Image):
            content.append({"type": "image_url", "image_url": {"url": part.url}})
    return content


# --- the answer -----------------------------------------------------------------------------------------------------


class _ChatFunction(msgspec.Struct):
    name: str | None = None
    # Some engines send an object.
    arguments: str | dict[str, Any] | None = None


class _ChatCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _ChatFunction | None = None


class _Said(msgspec.Struct):
    """A message, or some of one. The two names of reasoning are those of llama.cpp and of vLLM."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ChatCall] | None = None


class _ChatChoice(msgspec.Struct):
    """What stopped it is named by vLLM and by SGLang: a text, or the number of a token."""

    delta: _Said | None = None
    message: _Said | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _ChatUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    cache_n: int | None = None
    prompt_ms: float | None = None
    predicted_ms: float | None = None


class _ChatAnswer(msgspec.Struct):
    choices: list[_ChatChoice] = []
    usage: _ChatUsage | None = None
    timings: _Timings | None = None
    error: Raw = NOTHING


class _Error(msgspec.Struct):
    message: str


_answer: Final = msgspec.json.Decoder(_ChatAnswer)
_error: Final = msgspec.json.Decoder(_Error | str)
_wrapped: Final = msgspec.json.Decoder(dict[str, Raw])


def read_answer(body: bytes) -> Delta:
    """A whole answer. Raises EngineFault if it is none."""
    try:
        answer = _answer.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFault("The engine answered something else than a chat.", details=str(error)) from None
    if not answer.choices:
        raise EngineFault("The engine's answer has no choice.")
    return _delta(answer)


def error_message(body: bytes) -> str:
    """The text of an engine's error, in any of the shapes that they send; of a long one the beginning."""
    try:
        fields = _wrapped.decode(body[:_ERROR_BYTES_MAX])
        raw = next(fields[name] for name in ("error", "message", "detail") if name in fields)
        said = _error.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, StopIteration):
        return body[:2_000].decode("utf-8", "replace") or "The engine gave no reason."
    return said if isinstance(said, str) else said.message


class ChatEvents:
    """Reads the events of a stream, however they are split. A line is an event: chat has no longer ones.

    `is_whole` is True once the engine gave a reason for the end, or its last word.
    """

    __slots__ = ("_held", "is_whole")

    def __init__(self) -> None:
        self._held = b""
        self.is_whole = False

    def feed(self, data: bytes) -> list[Delta]:
        """What came since. The delta with an error is the last one that counts."""
        lines = (self._held + data).split(b"\n")
        self._held = lines.pop()
        deltas = self._deltas(lines)
        if len(self._held) > TEXT_BYTES_MAX:
            self._held = b""
            deltas.append(Delta(error="The engine sent an event that is too long."))
        return deltas

    def end(self) -> list[Delta]:
        """What a last line says that has no line break."""
        held, self._held = self._held, b""
        return self._deltas([held])

    def _deltas(self, lines: list[bytes]) -> list[Delta]:
        deltas = []
        for line in lines:
            if not line.startswith(b"data:") or not (said := line[5:].strip()):
                continue
            if said == _DONE:
                self.is_whole = True
                continue
            delta = _event(said)
            self.is_whole = self.is_whole or delta.reason is not None
            deltas.append(delta)
        return deltas


def _event(said: bytes) -> Delta:
    try:
        answer = _answer.decode(said)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Delta(error="The engine sent an event that is no chat.")
    if bytes(answer.error) not in (b"", b"null"):
        return Delta(error=error_message(said))
    return _delta(answer)


def _delta(answer: _ChatAnswer) -> Delta:
    tokens = _tokens(answer) if answer.usage is not None else None
    if not answer.choices:
        return Delta(tokens=tokens)
    choice = answer.choices[0]
    said = choice.delta or choice.message
    stop = choice.stop_reason or choice.matched_stop
    stop = stop if isinstance(stop, str) and choice.finish_reason == "stop" else None
    if said is None:
        return Delta(reason=choice.finish_reason, tokens=tokens, stop=stop)
    tools = () if not said.tool_calls else tuple(map(_tool, range(len(said.tool_calls)), said.tool_calls))
    reasoning = said.reasoning_content or said.reasoning or ""
    return Delta(said.content or "", reasoning, tools, choice.finish_reason, tokens, stop=stop)


def _tool(place: int, call: _ChatCall) -> ToolDelta:
    function = call.function or _ChatFunction()
    arguments = function.arguments
    text = arguments if isinstance(arguments, str) else "" if arguments is None else _encode(arguments).decode()
    return ToolDelta(place if call.index is None else call.index, call.id, function.name, text)


def _tokens(answer: _ChatAnswer) -> Tokens:
    usage, timings = answer.usage or _ChatUsage(), answer.timings or _Timings()
    details = usage.prompt_tokens_details
    cached = timings.cache_n if details is None or details.cached_tokens is None else details.cached_tokens
    prompt = usage.prompt_tokens or 0
    return Tokens(
        prompt,
        usage.completion_tokens or 0,
        min(cached or 0, prompt),
        timings.prompt_ms or 0.0,
        timings.predicted_ms or 0.0,
    )
