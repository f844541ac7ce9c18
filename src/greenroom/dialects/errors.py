"""How a dialect shapes an error: as the body of an answer, and inside of a stream that has begun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class ErrorShape:
    """OpenAI's. Other dialects override what they do otherwise."""

    __slots__ = ()

    def body(self, status: int, error: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        """The body for an error, which has at least a `message`."""
        return {"error": dict(error)}

    def event(self, body: bytes, number: int) -> bytes:
        """Such a body as the last event of a stream, whose number it is in a dialect that numbers events."""
        return b"data: %b\n\n" % body

    def next_number(self, sent: bytes) -> int:
        """That number, after these last bytes of an engine that writes the dialect itself."""
        return 0

    def of_engine(self, status: int, message: str) -> bytes:
        """The body for an engine's own error."""
        return msgspec.json.encode(self.body(status, {"message": message, "type": "engine_error"}, ""))
