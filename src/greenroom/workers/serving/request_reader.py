"""Requests from the bytes of a connection, by h11. Refuses what h11 forgives and others could read differently."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import h11

from .errors import ApiError

HEAD_BYTES_MAX = 64 * 1024
HEADERS_MAX = 128
# Four million tokens of text, escaped. Python parses JSON without yielding, a quarter of a second for so much.
BODY_BYTES_MAX = 32 * 1024 * 1024
# Bytes of framing for each byte of a body. A chunk of one byte has five; more is spent on extensions.
FRAMING_MAX = 8


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    """Without its query."""
    query: str
    headers: Mapping[str, str]
    """By lower-case name; of a repeated header the last counts."""
    body: bytes
    keeps_alive: bool


class RequestReader:
    """Bytes in, requests out, in order. After it has raised it is of no further use."""

    def __init__(self, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self._body_bytes_max = body_bytes_max
        self._unread = bytearray()
        self._head: h11.Request | None = None
        self._headers: Mapping[str, str] = {}
        # What has come until the head is complete; h11 refuses a head that is too long.
        self._raw_head = b""
        self._is_told = False
        self._begin()

    @property
    def is_in_request(self) -> bool:
        """A request has begun and is not complete."""
        return self._taken_bytes > 0

    @property
    def ahead_bytes(self) -> int:
        """Received after the last complete request."""
        return len(self._unread)

    def feed(self, data: bytes) -> None:
        self._unread += data

    def next_request(self) -> Request | None:
        """The next complete request, or None while bytes are missing. Raises ApiError for what is not HTTP."""
        self._hand_over()
        try:
            while not isinstance(event := self._http.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    _check_lines(self._raw_head)
                    self._raw_head = b""
                    self._head, self._headers = event, _headers(event)
                    _check_size(int(self._headers.get("content-length", 0)), self._body_bytes_max)
                elif isinstance(event, h11.Data):
                    self._take(event.data)
                else:
                    self._check_framing()
                    return None
        except h11.RemoteProtocolError as error:
            raise _refused(error) from None
        return self._complete()

    def take_continue(self) -> bool:
        """True if the client waits to be told before it sends its body; once for each request."""
        wants = self._http.they_are_waiting_for_100_continue and not self._is_told
        self._is_told = self._is_told or wants
        return wants

    def _begin(self) -> None:
        # One h11 connection for each request: it is not told what is answered, so it could not go on to the next.
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._head = None
        self._raw_head = b""
        self._pieces: list[bytes] = []
        self._body_bytes = 0
        self._taken_bytes = 0
        self._is_told = False

    def _hand_over(self) -> None:
        if not self._taken_bytes:
            # An empty line before a request is forgiven, as the standard asks.
            while self._unread.startswith(b"\r\n"):
                del self._unread[:2]
        if self._unread:
            self._taken_bytes += len(self._unread)
            data = bytes(self._unread)
            if self._head is None:
                self._raw_head += data
            self._http.receive_data(data)
            self._unread.clear()

    def _take(self, data: bytes) -> None:
        self._body_bytes += len(data)
        _check_size(self._body_bytes, self._body_bytes_max)
        self._pieces.append(bytes(data))

    def _check_framing(self) -> None:
        if self._taken_bytes - self._body_bytes > 2 * HEAD_BYTES_MAX + FRAMING_MAX * self._body_bytes:
            raise ApiError("The body is mostly chunk sizes.", code="bad_framing")

    def _complete(self) -> Request:
        head = self._head
        assert head is not None
        path, _, query = head.target.decode().partition("?")
        request = Request(
            method=head.method.decode(),
            path=path,
            query=query,
            headers=self._headers,
            body=b"".join(self._pieces),
            keeps_alive=self._http.their_state is h11.DONE,
        )
        rest, _ = self._http.trailing_data
        self._begin()
        self._unread += rest
        return request


def _check_lines(received: bytes) -> None:
    """Raises ApiError for what h11 forgives in a head and another program may read differently."""
    head, end, _ = received.partition(b"\r\n\r\n")
    if not end or _ODD.search(head):
        raise ApiError("A line of the head is folded, or has an odd end or character.", code="bad_framing")


def _headers(head: h11.Request) -> Mapping[str, str]:
    """The headers, by name. Raises ApiError for a head that h11 accepts and we do not."""
    # h11's own sequence of headers is slow to walk, so it is walked once.
    pairs = list(head.headers)
    if len(pairs) > HEADERS_MAX:
        raise ApiError(f"There are more than {HEADERS_MAX} headers.", status=431, code="headers_too_large")
    if head.http_version not in (b"1.1", b"1.0"):
        raise ApiError("The first line is not an HTTP/1.1 request.", code="bad_framing")
    headers = {name.decode(): value.decode("latin-1") for name, value in pairs}
    if sum(map(len, headers)) + sum(map(len, headers.values())) + len(head.target) > HEAD_BYTES_MAX:
        raise _head_too_long()
    if "content-length" in headers and "transfer-encoding" in headers:
        # Two programs that read such a body differently could be led to see different requests.
        raise ApiError("A body is either chunked or of a stated length.", code="bad_framing")
    return headers


def _check_size(size: int, size_max: int) -> None:
    if size > size_max:
        raise ApiError(f"The body is larger than {size_max} bytes.", status=413, code="body_too_large")


def _refused(error: h11.RemoteProtocolError) -> ApiError:
    if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
        return _head_too_long()
    return ApiError(f"This is not HTTP/1.1: {error}.", code="bad_framing")


def _head_too_long() -> ApiError:
    return ApiError(f"The headers are longer than {HEAD_BYTES_MAX} bytes.", status=431, code="headers_too_large")


# A folded line, CR or LF alone, and control characters other than tabs.
_ODD = re.compile(rb"\r\n[ \t]|\r(?!\n)|(?<!\r)\n|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
