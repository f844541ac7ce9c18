"""What the fake engine says: completions as a whole and as events, vectors, errors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

from tests.standins.fake_switches import Switches


class Answer:
    """One completion: the name of the engine, then numbers, one token each; or the words that it is told to say."""

    def __init__(self, switches: Switches, path: str, body: dict[str, Any]) -> None:
        self.is_stream = body.get("stream") is True
        self._words = re.findall(r"\s*\S+", switches.say) if switches.say else None
        self.count = len(self._words) if self._words else int(body.get("tokens", switches.tokens))
        self.token_s = float(body.get("token_s", switches.token_s))
        self.stall_after = body.get("stall_after", switches.stall_after)
        self.crash_at = body.get("crash_at", switches.crash_at)
        options = body.get("stream_options") or {}
        self.wants_usage_event = bool(options.get("include_usage")) and not switches.no_usage
        self._name = switches.name
        self._has_usage = not switches.no_usage
        self._is_chat = path == "/v1/chat/completions"
        self.told = list(told_deltas(body)) if self._is_chat else []
        self._calls_tool = any("tool_calls" in delta for delta in self.told)
        if self._calls_tool:
            self.count = 0
        self._prompt_tokens = len(json.dumps(body.get("messages") or body.get("prompt") or "").split())

    def tokens(self) -> Iterator[str]:
        if self._words:
            return iter(self._words[: self.count])
        return (self._name if number == 0 else f" {number}" for number in range(self.count))

    def whole(self) -> dict[str, Any]:
        text = "".join(self.tokens())
        content = {"message": self._message(text)} if self._is_chat else {"text": text}
        answer = self._frame("chat.completion", [{"index": 0, **content, "finish_reason": self._reason}])
        return {**answer, "usage": self._usage()} if self._has_usage else answer

    def _message(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        for delta in self.told:
            for name, value in delta.items():
                if name == "tool_calls" and name in message:
                    message[name][0]["function"]["arguments"] += value[0]["function"]["arguments"]
                else:
                    message[name] = value
        return message

    @property
    def _reason(self) -> str:
        return "tool_calls" if self._calls_tool else "stop"

    def delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return self._frame("chat.completion.chunk", [{"index": 0, "delta": delta, "finish_reason": None}])

    def chunk(self, token: str | None) -> dict[str, Any]:
        """One token as a stream's event; the last event has none."""
        delta = {} if token is None else {"role": "assistant", "content": token}
        content = {"delta": delta} if self._is_chat else {"text": token or ""}
        finish_reason = self._reason if token is None else None
        return self._frame("chat.completion.chunk", [{"index": 0, **content, "finish_reason": finish_reason}])

    def usage_event(self) -> dict[str, Any]:
        return {**self._frame("chat.completion.chunk", []), "usage": self._usage()}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = kind if self._is_chat else "text_completion"
        return {"id": "fake-1", "object": kind, "created": 0, "model": self._name, "choices": choices}

    def _usage(self) -> dict[str, int]:
        total = self._prompt_tokens + self.count
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": self.count, "total_tokens": total}


def told_deltas(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the last message tells the engine to do before it says anything."""
    said = (body.get("messages") or [{}])[-1].get("content")
    kind, _, rest = said.partition(":") if isinstance(said, str) else ("", "", "")
    if kind == "think":
        yield {"reasoning_content": rest}
    elif kind == "tool":
        name, _, said = rest.partition(":")
        arguments = said if said.startswith("{") else json.dumps({"town": said})
        call = {"index": 0, "id": "call-7", "type": "function", "function": {"name": name, "arguments": arguments[:5]}}
        yield {"tool_calls": [call]}
        yield {"tool_calls": [{"index": 0, "function": {"arguments": arguments[5:]}}]}


def error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": kind}}


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def vector(text: object) -> list[float]:
    return [byte / 255 for byte in hashlib.sha256(str(text).encode()).digest()[:4]]
