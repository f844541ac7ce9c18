"""`/v1/chat/completions`: a conversation in, the next message out. And `/v1/completions`: text or tokens in, their
continuation out, the older endpoint with its own shapes. Owns how such a request becomes sequences, and how the answer
is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...serving.errors import ApiError, encoded, unsupported
from ...serving.fields import Body, boolean, integer, mapping
from ...serving.http import AnswerWriter
from ..sandbox.grammar import JsonConstraint
from ..text.harmony import ANSWER_HEADER, HarmonyReader
from ..text.templates import read_messages
from ..text.tokens import Speller
from ..text.tool_calls import (
    CALL_TOKENS,
    CallFormat,
    CallReader,
    OutputPiece,
    ScoredToken,
    ToolCall,
    Tools,
    call_format_of,
    new_call_id,
    read_tools,
)
from .answering import AnswerFormat, respond
from .model_context import ModelContext, Origin, OutputFormat, inputs_of, read_inputs
from .sampling_params import LOGPROBS_MAX, SEQUENCES_MAX, SamplingParams, read_sampling_params

# What the OpenAI API itself reports for an impossible token: JSON has no infinity.
LOGPROB_MIN = -9999.0


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
    dialect = ChatDialect(model.name, model.text.speller, params, form)
    await respond(model.engine, generation, dialect, answer, params)


def _reading(model: ModelContext, tools: Tools, is_held: bool) -> OutputFormat:
    """How the answer is parsed. One that follows a schema has no marks of any format."""
    names = tools.names if tools.may_be_called else frozenset()
    if model.harmony is not None and not is_held:
        return OutputFormat(HarmonyReader, names, marks=model.harmony.marks, stops=model.harmony.stops)
    if not tools.may_be_called:
        return OutputFormat()
    return OutputFormat(CallReader, names, spoken=model.text.specials_spelled(CALL_TOKENS))


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


class ChatDialect(AnswerFormat):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, model: str, speller: Speller, params: SamplingParams, form: CallFormat) -> None:
        super().__init__(model, speller, params)
        self._form = form
        self._calls_said: dict[int, int] = {}

    def opening(self, index: int) -> bytes:
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

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
            events.append(self._chunk(index, {"delta": delta}, piece.chosen))
        for call in piece.calls:
            place = self._calls_said.get(index, 0)
            self._calls_said[index] = place + 1
            events.append(self._chunk(index, {"delta": {"tool_calls": [{"index": place, **self._call(call)}]}}))
        return events

    def finish(self, index: int, reason: str) -> bytes:
        return self._chunk(index, {"delta": {}}, reason=reason)

    def _content(self, index: int, piece: OutputPiece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            message["content"] = piece.text if piece.text.strip() else None
            message["tool_calls"] = [self._call(call) for call in piece.calls]
        return {"message": message}

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
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


# --- the older endpoint ---------------------------------------------------------------------------------------------


async def complete(model: ModelContext, body: Body, origin: Origin, answer: AnswerWriter) -> None:
    """Answer with continuations. Raises ApiError, before anything was sent or from a stream that has begun."""
    logprobs = integer(body, "logprobs", 0, LOGPROBS_MAX)
    params = read_sampling_params(body, logprobs, model.engine.limits.choices)
    echoes = boolean(body, "echo")
    _refuse_what_is_not_done(body, params.choices, echoes and logprobs is not None)
    prompts = await read_inputs(model, inputs_of(body, "prompt", SEQUENCES_MAX), "prompt")
    generation = model.generation(prompts, params, origin, continues=True)
    echo = _echo(model, prompts, params.choices) if echoes else None
    dialect = CompletionDialect(model.name, model.text.speller, params, echo)
    await respond(model.engine, generation, dialect, answer, params)


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


class CompletionDialect(AnswerFormat):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, model: str, speller: Speller, params: SamplingParams, echo: Sequence[str] | None) -> None:
        super().__init__(model, speller, params)
        self._echo = echo

    def opening(self, index: int) -> bytes | None:
        return self._chunk(index, {"text": self._echo[index]}) if self._echo and self._echo[index] else None

    def events(self, index: int, piece: OutputPiece) -> list[bytes]:
        return [self._chunk(index, {"text": piece.text}, piece.chosen)]

    def finish(self, index: int, reason: str) -> bytes:
        return self._chunk(index, {"text": ""}, reason=reason)

    def _content(self, index: int, piece: OutputPiece) -> dict[str, Any]:
        return {"text": (self._echo[index] if self._echo else "") + piece.text}

    def _logprobs(self, chosen: Sequence[ScoredToken]) -> dict[str, Any]:
        return {
            "tokens": [self._text(one.token) for one in chosen],
            "token_logprobs": [_finite(one.logprob) for one in chosen],
            "top_logprobs": [{self._text(token): _finite(value) for token, value in one.top} for one in chosen],
            "text_offset": [one.offset for one in chosen],
        }

    def _text(self, token: int) -> str:
        """The token's text. Bytes of incomplete characters are escaped, so that different tokens stay different."""
        text, raw = self._speller.spell(token)
        return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
