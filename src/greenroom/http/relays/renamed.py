"""A relay that gives the model in an answer the name by which it was asked for.

Owns the search for the name in bytes as they come. An engine knows a model by one name; a caller that asks by path is
answered with that path. Inside of a JSON text quotes are escaped, so the name found is always a field's value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from greenroom.http.exchange import Exchange
from greenroom.http.headers import Headers
from greenroom.http.relays.relay import Relay, RelayOptions

_FIELD = b'"model":'


class NameFilter:
    """Replaces one name by another, also where it comes in two pieces."""

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


class Renamed(Relay):
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
