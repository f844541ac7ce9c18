"""One request of a dialect and its answer: the body for the engine, and the engine's bytes as the dialect has them.

Owns the joint between the two sides. The relay hands the engine's bytes in and sends on what comes out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from greenroom.dialects.chat import CHAT_PATH, TEXT_BYTES_MAX, ChatEvents, chat_fields, error_message, read_answer
from greenroom.dialects.neutral import AnswerContext, Conversation, Delta, Fields
from greenroom.dialects.shapes import Dialect, engine_error, error_event_of

JSON: Final = b"application/json"
# Of answers that an engine writes in the dialect itself.
ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
EVENTS: Final = b"text/event-stream; charset=utf-8"
# Of an event. Inside a string its quotes would be escaped.
_NUMBER: Final = re.compile(rb'"sequence_number" ?: ?(\d{1,15})[,} \r\n]')
_CUT_OFF: Final = "The engine ended its stream before its answer was whole."


def nothing() -> None:
    return None


class StreamWriter(Protocol):
    """Writes the stream that answers one request in a dialect. `number` is that of its next event, where it has any."""

    @property
    def number(self) -> int: ...

    def piece(self, piece: Delta) -> bytes:
        """Whole events for this piece of a stream, perhaps none."""
        ...

    def end(self) -> bytes:
        """The events after the last piece."""
        ...


class LongAnswer(Protocol):
    """Writes an answer as it comes. `failure`: why it cannot be read."""

    failure: str | None

    def feed(self, data: bytes) -> bytes: ...
    def flush(self) -> bytes: ...


class StreamTranslator:
    """Turns the events of an engine into those of a dialect. All that it returns are whole events.

    `failure` is what the engine said if it ended its stream with an error, or that it ended too early.
    """

    __slots__ = ("_dialect", "_events", "_is_over", "_writer", "failure")

    def __init__(self, dialect: Dialect, writer: StreamWriter) -> None:
        self._dialect = dialect
        self._events = ChatEvents()
        self._writer = writer
        self._is_over = False
        self.failure: str | None = None

    def feed(self, data: bytes) -> bytes:
        if self._is_over:
            return b""
        return self._write(self._events.feed(data))

    def flush(self) -> bytes:
        """The end of the answer, unless it ended in an error. An answer without its end is one."""
        if self._is_over:
            return b""
        written = self._write(self._events.end())
        self._is_over = True
        if self.failure is not None:
            return written
        return written + (self._writer.end() if self._events.is_whole else self._fail(_CUT_OFF))

    def _write(self, pieces: list[Delta]) -> bytes:
        written = []
        for piece in pieces:
            if piece.error is not None:
                written.append(self._fail(piece.error))
                break
            written.append(self._writer.piece(piece))
        return b"".join(written)

    def _fail(self, why: str) -> bytes:
        self._is_over, self.failure = True, why
        return error_event_of(self._dialect, engine_error(self._dialect, 502, why), self._writer.number)


@dataclass(frozen=True, slots=True)
class ChatTranslation:
    """To chat and back. `read` reads the request; it raises BadRequest, which names the field.

    `write` makes the answer where it is one piece, `writer` where it is a stream; None: no stream was asked for.
    `if_cold` is the answer where the request was read and need not load its model.
    """

    dialect: Dialect
    read: Callable[[Fields], Conversation]
    write: Callable[[Delta], bytes]
    writer: StreamWriter | None
    stream_type: bytes = EVENTS
    path: bytes = CHAT_PATH
    bytes_max: int = TEXT_BYTES_MAX
    long: Callable[[], None] = nothing
    if_cold: Callable[[], bytes | None] = nothing

    def request(self, fields: Fields) -> Fields:
        return chat_fields(self.read(fields), model=fields["model"], stream=self.writer is not None)

    def stream(self) -> StreamTranslator | None:
        return None if self.writer is None else StreamTranslator(self.dialect, self.writer)

    def next_number(self, sent: bytes) -> int:
        return 0 if self.writer is None else self.writer.number

    def whole(self, status: int, body: bytes) -> bytes:
        """Raises EngineFault if a good answer cannot be read."""
        if status != 200:
            return engine_error(self.dialect, status, error_message(body))
        return self.write(read_answer(body))


@dataclass(frozen=True, slots=True)
class PassThrough:
    """For an engine that has the dialect itself: only its errors get the dialect's shape."""

    dialect: Dialect
    path: bytes
    stream_type: bytes = EVENTS
    bytes_max: int = ANSWER_BYTES_MAX
    long: Callable[[], None] = nothing

    def request(self, fields: Fields) -> Fields:
        return fields

    def stream(self) -> None:
        return None

    def next_number(self, sent: bytes) -> int:
        numbers = _NUMBER.findall(sent) if self.dialect is Dialect.RESPONSES else ()
        return int(numbers[-1]) + 1 if numbers else 0

    def whole(self, status: int, body: bytes) -> bytes:
        return body if status == 200 else engine_error(self.dialect, status, error_message(body))


class Translation(Protocol):
    """How one request is put to an engine, and its answer to the client. `path` is the engine's."""

    @property
    def path(self) -> bytes: ...
    @property
    def stream_type(self) -> bytes: ...
    @property
    def bytes_max(self) -> int: ...

    def request(self, fields: Fields) -> Fields:
        """The fields for the engine. Raises BadRequest."""
        ...

    def stream(self) -> StreamTranslator | None: ...

    def next_number(self, sent: bytes) -> int:
        """The number of the next event, in a dialect that numbers them. `sent` are the engine's last bytes."""
        ...

    def whole(self, status: int, body: bytes) -> bytes: ...
    def long(self) -> LongAnswer | None: ...


# Makes the translation of one request, which is a stream or not, for an engine that does not have the dialect.
Translate = Callable[[AnswerContext, bool], Translation]
