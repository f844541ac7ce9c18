"""Answers as Ollama's API has them: one JSON object, or one on each line of a stream."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import Raw

from greenroom.dialects.chat import TEXT_BYTES_MAX
from greenroom.dialects.errors import ErrorShape
from greenroom.dialects.heartbeat import StreamShape
from greenroom.dialects.neutral import AnswerContext, Conversation, Delta, Fields, Tokens, ToolDelta, arguments_of
from greenroom.dialects.ollama.requests import (
    embed_fields,
    embedding_fields,
    is_unload,
    only_loads,
    read_chat,
    read_generate,
)
from greenroom.dialects.translation import ANSWER_BYTES_MAX, AnswerTranslator, Translation, nothing, to_chat
from greenroom.errors import EngineFault

LINES: Final = b"application/x-ndjson"
EMBEDDINGS_PATH: Final = b"/v1/embeddings"
_NS_A_MS: Final = 1_000_000
_encode: Final = msgspec.json.Encoder().encode


class OllamaErrors(ErrorShape):
    def body(self, status: int, error: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        return {"error": error["message"]}

    def event(self, body: bytes, number: int) -> bytes:
        return body + b"\n"


def _lines(*, is_chat: bool) -> StreamShape:
    return StreamShape(
        lambda *context: OllamaAnswer(AnswerContext(*context), is_chat=is_chat).line("") + b"\n", has_comments=False
    )


ERRORS: Final = OllamaErrors()
CHAT: Final = _lines(is_chat=True)
GENERATE: Final = _lines(is_chat=False)


def chat_translation(context: AnswerContext, is_stream: bool) -> Translation:
    return _translation(OllamaAnswer(context, is_chat=True), read_chat, is_stream)


def generate_translation(context: AnswerContext, is_stream: bool) -> Translation:
    return _translation(OllamaAnswer(context, is_chat=False), read_generate, is_stream)


def _translation(answer: OllamaAnswer, read: Callable[[Fields], Conversation | None], is_stream: bool) -> Translation:
    def read_or_load(fields: Fields) -> Conversation:
        asked = read(fields)
        if asked is None:
            answer.loads = "unload" if is_unload(fields) else "load"
        return asked or only_loads()

    def unloaded() -> bytes | None:
        if answer.loads != "unload":
            return None
        return answer.end() if is_stream else answer.whole(Delta())

    writer = answer if is_stream else None
    return to_chat(ERRORS, read_or_load, answer.whole, writer, LINES, if_cold=unloaded)


class OllamaAnswer:
    """`loads` is set for a request that says nothing: its answer says only that the model is there, or leaves."""

    # Lines have no numbers.
    number: Final = 0
    __slots__ = ("_calls", "_created", "_is_chat", "_model", "_reason", "_tokens", "loads")

    def __init__(self, context: AnswerContext, *, is_chat: bool) -> None:
        self._model = context.model
        self._created = _time(context.created)
        self._is_chat = is_chat
        # Calls whose arguments are still coming: they are sent as objects.
        self._calls: dict[int, ToolDelta] = {}
        self._reason = "stop"
        self._tokens = Tokens()
        self.loads: str | None = None

    def whole(self, answer: Delta) -> bytes:
        if self.loads is not None:
            return self.line("", done=self.loads)
        reason = "length" if answer.reason == "length" else "stop"
        tokens = answer.tokens or Tokens()
        return self.line(answer.text, answer.reasoning, list(answer.tools), done=reason, tokens=tokens)

    def write(self, delta: Delta) -> bytes:
        if delta.tokens is not None:
            self._tokens = delta.tokens
        if delta.reason == "length":
            self._reason = "length"
        for tool in delta.tools:
            self._note(tool)
        if self.loads is not None or not (delta.text or delta.reasoning):
            return b""
        return self.line(delta.text, delta.reasoning) + b"\n"

    def end(self) -> bytes:
        """The calls, which are whole now, and the figures."""
        if self.loads is not None:
            return self.line("", done=self.loads) + b"\n"
        calls = self.line("", tools=list(self._calls.values())) + b"\n" if self._calls else b""
        return calls + self.line("", done=self._reason, tokens=self._tokens) + b"\n"

    def _note(self, tool: ToolDelta) -> None:
        known = self._calls.get(tool.place)
        if known is not None:
            tool = known._replace(arguments=known.arguments + tool.arguments, name=known.name or tool.name)
        self._calls[tool.place] = tool

    def line(
        self,
        text: str,
        reasoning: str = "",
        tools: list[ToolDelta] | None = None,
        done: str | None = None,
        tokens: Tokens | None = None,
    ) -> bytes:
        line: dict[str, Any] = {"model": self._model, "created_at": self._created}
        beside: dict[str, Any] = {"thinking": reasoning} if reasoning else {}
        if not self._is_chat:
            line |= {"response": text, **beside}
        else:
            calls = {"tool_calls": [_call(tool) for tool in tools]} if tools else {}
            line["message"] = {"role": "assistant", "content": text, **beside, **calls}
        line["done"] = done is not None
        if done is not None:
            line["done_reason"] = done
        return _encode(line if tokens is None else line | _figures(tokens))


def _call(tool: ToolDelta) -> dict[str, Any]:
    return {"function": {"index": tool.place, "name": tool.name or "", "arguments": arguments_of(tool.arguments)}}


def _figures(tokens: Tokens) -> dict[str, int]:
    """Times are the engine's own, where it tells them."""
    return {
        "total_duration": round((tokens.prompt_ms + tokens.completion_ms) * _NS_A_MS),
        "load_duration": 0,
        "prompt_eval_count": tokens.prompt,
        "prompt_eval_duration": round(tokens.prompt_ms * _NS_A_MS),
        "eval_count": tokens.completion,
        "eval_duration": round(tokens.completion_ms * _NS_A_MS),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


# --- embeddings -----------------------------------------------------------------------------------------------------


class _EmbeddedInput(msgspec.Struct):
    embedding: Raw
    index: int = 0


class _EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int = 0


class _Embeddings(msgspec.Struct):
    data: list[_EmbeddedInput]
    usage: _EmbeddingUsage | None = None


_vectors: Final = msgspec.json.Decoder(_Embeddings)
_VECTOR: Final = re.compile(rb'"embedding"\s*:\s*\[')
_PLACE: Final = Raw(b"[0]")


def embed_translation(context: AnswerContext, is_stream: bool) -> Translation:
    def write(vectors: list[Raw], tokens: int) -> dict[str, Any]:
        figures = {"total_duration": 0, "load_duration": 0, "prompt_eval_count": tokens}
        return {"model": context.model, "embeddings": vectors, **figures}

    return _embeddings(embed_fields, write, lambda: LongVectors(write))


def embeddings_translation(context: AnswerContext, is_stream: bool) -> Translation:
    return _embeddings(embedding_fields, lambda vectors, tokens: {"embedding": vectors[0]})


def _embeddings(
    request: Callable[[Fields], Fields],
    write: Callable[[list[Raw], int], dict[str, Any]],
    long: Callable[[], AnswerTranslator | None] = nothing,
) -> Translation:
    """To OpenAI's embeddings and back. Vectors stay the bytes that the engine sent."""

    def answer(body: bytes) -> bytes:
        read = _read_vectors(body)
        vectors = [vector.embedding for vector in sorted(read.data, key=lambda vector: vector.index)]
        if not vectors:
            raise EngineFault("The engine answered no embedding.")
        return _encode(write(vectors, (read.usage or _EmbeddingUsage()).prompt_tokens))

    return Translation(
        ERRORS, EMBEDDINGS_PATH, request, answer, stream_type=LINES, bytes_max=ANSWER_BYTES_MAX, long=long
    )


def _read_vectors(body: bytes) -> _Embeddings:
    try:
        return _vectors.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFault("The engine answered something else than embeddings.", details=str(error)) from None


class LongVectors:
    """Writes vectors in the order in which they come, without decoding them. What is around them is read at the end."""

    def __init__(self, write: Callable[[list[Raw], int], dict[str, Any]]) -> None:
        self._write = write
        self._held = b""
        self._is_inside = False
        # What is around the vectors, which are empty there.
        self._around = bytearray()
        self._next = self._ends(0)[0]
        self.failure: str | None = None

    def feed(self, data: bytes) -> bytes:
        data, at, written = self._held + data, 0, []
        while self.failure is None:
            if self._is_inside:
                end = data.find(b"]", at) + 1
                written.append(data[at : end or len(data)])
                at, self._is_inside = end or len(data), not end
                if not end:
                    break
            elif (found := _VECTOR.search(data, at)) is not None:
                self._around += data[at : found.end()] + b"]"
                written += (self._next, b"[")
                at, self._next, self._is_inside = found.end(), b",", True
            else:
                break
            if len(self._around) > TEXT_BYTES_MAX:
                self.failure = "There is too much beside the vectors."
        self._held = data[at:]
        if len(self._held) > TEXT_BYTES_MAX:
            self.failure = "There is no vector."
        return b"".join(written)

    def flush(self) -> bytes:
        try:
            answer = _read_vectors(bytes(self._around) + self._held)
        except EngineFault as error:
            self.failure = self.failure or error.public
            return b""
        places = [vector.index for vector in answer.data]
        if not places or places != sorted(places):
            self.failure = "Its vectors are missing, or not in their order."
        return self._ends((answer.usage or _EmbeddingUsage()).prompt_tokens)[1]

    def _ends(self, tokens: int) -> tuple[bytes, bytes]:
        """What is before the first vector, and behind the last one."""
        before, _, behind = _encode(self._write([_PLACE], tokens)).rpartition(bytes(_PLACE))
        return before, behind
