"""One request of a dialect and its answer: the body for the engine, and the engine's bytes as the dialect has them.

Owns the joint between the two sides. The relay hands the engine's bytes in and sends on what comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from greenroom.dialects.chat import CHAT_PATH, TEXT_BYTES_MAX, ChatEvents, chat_fields, error_message, read_answer
from greenroom.dialects.errors import ErrorShape
from greenroom.dialects.neutral import AnswerContext, Conversation, Delta, Fields

JSON: Final = b"application/json"
# Of answers that an engine writes in the dialect itself.
ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
EVENTS: Final = b"text/event-stream; charset=utf-8"
_CUT_OFF: Final = "The engine ended its stream before its answer was whole."


def nothing() -> None:
    return None


class StreamWriter(Protocol):
    """Writes the stream that answers one request in a dialect. `number` is that of its next event, where it has any."""

    @property
    def number(self) -> int: ...

    def write(self, delta: Delta) -> bytes:
        """Whole events for this delta of a stream, perhaps none."""
        ...

    def end(self) -> bytes:
        """The events after the last delta."""
        ...


class AnswerTranslator(Protocol):
    """Turns an engine's bytes into the dialect's as they come. `failure`: why that cannot be done."""

    failure: str | None

    def feed(self, data: bytes) -> bytes: ...
    def flush(self) -> bytes: ...


class StreamTranslator:
    """Turns the events of an engine into those of a dialect. All that it returns are whole events.

    `failure` is what the engine said if it ended its stream with an error, or that it ended too early.
    """

    __slots__ = ("_errors", "_events", "_is_over", "_writer", "failure")

    def __init__(self, errors: ErrorShape, writer: StreamWriter) -> None:
        self._errors = errors
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

    def _write(self, deltas: list[Delta]) -> bytes:
        written = []
        for delta in deltas:
            if delta.error is not None:
                written.append(self._fail(delta.error))
                break
            written.append(self._writer.write(delta))
        return b"".join(written)

    def _fail(self, why: str) -> bytes:
        self._is_over, self.failure = True, why
        return self._errors.event(self._errors.of_engine(502, why), self._writer.number)


@dataclass(frozen=True, slots=True)
class Translation:
    """How one request is put to an engine, whose `path` is asked, and its answer to the client.

    `request` makes the fields for the engine. It raises BadRequest, which names the field. `answer` makes the client's
    answer of a good one, or raises EngineFault; one above `bytes_max` is refused. `long` does it as a long one comes;
    None: it is held like others. `writer` writes a stream; None: there is none, or it passes as it is. `if_cold` is the
    answer where the request was read and need not load its model.
    """

    errors: ErrorShape
    path: bytes
    request: Callable[[Fields], Fields]
    answer: Callable[[bytes], bytes]
    writer: StreamWriter | None = None
    stream_type: bytes = EVENTS
    bytes_max: int = TEXT_BYTES_MAX
    long: Callable[[], AnswerTranslator | None] = nothing
    if_cold: Callable[[], bytes | None] = nothing

    def stream(self) -> StreamTranslator | None:
        return None if self.writer is None else StreamTranslator(self.errors, self.writer)

    def next_number(self, sent: bytes) -> int:
        """The number of the next event, in a dialect that numbers them. `sent` are the engine's last bytes."""
        return self.errors.next_number(sent) if self.writer is None else self.writer.number

    def whole(self, status: int, body: bytes) -> bytes:
        """Raises EngineFault if a good answer cannot be read."""
        return self.answer(body) if status == 200 else self.errors.of_engine(status, error_message(body))


def to_chat(
    errors: ErrorShape,
    read: Callable[[Fields], Conversation],
    write: Callable[[Delta], bytes],
    writer: StreamWriter | None,
    stream_type: bytes = EVENTS,
    if_cold: Callable[[], bytes | None] = nothing,
) -> Translation:
    """To OpenAI's chat and back. `writer` is None if no stream was asked for."""

    def request(fields: Fields) -> Fields:
        return chat_fields(read(fields), model=fields["model"], stream=writer is not None)

    def answer(body: bytes) -> bytes:
        return write(read_answer(body))

    return Translation(errors, CHAT_PATH, request, answer, writer, stream_type, if_cold=if_cold)


def pass_through(errors: ErrorShape, path: bytes) -> Translation:
    """For an engine that has the dialect itself: only its errors get the dialect's shape."""
    return Translation(errors, path, lambda fields: fields, lambda body: body, bytes_max=ANSWER_BYTES_MAX)


# Makes the translation of one request, which is a stream or not, for an engine that does not have the dialect.
Translate = Callable[[AnswerContext, bool], Translation]
