"""An answer as OpenAI's Responses have it: a response with items, whole or as events."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import msgspec

from greenroom.dialects.errors import ErrorShape
from greenroom.dialects.heartbeat import StreamShape, comment
from greenroom.dialects.neutral import AnswerContext, Conversation, Delta, Fields, Tokens, Tool, ToolDelta
from greenroom.dialects.responses.requests import read_response
from greenroom.dialects.translation import Translation, to_chat

# Told back as they were sent.
_ECHOED: Final[dict[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "user": None,
}
_CUTS: Final[dict[str | None, str]] = {"length": "max_output_tokens", "content_filter": "content_filter"}
_encode: Final = msgspec.json.Encoder().encode
_NULL: Final = b"null"
_DELTA: Final = (
    b"event: response.%b.delta\n"
    b'data: {"type":"response.%b.delta","sequence_number":%d,"item_id":"%b","output_index":%d,"content_index":0,'
    b'"delta":%b%b}\n\n'
)
# Of an event. Inside a string its quotes would be escaped.
_NUMBER: Final = re.compile(rb'"sequence_number" ?: ?(\d{1,15})[,} \r\n]')


class ResponsesErrors(ErrorShape):
    def event(self, body: bytes, number: int) -> bytes:
        error = msgspec.json.decode(body)["error"]
        flat = {
            "code": error.get("code") or error.get("type"),
            "message": error["message"],
            "param": error.get("param"),
        }
        event = {"type": "error", **flat, "sequence_number": number, "error": error}
        return b"event: error\ndata: %b\n\n" % _encode(event)

    def next_number(self, sent: bytes) -> int:
        numbers = _NUMBER.findall(sent)
        return int(numbers[-1]) + 1 if numbers else 0


ERRORS: Final = ResponsesErrors()
# Events are numbered from the first one on, so that none can be put before them.
COMMENT: Final = StreamShape(lambda model, *_: comment(model, None, None))


def response_translation(context: AnswerContext, is_stream: bool) -> Translation:
    answer = ResponseAnswer(context)
    return to_chat(ERRORS, answer.read, answer.whole, answer if is_stream else None)


class _Open(NamedTuple):
    """An item of a stream that is not done, its place in the output, and what it says, which is joined once."""

    item: dict[str, Any]
    place: int
    texts: list[str]


class ResponseAnswer:
    """One response. In a stream, a text is open until another kind of delta comes, and calls are until the end."""

    __slots__ = ("_calls", "_context", "_cut", "_echo", "_grouped", "_output", "_said", "_tokens", "number")

    def __init__(self, context: AnswerContext) -> None:
        self._context = context
        self._echo: dict[str, Any] = {}
        # The tools of namespaces, by the names that the engine calls them by.
        self._grouped: dict[str | None, Tool] = {}
        # Events so far, all items, and those that are open: a text or reasoning, and the calls by their places.
        self.number = 0
        self._output: list[dict[str, Any]] = []
        self._said: _Open | None = None
        self._calls: dict[int, _Open] = {}
        # Why the answer is not whole, in OpenAI's words.
        self._cut: str | None = None
        self._tokens = Tokens()

    def read(self, fields: Fields) -> Conversation:
        asked = read_response(fields)
        sent = {name: fields[name] for name in _ECHOED if name in fields and bytes(fields[name]) != _NULL}
        self._echo = {**_ECHOED, **sent}
        self._grouped = {tool.name: tool for tool in asked.tools if tool.group is not None}
        return asked

    def whole(self, answer: Delta) -> bytes:
        if answer.reasoning:
            self._output.append(self._reasoning(answer.reasoning))
        if answer.text or not (answer.tools or answer.reasoning):
            self._output.append(self._message(answer.text))
        for tool in answer.tools:
            self._output.append(self._call(tool, tool.arguments))
        self._cut, self._tokens = _CUTS.get(answer.reason), answer.tokens or Tokens()
        return _encode(self._response())

    # --- a stream ---------------------------------------------------------------------------------------------------

    def write(self, delta: Delta) -> bytes:
        written = [] if self.number else self._begin()
        if delta.reasoning:
            written += self._grow("reasoning", delta.reasoning)
        if delta.text:
            written += self._grow("message", delta.text)
        for tool in delta.tools:
            written += self._called(tool)
        self._cut = self._cut or _CUTS.get(delta.reason)
        self._tokens = delta.tokens or self._tokens
        return b"".join(written)

    def end(self) -> bytes:
        written = [] if self.number else self._begin()
        written += self._close_said()
        for call in self._calls.values():
            written += self._close(call)
        kind = "response.incomplete" if self._cut else "response.completed"
        return b"".join([*written, self._event(kind, {"response": self._response()})])

    def _begin(self) -> list[bytes]:
        response = {**self._response(), "status": "in_progress", "usage": None}
        return [self._event(f"response.{word}", {"response": response}) for word in ("created", "in_progress")]

    def _grow(self, kind: str, text: str) -> list[bytes]:
        """Add to the text or reasoning that is open, or open another one."""
        written = []
        said = self._said
        if said is None or said.item["type"] != kind:
            written = self._close_said()
            said = self._said = self._opened(self._reasoning("") if kind == "reasoning" else self._message(""))
            written.append(self._added(said))
            part = {"part": said.item["content"][0], "content_index": 0}
            written += [self._at(said, "response.content_part.added", part)] if kind == "message" else []
        said.texts.append(text)
        name, more = (b"reasoning_text", b"") if kind == "reasoning" else (b"output_text", b',"logprobs":[]')
        number, self.number = self.number, self.number + 1
        # Written for every token, so it is put together by hand.
        at = (name, name, number, said.item["id"].encode(), said.place, _encode(text), more)
        written.append(_DELTA % at)
        return written

    def _called(self, tool: ToolDelta) -> list[bytes]:
        written = []
        call = self._calls.get(tool.place)
        if call is None:
            written = self._close_said()
            call = self._calls[tool.place] = self._opened(self._call(tool, ""))
            written.append(self._added(call))
        call.texts.append(tool.arguments)
        if tool.arguments:
            written.append(self._at(call, "response.function_call_arguments.delta", {"delta": tool.arguments}))
        return written

    def _opened(self, item: dict[str, Any]) -> _Open:
        self._output.append(item)
        return _Open(item, len(self._output) - 1, [])

    def _added(self, opened: _Open) -> bytes:
        begun = {**opened.item, "status": "in_progress", **({"content": []} if "content" in opened.item else {})}
        return self._event("response.output_item.added", {"output_index": opened.place, "item": begun})

    def _close_said(self) -> list[bytes]:
        said, self._said = self._said, None
        return [] if said is None else self._close(said)

    def _close(self, opened: _Open) -> list[bytes]:
        item, text = opened.item, "".join(opened.texts)
        if item["type"] == "function_call":
            item["arguments"] = text
            called = {"arguments": text, "name": item["name"]}
            written = [self._at(opened, "response.function_call_arguments.done", called)]
        else:
            part = item["content"][0]
            part["text"] = text
            name = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            done: dict[str, Any] = {"content_index": 0, "text": text}
            if item["type"] == "message":
                done["logprobs"] = []
            written = [self._at(opened, f"response.{name}.done", done)]
            if item["type"] == "message":
                written.append(self._at(opened, "response.content_part.done", {"content_index": 0, "part": part}))
        written.append(self._event("response.output_item.done", {"output_index": opened.place, "item": item}))
        return written

    def _at(self, opened: _Open, kind: str, more: dict[str, Any]) -> bytes:
        """An event about an open item."""
        return self._event(kind, {"item_id": opened.item["id"], "output_index": opened.place, **more})

    def _event(self, kind: str, more: dict[str, Any]) -> bytes:
        number, self.number = self.number, self.number + 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, "sequence_number": number, **more}))

    # --- shapes -----------------------------------------------------------------------------------------------------

    def _response(self) -> dict[str, Any]:
        return {
            "id": f"resp_{self._context.id}",
            "object": "response",
            "created_at": int(self._context.created),
            "status": "incomplete" if self._cut else "completed",
            "error": None,
            "incomplete_details": {"reason": self._cut} if self._cut else None,
            "model": self._context.model,
            "output": self._output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": _usage(self._tokens),
            **self._echo,
        }

    def _message(self, text: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {**self._head("message", "msg"), "role": "assistant", "content": [part]}

    def _reasoning(self, text: str) -> dict[str, Any]:
        return {**self._head("reasoning", "rs"), "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    def _call(self, tool: ToolDelta, arguments: str) -> dict[str, Any]:
        call = tool.id or f"call_{self._context.id}_{tool.place}"
        said = {"call_id": call, "name": tool.name or "", "arguments": arguments}
        if (grouped := self._grouped.get(tool.name)) is not None:
            said |= {"name": grouped.member or "", "namespace": grouped.group or ""}
        return {**self._head("function_call", "fc"), **said}

    def _head(self, kind: str, prefix: str) -> dict[str, Any]:
        return {"type": kind, "id": f"{prefix}_{self._context.id}_{len(self._output)}", "status": "completed"}


def _usage(tokens: Tokens) -> dict[str, Any]:
    return {
        "input_tokens": tokens.prompt,
        "input_tokens_details": {"cached_tokens": tokens.cached, "cache_write_tokens": 0},
        "output_tokens": tokens.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens.prompt + tokens.completion,
    }
