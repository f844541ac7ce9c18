"""The output of an engine: its last lines, and a live view of the next ones.

Owns the bytes an engine writes, in bounded memory, and which of its lines tells why it failed. A ring belongs to a
model and outlives the processes that write to it. Never blocks a writer: a slow reader loses lines and learns how many.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from typing import Final

LINES_MAX = 2000
BYTES_MAX = 512 * 1024
# Lines kept of one start: enough for a long traceback at its end.
START_LINES_MAX = 400
# Longer lines are cut: engines sometimes print whole prompts and tensors.
LINE_BYTES_MAX = 8 * 1024
# About a second of a very talkative engine.
UNREAD_LINES_MAX = 1000
CUT_MARK = b" [line cut]"


class LogRing:
    """The last lines of an engine, as text. `lines_seen` counts all complete lines."""

    def __init__(self, lines_max: int = LINES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self.lines_seen = 0
        self._lines_max = lines_max
        self._bytes_max = bytes_max
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._line = bytearray()
        self._is_cut = False
        # The last byte was a carriage return: either CRLF follows, or the next bytes replace the line.
        self._returned = False
        self._subscriptions: set[Subscription] = set()

    def write(self, data: bytes) -> None:
        """Add output of an engine, in pieces of any size."""
        *complete, rest = data.split(b"\n")
        for piece in complete:
            self._extend(piece)
            self._end_line()
        self._extend(rest)

    def flush(self) -> None:
        """End a last line without a line break: its writer is gone."""
        if self._line:
            self._end_line()

    def tail(self, n: int) -> list[str]:
        """The last `n` lines, oldest first, the one still being written included."""
        lines = [*self._lines, bytes(self._line)] if self._line else self._lines
        first = max(0, len(lines) - max(0, n))
        return [_text(line) for index, line in enumerate(lines) if index >= first]

    def subscribe(self) -> Subscription:
        """Every line from now on. The caller closes it."""
        subscription = Subscription(self._subscriptions)
        self._subscriptions.add(subscription)
        return subscription

    def close(self) -> None:
        """End every subscription after the lines it already has. The lines stay readable."""
        self.flush()
        for subscription in tuple(self._subscriptions):
            subscription.finish()

    def _extend(self, piece: bytes) -> None:
        visible = piece.rstrip(b"\r")
        if visible:
            _, overwritten, last = visible.rpartition(b"\r")
            # A progress bar returns to the start of its line: only its last state is kept.
            if overwritten or self._returned:
                self._line.clear()
                self._is_cut = False
            room = LINE_BYTES_MAX - len(self._line)
            self._is_cut |= len(last) > room
            self._line += last[:room]
        if piece:
            self._returned = len(visible) < len(piece)

    def _end_line(self) -> None:
        line = bytes(self._line) + (CUT_MARK if self._is_cut else b"")
        self._line.clear()
        self._is_cut = self._returned = False
        self.lines_seen += 1
        self._lines.append(line)
        self._bytes += len(line)
        while len(self._lines) > self._lines_max or self._bytes > self._bytes_max:
            self._bytes -= len(self._lines.popleft())
        for subscription in self._subscriptions:
            subscription.put(line)


class StartLog(LogRing):
    """The output of one start of an engine. Copies every byte to its model's ring."""

    def __init__(self, into: LogRing) -> None:
        super().__init__(START_LINES_MAX)
        self._into = into

    def write(self, data: bytes) -> None:
        super().write(data)
        self._into.write(data)

    def flush(self) -> None:
        super().flush()
        self._into.flush()


class SharedLog(LogRing):
    """The lines of a process that serves several models: each line also goes to every listener's ring."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[LogRing] = []

    def _end_line(self) -> None:
        super()._end_line()
        for ring in self.listeners:
            # Whole lines only: two processes may write to the same ring.
            ring.write(self._lines[-1] + b"\n")


class Subscription:
    """An async iterator over lines for one reader. Holds at most `UNREAD_LINES_MAX`, then forgets the oldest."""

    def __init__(self, among: set[Subscription]) -> None:
        """`among` are all of one ring."""
        self.dropped = 0
        self._among = among
        self._unread: deque[bytes] = deque()
        self._dropped_untold = 0
        self._is_finished = False
        self._news = asyncio.Event()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> str:
        while not self._unread:
            if self._is_finished:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        if self._dropped_untold:
            dropped, self._dropped_untold = self._dropped_untold, 0
            return f"[{dropped} lines dropped: the reader was too slow]"
        return _text(self._unread.popleft())

    def put(self, line: bytes) -> None:
        """Take one line; never waits."""
        if len(self._unread) >= UNREAD_LINES_MAX:
            self._unread.popleft()
            self.dropped += 1
            self._dropped_untold += 1
        self._unread.append(line)
        self._news.set()

    def finish(self) -> None:
        """No more lines: the reader gets the unread ones, then the end."""
        self._is_finished = True
        self._among.discard(self)
        self._news.set()

    def close(self) -> None:
        """Stop at once, from any task. May be called again."""
        self._unread.clear()
        self.finish()


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")


# --- the line that tells why ----------------------------------------------------------------------------------------

TELLING_CHARS_MAX: Final = 300
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
# What vLLM puts before each line: `(EngineCore_0 pid=7) ERROR 05-23 09:31:47 [core.py:396] `.
_LOGGED: Final = r"^(?:\([^)]*\) ?)?(?:[A-Z]+ [\d-]+ [\d:.,]+ \[[^\]]+\] ?)?"
# The surest first. Of lines of one kind the first counts: what follows a cause is its consequences and the clean-up.
_TELLING: Final = tuple(
    re.compile(pattern)
    for pattern in (
        # llama.cpp, where the reader of the file says more than `failed to load model from FILE` after it.
        r"(gguf_init_from_\w+: .+)",
        r"(error loading model: .+)",
        # ggml, CUDA and C++.
        r"((?:CUDA|ROCm|HIP) error: .+)",
        r"(GGML_ASSERT\(.+)",
        r"^\s*what\(\): +(.+)",
        # Python: what pydantic found wrong in a configuration, which stands below the name of its exception; any other.
        rf"{_LOGGED}\s+Value error, (.+?)(?: \[type=.*)?$",
        rf"{_LOGGED}((?:\w+\.)*\w*(?:Error|Exception): .+)",
        # Command lines, loaders of libraries and shells; the error level of llama.cpp.
        r"\b(error while loading shared libraries: .+)",
        r"(?:^|: )(?:error|Error|ERROR|fatal|FATAL): (.+)",
        r"^[\d.]+ E (.+)",
    )
)


def telling_line(lines: Sequence[str]) -> str | None:
    """What an engine says of why it failed, in one line of bounded length; None if no line looks like that."""
    plain = [_COLOUR.sub("", line).rstrip() for line in lines]
    found = (found for pattern in _TELLING for line in plain if (found := pattern.search(line)))
    telling = next(found, None)
    return None if telling is None else shortened(telling[1])


def last_line(lines: Sequence[str]) -> str | None:
    """The last line with anything in it, where none tells more."""
    return next((shortened(text) for line in reversed(lines) if (text := _COLOUR.sub("", line).strip())), None)


def shortened(text: str) -> str:
    return text if len(text) <= TELLING_CHARS_MAX else f"{text[: TELLING_CHARS_MAX - 1]}…"
