"""Bytes in, requests out: the part of HTTP/1.1 that a gateway speaks to its worker.

Owns the framing and its bounds; ambiguous framing is refused, never guessed. Never reads or writes a socket.
Read `RequestParser.next_request` first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .refusals import Refused

HEAD_BYTES_MAX = 64 * 1024
HEADERS_MAX = 128
# Four million tokens of text, escaped. Python reads JSON without handing over, a quarter of a second for so much.
BODY_BYTES_MAX = 32 * 1024 * 1024
# Sizes, extensions and trailers of a chunked body are bounded like a head.
CHUNK_LINE_BYTES_MAX = 4 * 1024

_REQUEST_LINE = re.compile(r"([A-Z]{1,16}) ([!-~]{1,8192}) HTTP/1\.([01])")
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;.*)?")


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    """Without its query, which no endpoint here has."""
    headers: Mapping[str, str]
    """By lower-case name; of one that is repeated the last counts."""
    body: bytes
    keeps_alive: bool


@dataclass(frozen=True, slots=True)
class _Head:
    method: str
    path: str
    headers: Mapping[str, str]
    keeps_alive: bool
    body_bytes: int | None
    """None: the body is chunked."""


class RequestParser:
    """One connection's requests, in order. After it has raised it is of no further use."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._head: _Head | None = None
        self._wants_continue = False
        self._chunks = bytearray()
        self._chunk_left = 0
        self._is_in_trailers = False
        self._overhead = 0

    @property
    def is_in_request(self) -> bool:
        """A request has begun and is not complete."""
        return self._head is not None or bool(self._bytes)

    @property
    def pending_bytes(self) -> int:
        return len(self._bytes)

    def take_continue(self) -> bool:
        """Whether the client waits to be told before it sends its body. True at most once for each request."""
        wants, self._wants_continue = self._wants_continue, False
        return wants

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def next_request(self) -> Request | None:
        """The next complete request, or None as long as bytes are missing. Raises Refused for what is not HTTP."""
        if self._head is None:
            self._head = self._read_head()
        head = self._head
        if head is None:
            return None
        body = self._read_chunks() if head.body_bytes is None else self._read_sized(head.body_bytes)
        if body is None:
            return None
        self._head = None
        return Request(head.method, head.path, head.headers, body, head.keeps_alive)

    def _read_head(self) -> _Head | None:
        # An empty line before a request is forgiven, as the standard asks.
        while self._bytes.startswith(b"\r\n"):
            del self._bytes[:2]
        end = self._bytes.find(b"\r\n\r\n")
        if end > HEAD_BYTES_MAX or (end < 0 and len(self._bytes) > HEAD_BYTES_MAX):
            raise Refused(f"The headers are longer than {HEAD_BYTES_MAX} bytes.", status=431, code="headers_too_large")
        if end < 0:
            return None
        lines = self._bytes[:end].decode("latin-1").split("\r\n")
        del self._bytes[: end + 4]
        head = _parsed_head(lines)
        self._wants_continue = head.headers.get("expect", "").lower() == "100-continue"
        return head

    def _read_sized(self, size: int) -> bytes | None:
        if len(self._bytes) < size:
            return None
        body = bytes(self._bytes[:size])
        del self._bytes[:size]
        return body

    def _read_chunks(self) -> bytes | None:
        """All of a chunked body, or None. Each turn takes a chunk's bytes or a line away, so that it ends."""
        while True:
            if self._chunk_left:
                if not self._take_chunk():
                    return None
                continue
            line = self._line()
            if line is None:
                return None
            if self._is_in_trailers:
                if not line:
                    return self._end_chunks()
            elif not self._begin_chunk(line):
                self._is_in_trailers = True

    def _take_chunk(self) -> bool:
        """Move this chunk's bytes into the body; false while some are missing. Its line end counts to it."""
        if len(self._bytes) < self._chunk_left:
            return False
        taken = self._bytes[: max(self._chunk_left - 2, 0)]
        if self._bytes[len(taken) : self._chunk_left] != b"\r\n":
            raise Refused("A chunk of the body is not as long as it says.", code="bad_framing")
        self._chunks += taken
        del self._bytes[: self._chunk_left]
        self._chunk_left = 0
        return True

    def _begin_chunk(self, line: bytes) -> bool:
        """True if a chunk follows, false after the last."""
        match = _CHUNK_SIZE.fullmatch(line)
        if match is None:
            raise Refused("The size of a chunk is not a number.", code="bad_framing")
        size = int(match[1], 16)
        _check_size(len(self._chunks) + size)
        self._chunk_left = size + 2 if size else 0
        return size > 0

    def _end_chunks(self) -> bytes:
        body = bytes(self._chunks)
        self._chunks = bytearray()
        self._is_in_trailers, self._overhead = False, 0
        return body

    def _line(self) -> bytes | None:
        end = self._bytes.find(b"\r\n", 0, CHUNK_LINE_BYTES_MAX)
        if end < 0:
            if len(self._bytes) >= CHUNK_LINE_BYTES_MAX:
                raise Refused("A line between chunks is too long.", code="bad_framing")
            return None
        line = bytes(self._bytes[:end])
        del self._bytes[: end + 2]
        self._overhead += len(line)
        # As much as the content itself may be spent on sizes: chunks of one byte are lawful.
        if self._overhead > HEAD_BYTES_MAX + 4 * len(self._chunks):
            raise Refused("The body is mostly chunk sizes.", code="bad_framing")
        return line


def _parsed_head(lines: list[str]) -> _Head:
    match = _REQUEST_LINE.fullmatch(lines[0])
    if match is None:
        raise Refused("The first line is not an HTTP/1.1 request.", code="bad_framing")
    if len(lines) - 1 > HEADERS_MAX:
        raise Refused(f"There are more than {HEADERS_MAX} headers.", status=431, code="headers_too_large")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        _add_header(headers, line)
    connection = headers.get("connection", "").lower()
    keeps_alive = "close" not in connection if match[3] == "1" else "keep-alive" in connection
    return _Head(match[1], match[2].partition("?")[0], headers, keeps_alive, _body_bytes(headers))


def _add_header(headers: dict[str, str], line: str) -> None:
    name, colon, value = line.partition(":")
    if not colon or not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
        raise Refused("A header is not one.", code="bad_framing")
    name, value = name.lower(), value.strip(" \t")
    if name in ("content-length", "transfer-encoding") and headers.get(name, value) != value:
        raise Refused(f"{name} says two things.", code="bad_framing")
    headers[name] = value


def _body_bytes(headers: Mapping[str, str]) -> int | None:
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None:
        if length is not None or coding.lower() != "chunked":
            raise Refused("A body is either chunked or of a stated length.", code="bad_framing")
        return None
    if length is None:
        return 0
    if not re.fullmatch(r"[0-9]{1,12}", length):
        raise Refused("content-length is not a number.", code="bad_framing")
    _check_size(int(length))
    return int(length)


def _check_size(size: int) -> None:
    if size > BODY_BYTES_MAX:
        raise Refused(f"The body is larger than {BODY_BYTES_MAX} bytes.", status=413, code="body_too_large")
