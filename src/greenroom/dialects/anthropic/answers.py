"""An answer as Anthropic's Messages have it: a message with blocks, whole or as events; and the count of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from greenroom.dialects.anthropic.requests import read_messages, read_to_count
from greenroom.dialects.errors import ErrorShape
from greenroom.dialects.heartbeat import StreamShape
from greenroom.dialects.neutral import AnswerContext, Delta, Tokens, ToolDelta, arguments_of
from greenroom.dialects.translation import Translation, to_chat

_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_DELTA: Final = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
)
# How a block begins, and the names of what is added to it; else it is a call.
_EMPTY: Final[dict[str | int, dict[str, Any]]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
_DELTAS: Final[dict[str | int, tuple[bytes, bytes]]] = {
    "thinking": (b"thinking_delta", b"thinking"),
    "text": (b"text_delta", b"text"),
}
_ARGUMENTS: Final = (b"input_json_delta", b"partial_json")
_encode: Final = msgspec.json.Encoder().encode
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class AnthropicErrors(ErrorShape):
    def body(self, status: int, error: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {**error, "type": kind}, "request_id": request_id or None}

    def event(self, body: bytes, number: int) -> bytes:
        return b"event: error\ndata: %b\n\n" % body


ERRORS: Final = AnthropicErrors()
PING: Final = StreamShape(lambda *_: b'event: ping\ndata: {"type":"ping"}\n\n')


def messages_translation(context: AnswerContext, is_stream: bool) -> Translation:
    writer = MessageWriter(context)
    return to_chat(ERRORS, read_messages, writer.whole, writer if is_stream else None)


def count_translation(context: AnswerContext, is_stream: bool) -> Translation:
    return to_chat(ERRORS, read_to_count, count_body, None)


class MessageWriter:
    """Writes a message. One block is open at a time: reasoning, a text, or a call of a tool.

    What comes for another block while the arguments of a call are not whole is held back until the end.
    """

    # Events have no numbers.
    number: Final = 0
    __slots__ = (
        "_arguments",
        "_block",
        "_calls",
        "_context",
        "_has_begun",
        "_held",
        "_index",
        "_reason",
        "_stop",
        "_tokens",
    )

    def __init__(self, context: AnswerContext) -> None:
        self._context = context
        self._has_begun = False
        # The open block, which is of a kind or the place of a call; its index, and the arguments of a call so far.
        self._block: str | int | None = None
        self._index = -1
        self._arguments: list[str] = []
        # Calls that have begun, and what is held back for each block, with the call that opens it.
        self._calls: set[int] = set()
        self._held: dict[str | int, tuple[ToolDelta | None, list[str]]] = {}
        self._reason: str | None = None
        self._stop: str | None = None
        self._tokens = Tokens()

    def whole(self, answer: Delta) -> bytes:
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.text or not (answer.tools or answer.reasoning):
            content.append({"type": "text", "text": answer.text})
        for tool in answer.tools:
            content.append({**_use(tool, self._context), "input": arguments_of(tool.arguments)})
        reason = _reason(answer.reason, answer.stop, has_calls=bool(answer.tools))
        return _encode(self._message(content, reason, answer.tokens or Tokens(), answer.stop))

    def write(self, delta: Delta) -> bytes:
        written = [] if self._has_begun else [self._begin()]
        if delta.reasoning:
            written += self._say("thinking", delta.reasoning)
        if delta.text:
            written += self._say("text", delta.text)
        for tool in delta.tools:
            written += self._say(tool.place, tool.arguments, tool)
        if delta.reason is not None:
            self._reason, self._stop = delta.reason, delta.stop
        if delta.tokens is not None:
            self._tokens = delta.tokens
        return b"".join(written)

    def end(self) -> bytes:
        written = [] if self._has_begun else [self._begin()]
        held, self._held = self._held, {}
        for block, (call, said) in held.items():
            written += [*self._close(), *self._say(block, "".join(said), call)]
        reason = _reason(self._reason, self._stop, has_calls=bool(self._calls))
        delta = {"stop_reason": reason, "stop_sequence": self._stop}
        return b"".join(
            (
                *written,
                *self._close(),
                _event("message_delta", {"delta": delta, "usage": _usage(self._tokens)}),
                _event("message_stop", {}),
            )
        )

    def _begin(self) -> bytes:
        self._has_begun = True
        return _event("message_start", {"message": self._message([], None, Tokens())})

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, tokens: Tokens, stop: str | None = None
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._context.id}",
            "type": "message",
            "role": "assistant",
            "model": self._context.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(tokens),
        }

    def _say(self, block: str | int, text: str, call: ToolDelta | None = None) -> list[bytes]:
        """Add to a block, which is opened if it is not and if the open one may end."""
        written = []
        if block != self._block:
            if block in self._calls:
                # The call has ended: its arguments are whole.
                return []
            if self._held or not self._may_end():
                self._held.setdefault(block, (call, []))[1].append(text)
                return []
            written = [*self._close(), self._open(block, call)]
        if isinstance(block, int):
            self._arguments.append(text)
        kind, name = _DELTAS.get(block, _ARGUMENTS)
        # Written for every token, so it is put together by hand.
        written += [_DELTA % (self._index, kind, name, _encode(text))] if text else []
        return written

    def _may_end(self) -> bool:
        """True unless the open block is a call whose arguments are not a whole object yet."""
        if not isinstance(self._block, int):
            return True
        try:
            return isinstance(msgspec.json.decode("".join(self._arguments)), dict)
        except (msgspec.DecodeError, RecursionError):
            return False

    def _open(self, block: str | int, call: ToolDelta | None) -> bytes:
        self._block = block
        self._index += 1
        content = _EMPTY.get(block, {})
        if call is not None:
            self._calls.add(call.place)
            self._arguments = []
            content = {**_use(call, self._context), "input": {}}
        return _event("content_block_start", {"index": self._index, "content_block": content})

    def _close(self) -> list[bytes]:
        if self._block is None:
            return []
        self._block = None
        return [_event("content_block_stop", {"index": self._index})]


def model_list(models: list[tuple[str, str | None, int]]) -> bytes:
    """The models there are, each with id, name and when it was made, as one page."""
    data = [model_card(*model) for model in models]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return _encode({"data": data, "has_more": False, "first_id": first, "last_id": last})


def model_card(id: str, name: str | None, created: int) -> dict[str, Any]:
    made = datetime.fromtimestamp(created, UTC)
    return {"type": "model", "id": id, "display_name": name or id, "created_at": made.isoformat()}


def count_body(answer: Delta) -> bytes:
    """How many tokens a request has, which the shortest answer to it tells."""
    return _encode({"input_tokens": (answer.tokens or Tokens()).prompt})


def _event(kind: str, more: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **more}))


def _use(tool: ToolDelta, context: AnswerContext) -> dict[str, Any]:
    return {"type": "tool_use", "id": tool.id or f"toolu_{context.id}_{tool.place}", "name": tool.name or ""}


def _reason(reason: str | None, stop: str | None, *, has_calls: bool) -> str:
    told = _REASONS.get(reason or "stop", "end_turn")
    if told != "end_turn":
        return told
    return "tool_use" if has_calls else "stop_sequence" if stop is not None else told


def _usage(tokens: Tokens) -> dict[str, int]:
    """What was read from the cache is not counted as input again."""
    return {
        "input_tokens": tokens.prompt - tokens.cached,
        "output_tokens": tokens.completion,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tokens.cached,
    }
