"""What a streaming client hears while it waits for its model.

Owns the bytes of the three kinds of heartbeat. Never decides when one is sent.
"""

from __future__ import annotations

import enum
import json
import re
from typing import Final

_UNSAFE: Final = re.compile(r"[^!-~]+")
_VALUE_CHARS_MAX: Final = 200


class HeartbeatKind(enum.Enum):
    # A comment is not an event: clients that follow the standard never see it.
    COMMENT = "comment"
    # An empty piece of an answer, for clients that time out unless events arrive.
    CHUNK = "chunk"
    OFF = "off"


class StreamShape(enum.Enum):
    """Which API the stream belongs to, and with it what an empty piece looks like."""

    CHAT = "chat.completion.chunk"
    TEXT = "text_completion"


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
    if kind is HeartbeatKind.COMMENT:
        return comment(model, position, eta_s)
    if kind is HeartbeatKind.CHUNK:
        return empty_chunk(model, shape, stream_id, created)
    return b""


def comment(model: str, position: int | None, eta_s: float | None) -> bytes:
    """`: waiting model=qwen position=2 eta_s=4`. What is not known is left out."""
    parts = [f"model={_on_one_line(model)}"]
    if position is not None:
        parts.append(f"position={position}")
    if eta_s is not None:
        parts.append(f"eta_s={max(0, round(eta_s))}")
    return f": waiting {' '.join(parts)}\n\n".encode("ascii")


def empty_chunk(model: str, shape: StreamShape, stream_id: str, created: int) -> bytes:
    """An event that adds nothing to the answer."""
    choice: dict[str, object] = {"index": 0, "finish_reason": None}
    if shape is StreamShape.CHAT:
        choice["delta"] = {}
    else:
        choice["text"] = ""
    event = {"id": stream_id, "object": shape.value, "created": created, "model": model, "choices": [choice]}
    # JSON escapes every line break, so that a model's name cannot end the event.
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode("ascii")


def _on_one_line(value: str) -> str:
    return _UNSAFE.sub("_", value)[:_VALUE_CHARS_MAX]
