"""Server-sent events: counted as they pass, and one of them held back.

Works however the bytes are split into reads. Never decodes an event on the way. An event ends at a blank line; a run of
blank lines counts once. Lines end in LF or CRLF. The standard also allows a lone CR, which no engine uses; in such a
stream no event would be inserted.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

# An event longer than this is passed on as it comes, so that the buffer stays bounded.
HELD_BYTES_MAX: Final = 1024 * 1024

_BREAKS: Final = b"\r\n"
_BLANK_LINES: Final = re.compile(rb"\n\r*\n[\r\n]*")
_DATA: Final = b"\ndata:"
_EVENT: Final = re.compile(rb"(?s).*?\n\r?\n|.+\Z")
_USAGE: Final = b'"usage"'
_EMPTY_CHOICES: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]')


class EventCounter:
    """How many events have passed, whether the first `data:` has, and whether the stream stands between two events."""

    __slots__ = ("_breaks", "_last", "events", "has_data")

    def __init__(self) -> None:
        self.events = 0
        self.has_data = False
        # Line ends in the run that the stream stands in now; two or more make a blank line. It begins between events.
        self._breaks = 2
        # The start of the stream is the start of a line.
        self._last = b"\n"

    @property
    def at_boundary(self) -> bool:
        return self._breaks >= 2

    def feed(self, data: bytes) -> None:
        if not self.has_data:
            self._look_for_data(data)
        if data[0] == 0x0A or data[0] == 0x0D:
            data = self._continue_run(data)
            if not data:
                return
        # Here the run before these bytes is over: they begin with something else.
        if data.find(b"\n\n") + 2 == len(data) > 1 and data.find(b"\r") < 0:
            # One whole event, or the end of one: what most reads bring.
            self.events += 1
            self._breaks = 2
            return
        self._breaks = data.count(b"\n", len(data.rstrip(_BREAKS))) if data[-1] in _BREAKS else 0
        self.events += len(_BLANK_LINES.findall(data))

    def _continue_run(self, data: bytes) -> bytes:
        """Count line ends that continue a run from the bytes before. Gives back the bytes after the run."""
        rest = data.lstrip(_BREAKS)
        before = self._breaks
        # A stream that begins with a blank line has no event there to end.
        self._breaks = before + data.count(b"\n", 0, len(data) - len(rest))
        if before < 2 <= self._breaks:
            self.events += 1
        return rest

    def _look_for_data(self, data: bytes) -> None:
        seen = self._last + data
        self.has_data = _DATA in seen
        self._last = seen[1 - len(_DATA) :]


class UsageFilter:
    """Holds back the one event that carries usage and no choices, for clients that did not ask for it."""

    __slots__ = ("_held", "_passes")

    def __init__(self) -> None:
        self._held = bytearray()
        self._passes = False

    @property
    def at_boundary(self) -> bool:
        """Only whole events have been passed on."""
        return not self._passes

    def feed(self, data: bytes) -> bytes:
        """Returns the bytes that may be passed on now."""
        if self._passes:
            return data
        held = self._held
        if not held and data.endswith(b"\n\n") and not _may_be_usage(data):
            # One or more whole events: what most reads bring.
            return data
        start = max(0, len(held) - 3)
        held += data
        end = max(held.rfind(b"\n\n", start) + 2, held.rfind(b"\n\r\n", start) + 3)
        if end <= 2:
            return self.flush() if len(held) > HELD_BYTES_MAX else b""
        ready = bytes(held[:end])
        del held[:end]
        return _without_usage(ready) if _may_be_usage(ready) else ready

    def flush(self) -> bytes:
        """Returns what is still held, even part of an event. From now on all bytes pass."""
        self._passes = True
        rest = bytes(self._held)
        self._held.clear()
        return _without_usage(rest) if _may_be_usage(rest) else rest


def _may_be_usage(events: bytes) -> bool:
    """Called for every read, so the cheap search comes first: most events do not contain the word.

    `find`, because `in` first tries whether it was given a number, and fails, which takes longer than the search.
    """
    return events.find(_USAGE) >= 0 and _EMPTY_CHOICES.search(events) is not None


def _without_usage(events: bytes) -> bytes:
    return b"".join([event for event in _EVENT.findall(events) if not _is_usage(event)])


def _is_usage(event: bytes) -> bool:
    """Decodes only where the pattern was found, usually once a stream: an answer's text may look like it."""
    if not _may_be_usage(event):
        return False
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    try:
        value = msgspec.json.decode(b"\n".join(lines))
    except msgspec.DecodeError:
        return False
    return isinstance(value, dict) and value.get("choices") == [] and value.get("usage") is not None
