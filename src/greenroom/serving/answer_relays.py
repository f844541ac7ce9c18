"""Relays that change an answer: into another dialect than the engine's, or only the name of its model.

Owns the joint between the engine's bytes, which are counted and read as they are, and those that the client is sent. A
stream is translated as it comes, and so is a long answer of vectors; any other answer is held until it is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from greenroom.dialects.translation import JSON, AnswerTranslator, Translation
from greenroom.errors import EngineFault
from greenroom.http.exchange import Exchange
from greenroom.http.headers import Headers
from greenroom.http.relays.relay import UNREAD_BYTES_MAX, Relay, RelayOptions, RelayOutcome

# An answer has one for each choice, call and vector, and each takes time of all callers; those of a text hardly count.
ANSWER_OBJECTS_MAX: Final = 100_000
# Shorter answers cannot hurt.
COUNTED_BYTES: Final = 256 * 1024
# Longer ones are translated as they come, if they can be.
LONG_BYTES: Final = 1024 * 1024


class TranslatingRelay(Relay):
    """Use in place of a Relay. An answer that cannot be translated ends as a lost engine does, with its own error."""

    __slots__ = ("_events", "_objects", "_translation")

    def __init__(
        self,
        exchange: Exchange,
        translation: Translation,
        options: RelayOptions,
        *,
        committed: bool = False,
        on_done: Callable[[Relay], None] | None = None,
    ) -> None:
        self._translation = translation
        # Set once the engine streams.
        self._events: AnswerTranslator | None = None
        # Of an answer that is held, as far as it has come.
        self._objects = 0
        super().__init__(exchange, options, committed=committed, on_done=on_done)

    def head(self, status: int, headers: Headers) -> None:
        self._note_head(status, headers)
        if self._is_streamed() or self.committed:
            self._pass_head()
        else:
            self._held = []

    @property
    def at_boundary(self) -> bool:
        return (self._events is not None and self._is_streamed()) or super().at_boundary

    def complete(self) -> None:
        events = self._events
        if events is not None:
            self.exchange.write(events.flush())
            if events.failure is not None:
                self.upstream = None
                if self._is_streamed():
                    self.exchange.finish()
                self._fail(EngineFault("The engine ended its answer with an error.", details=events.failure))
                return
        super().complete()

    def _pass(self, data: bytes) -> None:
        if self._events is None:
            super()._pass(data)
            return
        self._unread.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > UNREAD_BYTES_MAX or self.first_data_at is None:
            self._read()
        self.exchange.write(self._events.feed(data))

    def _note_head(self, status: int, headers: Headers) -> None:
        super()._note_head(status, headers)
        if not self._is_streamed():
            # Also the events of an error are read as a whole.
            self._counter = None
            self.headers = _with_type(headers, JSON)
            return
        self._events = self._translation.stream()
        if self._events is not None:
            self.headers = _with_type(headers, self._translation.stream_type)

    def _is_streamed(self) -> bool:
        return self._counter is not None and self.status == 200

    def _hold(self, data: bytes) -> None:
        assert self._held is not None
        self._held.append(data)
        self._unread.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > UNREAD_BYTES_MAX:
            self._read()
        self._objects += data.count(b"{") + data.count(b"[")
        bytes_max, length = self._translation.bytes_max, self.total_bytes
        if length > bytes_max:
            self._refuse(f"{bytes_max:,} bytes")
        elif self._objects > ANSWER_OBJECTS_MAX and length > COUNTED_BYTES:
            self._refuse(f"{ANSWER_OBJECTS_MAX:,} JSON objects")
        elif length > LONG_BYTES and self.status == 200 and (events := self._translation.long()) is not None:
            held, self._held, self._events = b"".join(self._held), None, events
            self._pass_head()
            self.exchange.write(events.feed(held))

    def _refuse(self, most: str) -> None:
        self._drop_upstream()
        self._fail(EngineFault(f"The answer has more than {most}."))

    def _respond(self, body: bytes) -> None:
        try:
            translated = self._translation.whole(self.status, body)
        except EngineFault as error:
            self._fail(error)
            return
        super()._respond(translated)

    def _fail(self, error: EngineFault) -> None:
        self.error = error
        self._held = None
        self._settle(RelayOutcome.ENGINE_LOST)


def _with_type(headers: Headers, media_type: bytes) -> Headers:
    """The engine's headers for another body."""
    kept = [header for header in headers if header[0] not in (b"content-type", b"content-length", b"content-encoding")]
    return [*kept, (b"content-type", media_type)]


_FIELD: Final = b'"model":'


class NameFilter:
    """Replaces one name by another, also where it comes in two pieces.

    Inside of a JSON text quotes are escaped, so the name found is always a field's value.
    """

    __slots__ = ("_held", "_new", "_old", "_pattern")

    def __init__(self, old: str, new: str) -> None:
        self._old = json.dumps(old, ensure_ascii=False).encode("utf-8", "replace")
        self._new = _FIELD + json.dumps(new).encode()
        self._pattern = re.compile(re.escape(_FIELD) + b" ?" + re.escape(self._old))
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Returns the bytes that may be passed on now."""
        data = self._pattern.sub(lambda _: self._new, self._held + data)
        cut = len(data) - self._open_end(data)
        self._held = data[cut:]
        return data[:cut]

    def flush(self) -> bytes:
        rest, self._held = self._held, b""
        return rest

    def _open_end(self, data: bytes) -> int:
        """How many of the last bytes may be the beginning of the name's field."""
        wholes = (_FIELD + self._old, _FIELD + b" " + self._old)
        sizes = range(min(len(wholes[1]) - 1, len(data)), 0, -1)
        return next((size for size in sizes for whole in wholes if data.endswith(whole[:size])), 0)


class ModelNameRewriter(Relay):
    """Use in place of a Relay, for a caller that asked for `old` as `new`."""

    __slots__ = ("_names",)

    def __init__(
        self,
        exchange: Exchange,
        old: str,
        new: str,
        options: RelayOptions,
        *,
        committed: bool = False,
        on_done: Callable[[Relay], None] | None = None,
    ) -> None:
        self._names = NameFilter(old, new)
        super().__init__(exchange, options, committed=committed, on_done=on_done)

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        super().answer(status, _without_length(headers), self._names.feed(body) + self._names.flush())

    def head(self, status: int, headers: Headers) -> None:
        super().head(status, _without_length(headers))

    def body(self, data: bytes) -> None:
        if passed := self._names.feed(data):
            super().body(passed)

    def complete(self) -> None:
        if rest := self._names.flush():
            super().body(rest)
        super().complete()


def _without_length(headers: Headers) -> Headers:
    """Another name has another length."""
    return [header for header in headers if header[0] != b"content-length"]
