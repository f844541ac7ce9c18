"""Blocking calls to gateways by programs: one request, its answer within a deadline, and the fields of that answer.

Owns that no server stretches a call by answering little by little, that no answer is larger than it may be, that no
redirect is followed, and that a field has the type that it must have. Each call has a connection of its own. Uses only
the standard library, so that any training program can import it.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import urlsplit

CONNECT_MAX_S: Final = 5.0
# Of an answer; what gateways say to programs is far smaller.
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
# Larger whole numbers lose digits in JSON.
WHOLE_MAX: Final = 2**53 - 1
# As long as a path may be.
NAME_BYTES_MAX: Final = 4_096

Kind = TypeVar("Kind")
# Status, headers with lower-case names, and body.
Answer = tuple[int, Mapping[str, str], bytes]
# Carries the token of a signed operation.
TOKEN_HEADER: Final = "X-Verified-Op-Token"
# What a call raises that has no answer.
NO_ANSWER: Final = (OSError, http.client.HTTPException, UnicodeError)


def reason(error: BaseException) -> str:
    """Why there is no answer, in words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a gateway answers; `prefix` goes before every path, and `key` with every call."""

    is_tls: bool
    host: str
    port: int
    prefix: str
    key: str | None = field(repr=False)


def origin_of(url: str, key: str | None) -> Origin | None:
    """None if it is no address of a gateway. Raises ValueError if it is none at all."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        return None
    # The address of OpenAI's clients is the same one.
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Origin(parts.scheme == "https", parts.hostname, port, prefix, key)


class Call:
    """One request, made by `answer`; another thread may `cut` it. `token` permits it, where operations are signed."""

    def __init__(
        self, origin: Origin, method: str, path: str, body: object, answer_max_s: float, token: str | None = None
    ) -> None:
        headers = {"Accept": "application/json", "Connection": "close", "Content-Type": "application/json"}
        if origin.key is not None:
            headers["Authorization"] = f"Bearer {origin.key}"
        if token is not None:
            headers[TOKEN_HEADER] = token
        self._request = (method, origin.prefix + path, None if body is None else json.dumps(body).encode(), headers)
        self._deadline = Deadline(answer_max_s)
        self._connection = connection_to(origin.host, origin.port, self._deadline, is_tls=origin.is_tls)
        self._is_cut = False

    def answer(self) -> Answer:
        """Raises one of NO_ANSWER."""
        with contextlib.closing(self._connection) as connection:
            connection.connect()
            if self._is_cut:
                raise OSError("was cut off")
            connection.sock.settimeout(self._deadline.left_s())
            connection.request(*self._request)
            response = connection.getresponse()
            told = {name.lower(): value for name, value in response.headers.items()}
            return response.status, told, whole_body(response, ANSWER_BYTES_MAX)

    def cut(self) -> None:
        """The server sees that its caller has left, and `answer` raises."""
        self._is_cut = True
        # It may still be connecting, or be done.
        with contextlib.suppress(OSError, AttributeError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)


