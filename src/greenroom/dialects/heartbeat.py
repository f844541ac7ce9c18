"""What is sent to a client whose stream waits: a comment, or an event that adds nothing to the answer.

Never decides when it is sent.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

_UNSAFE: Final = re.compile(r"[^!-~]+")
_VALUE_CHARS_MAX: Final = 200


class HeartbeatKind(enum.Enum):
    # A comment is not an event: clients that follow the standard never see it.
    COMMENT = "comment"
    # An event that adds nothing to the answer, for clients that time out unless events arrive.
    CHUNK = "chunk"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class StreamShape:
    """`empty_event` writes an event that adds nothing, of a model, the stream's id and the second it was made.

    `has_comments` is False for a stream of JSON lines.
    """

    empty_event: Callable[[str, str, int], bytes]
    has_comments: bool = True


def heartbeat(
    kind: HeartbeatKind,
    *,
    model: str,
    position: int | None,
    eta_s: float | None,
    shape: StreamShape,
    stream_id: str,
    created: int,
) -> bytes:
    """One heartbeat as a whole event; nothing for OFF."""
    if kind is HeartbeatKind.COMMENT and shape.has_comments:
        return comment(model, position, eta_s)
    if kind is not HeartbeatKind.OFF:
        return shape.empty_event(model, stream_id, created)
    return b""


def comment(model: str, position: int | None, eta_s: float | None) -> bytes:
    """`: waiting model=qwen position=2 eta_s=4`. What is not known is left out."""
    parts = [f"model={_on_one_line(model)}"]
    if position is not None:
        parts.append(f"position={position}")
    if eta_s is not None:
        parts.append(f"eta_s={max(0, round(eta_s))}")
    return f": waiting {' '.join(parts)}\n\n".encode("ascii")


def _on_one_line(value: str) -> str:
    return _UNSAFE.sub("_", value)[:_VALUE_CHARS_MAX]


# --- OpenAI's events, which engines write as well -------------------------------------------------------------------


def _choices(kind: str, empty: dict[str, Any]) -> StreamShape:
    def event(model: str, stream_id: str, created: int) -> bytes:
        choice = {"index": 0, "finish_reason": None, **empty}
        chunk = {"id": stream_id, "object": kind, "created": created, "model": model, "choices": [choice]}
        # JSON escapes every line break, so that a model's name cannot end the event.
        return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode("ascii")

    return StreamShape(event)


CHAT: Final = _choices("chat.completion.chunk", {"delta": {}})
TEXT: Final = _choices("text_completion", {"text": ""})
TRANSCRIPT: Final = StreamShape(lambda *_: b'data: {"type":"transcript.text.delta","delta":""}\n\n')
