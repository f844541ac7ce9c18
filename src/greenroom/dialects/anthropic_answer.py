"""An answer as Anthropic's Messages have it: a message with blocks, whole or as events; and the count of tokens."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from greenroom.dialects.anthropic_request import read_messages, read_to_count
from greenroom.dialects.neutral import Frame, Piece, Tokens, ToolPiece
from greenroom.dialects.shapes import Dialect
from greenroom.dialects.translation import ChatTranslation

_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_DELTA: Final = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
)
_encode: Final = msgspec.json.Encoder().encode


def messages_translation(frame: Frame, is_stream: bool) -> ChatTranslation:
    writer = MessageWriter(frame)
    return ChatTranslation(Dialect.ANTHROPIC, read_messages, writer.whole, writer if is_stream else None)


def count_translation(frame: Frame, is_stream: bool) -> ChatTranslation:
    return ChatTranslation(Dialect.ANTHROPIC, read_to_count, count_body, None)


class MessageWriter:
    """Writes a message. One block is open at a time: what was thought, what is said, or a call of a tool."""

    # Events have no numbers.
    number: Final = 0
    __slots__ = ("_block", "_call", "_frame", "_has_begun", "_index", "_reason", "_stop", "_tokens")

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._has_begun = False
        # The kind of the open block, its place, and which call of a tool it is.
        self._block: str | None = None
        self._index = -1
        self._call = -1
        self._reason: str | None = None
        self._stop: str | None = None
        self._tokens = Tokens()

    def whole(self, answer: Piece) -> bytes:
        content: list[dict[str, Any]] = []
        if answer.thought:
            content.append({"type": "thinking", "thinking": answer.thought, "signature": ""})
        if answer.text or not (answer.tools or answer.thought):
            content.append({"type": "text", "text": answer.text})
        for tool in answer.tools:
            content.append({**_use(tool, self._frame), "input": _input(tool.arguments)})
        reason = _reason(answer.reason, answer.stop, has_calls=bool(answer.tools))
        return _encode(self._message(content, reason, answer.tokens or Tokens(), answer.stop))

    def piece(self, piece: Piece) -> bytes:
        written = [] if self._has_begun else [self._begin()]
        if piece.thought:
            written += self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            written.append(self._delta(b"thinking_delta", b"thinking", piece.thought))
        if piece.text:
            written += self._open("text", {"type": "text", "text": ""})
            written.append(self._delta(b"text_delta", b"text", piece.text))
        for tool in piece.tools:
            if tool.place > self._call:
                self._call = tool.place
                written += self._open("tool_use", {**_use(tool, self._frame), "input": {}}, is_new=True)
            if tool.arguments:
                written.append(self._delta(b"input_json_delta", b"partial_json", tool.arguments))
        if piece.reason is not None:
            self._reason, self._stop = piece.reason, piece.stop
        if piece.tokens is not None:
            self._tokens = piece.tokens
        return b"".join(written)

    def end(self) -> bytes:
        reason = _reason(self._reason, self._stop, has_calls=self._call >= 0)
        delta = {"stop_reason": reason, "stop_sequence": self._stop}
        return b"".join(
            (
                b"" if self._has_begun else self._begin(),
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
            "id": f"msg_{self._frame.id}",
            "type": "message",
            "role": "assistant",
            "model": self._frame.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(tokens),
        }

    def _open(self, kind: str, block: dict[str, Any], *, is_new: bool = False) -> list[bytes]:
        """Have a block of this kind open, which is another one if `is_new`."""
        if self._block == kind and not is_new:
            return []
        closed = self._close()
        self._block = kind
        self._index += 1
        return [*closed, _event("content_block_start", {"index": self._index, "content_block": block})]

    def _close(self) -> list[bytes]:
        if self._block is None:
            return []
        self._block = None
        return [_event("content_block_stop", {"index": self._index})]

    def _delta(self, kind: bytes, name: bytes, text: str) -> bytes:
        """Written for every token, so it is put together by hand."""
        return _DELTA % (self._index, kind, name, _encode(text))


def model_list(models: list[tuple[str, str | None, int]]) -> bytes:
    """The models there are, each with id, name and when it was made, as one page."""
    data = [model_card(*model) for model in models]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return _encode({"data": data, "has_more": False, "first_id": first, "last_id": last})


def model_card(id: str, name: str | None, created: int) -> dict[str, Any]:
    made = datetime.fromtimestamp(created, UTC)
    return {"type": "model", "id": id, "display_name": name or id, "created_at": made.isoformat()}


def count_body(answer: Piece) -> bytes:
    """How many tokens a request has, which the shortest answer to it tells."""
    return _encode({"input_tokens": (answer.tokens or Tokens()).prompt})


def _event(kind: str, more: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **more}))


def _use(tool: ToolPiece, frame: Frame) -> dict[str, Any]:
    return {"type": "tool_use", "id": tool.id or f"toolu_{frame.id}_{tool.place}", "name": tool.name or ""}


def _input(arguments: str) -> Any:
    """The arguments as JSON; an engine that was cut off may send half of them."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": arguments}
    return found if isinstance(found, dict) else {"arguments": found}


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