class Deadline:
    """When an exchange must be over."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at = time.monotonic() + seconds
        self._is_of_silence = False

    def bound_silence(self) -> None:
        """From now on there is no end but that nothing comes for as long: the answer is a stream."""
        self._is_of_silence = True

    def left_s(self) -> float:
        """For what is done next. Raises TimeoutError if nothing is left."""
        left_s = self._seconds if self._is_of_silence else self._at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    @property
    def missed(self) -> str:
        """What a server has done that was cut off by this."""
        how = "has said nothing for" if self._is_of_silence else "has not answered within"
        return f"{how} {self._seconds:g} s"


def connection_to(host: str, port: int, deadline: Deadline, *, is_tls: bool) -> http.client.HTTPConnection:
    """Not connected yet. Its answers are read until the deadline."""
    make = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
    connection = make(host, port, timeout=min(CONNECT_MAX_S, deadline.left_s()))
    connection.response_class = _timed(deadline)
    return connection


def whole_body(response: http.client.HTTPResponse, bytes_max: int) -> bytes:
    """Raises HTTPException for one that is larger, or cut."""
    content = response.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise AnswerTooLarge(f"its answer is larger than {bytes_max:,} bytes")
    if response.length:
        # A bounded read does not raise when the body is shorter than its Content-Length.
        raise http.client.IncompleteRead(content, response.length)
    return content


class AnswerTooLarge(http.client.HTTPException):
    """A body has more bytes than are read of it."""


class _TimedReader(io.RawIOBase):
    """What comes from a socket until the deadline. A timeout of the socket alone begins anew with every byte."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline
        # Keeps the socket open when its connection is closed before the answer is read.
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.left_s())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _timed(deadline: Deadline) -> type[http.client.HTTPResponse]:
    """Answers that are read until the deadline: their heads, too."""

    class TimedResponse(http.client.HTTPResponse):
        def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
            super().__init__(sock, *args, **options)
            self.fp.close()
            self.fp = io.BufferedReader(_TimedReader(sock, deadline))

    return TimedResponse


# --- what it says -----------------------------------------------------------------------------------------------------


def json_of(content: bytes) -> Any:
    """Raises ValueError, also for NaN and Infinity, and for what is nested too deeply. A 1e999 is read as infinite."""
    try:
        return json.loads(content, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


class Fields:
    """The fields of a JSON object, each read as what it must be. All methods raise ValueError."""

    def __init__(self, said: object) -> None:
        if not isinstance(said, dict):
            raise ValueError("it is no object")
        self._said: dict[str, Any] = said

    def is_set(self, name: str) -> bool:
        return self._said.get(name) is not None

    def text(self, name: str) -> str:
        return self._of(name, str)

    def text_or_none(self, name: str) -> str | None:
        return self.text(name) if self.is_set(name) else None

    def name(self, name: str) -> str:
        """A text that can be said again elsewhere: half a character can be written as JSON, and nowhere else."""
        value = self.text(name)
        if not 1 <= len(value.encode()) <= NAME_BYTES_MAX:
            raise ValueError(f"{name} is empty or longer than {NAME_BYTES_MAX:,} bytes")
        return value

    def name_or_none(self, name: str) -> str | None:
        return self.name(name) if self.is_set(name) else None

    def flag(self, name: str) -> bool:
        return self._of(name, bool)

    def whole(self, name: str, least: int = 0) -> int:
        value = self._of(name, int)
        if not least <= value <= WHOLE_MAX:
            raise ValueError(f"{name} is no whole number from {least} to {WHOLE_MAX}")
        return value

    def whole_or_none(self, name: str, least: int = 0) -> int | None:
        return self.whole(name, least) if self.is_set(name) else None

    def number(self, name: str) -> float:
        value = self._said.get(name)
        if type(value) is int and abs(value) <= WHOLE_MAX:
            return float(value)
        if type(value) is not float or not math.isfinite(value):
            raise ValueError(f"{name} is no number")
        return value

    def number_or_none(self, name: str) -> float | None:
        return self.number(name) if self.is_set(name) else None

    def inner(self, name: str) -> Fields:
        return Fields(self._said.get(name))

    def inner_or_none(self, name: str) -> Fields | None:
        return self.inner(name) if self.is_set(name) else None

    def each(self, name: str) -> list[Fields]:
        return [Fields(one) for one in self._of(name, list)]

    def wholes(self) -> dict[str, int]:
        """An object whose fields are all whole numbers."""
        return {name: self.whole(name) for name in self._said}

    def except_for(self, names: frozenset[str]) -> dict[str, Any]:
        return {name: value for name, value in self._said.items() if name not in names}

    def _of(self, name: str, kind: type[Kind]) -> Kind:
        value = self._said.get(name)
        # Not `isinstance`: true is no number.
        if type(value) is not kind:
            raise ValueError(f"{name} is not of the type {kind.__name__}")
        return value
