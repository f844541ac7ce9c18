"""Server-sent events, read line by line.

Owns the reading of the format as far as the gateway writes it: comments, `event:` and `data:`. Bounded: a line or an
event that does not end is an error, not a full memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from greenroom.cli.failures import CommandFailed

LINE_BYTES_MAX: Final = 4 * 1024 * 1024


class Lines(Protocol):
    def readline(self, limit: int = ..., /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event, or a comment, which has no data."""

    name: str = "message"
    data: str = ""
    comment: str | None = None


def server_events(lines: Lines) -> Iterator[ServerEvent]:
    """Every event and comment until the end of the stream. An event without its blank line is dropped, as it may be
    half of one."""
    name, data, size = "message", list[str](), 0
    while line := lines.readline(LINE_BYTES_MAX):
        size += len(line)
        if size >= LINE_BYTES_MAX:
            raise CommandFailed(f"the stream holds an event of more than {LINE_BYTES_MAX:,} bytes")
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        key, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if text.startswith(":"):
            yield ServerEvent(comment=value)
        elif key == "event":
            name = value
        elif key == "data":
            data.append(value)
        elif not text:
            if data:
                yield ServerEvent(name, "\n".join(data))
            name, data, size = "message", [], 0
