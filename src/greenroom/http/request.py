"""Requests as clients send them: bytes in, unambiguous heads and collected bodies out.

Owns the parser, `Head`, and every check on framing that the parser does not make itself: one Host, one length, one
way of writing the request line. The parser is never fed beyond the end of a request: every head and every chunked
body ends in CRLF CRLF, every other body after a counted number of bytes. Its callbacks only take notes. Never touches
the socket, and never decodes the path: the path that is authorised is the path that is routed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import httptools

from greenroom.errors import (
    BadFraming,
    BodyTooLarge,
    ExpectationFailed,
    GreenroomError,
    HeadersTooLarge,
    MethodNotAllowed,
)
from greenroom.http.body import Body, BodyBudget
from greenroom.http.headers import HEADER_NAMES, Headers, Pattern
from greenroom.http.limits import EdgeLimits

_END: Final = b"\r\n\r\n"
# Of chunks, and of places where the body might end, before other connections get their turn: about a millisecond.
CHUNKS_A_TURN: Final = 1_000
_CHUNKED_FEED_BYTES: Final = 16 * 1024
_FRAMING: Final = frozenset(
    (
        *(b"host", b"content-length", b"transfer-encoding", b"expect", b"upgrade"),
        *(b"authorization", b"x-api-key", b"x-tenant-id", b"origin"),
    )
)
_HOST: Final = Pattern(rb"(?:[A-Za-z0-9._~%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_LENGTH_DIGITS_MAX: Final = 18
_VERSIONS: Final = {b"HTTP/1.1": "1.1", b"HTTP/1.0": "1.0"}

# Names that are valid only before the body. In a trailer they could only confuse a parser.
FORBIDDEN_IN_TRAILERS: Final = frozenset(
    (
        b"authorization",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"content-range",
        b"content-type",
        b"cookie",
        b"expect",
        b"host",
        b"keep-alive",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)


class ClientRequestReader:
    """`feed` until `is_complete`, then `take` the request and feed on.

    `head` is there from the end of the headers until `take`; `admit` was asked about it.
    """

    __slots__ = (
        "_admit",
        "_body_limit",
        "_budget",
        "_chunk_bytes",
        "_chunk_idle_bytes",
        "_content_bytes",
        "_head_done",
        "_headers",
        "_keep_alive",
        "_last",
        "_limits",
        "_parser",
        "_pieces",
        "_raw",
        "_skipped_line",
        "_trailer_refused",
        "body",
        "head",
        "is_complete",
        "peer_ip",
        "refusal",
    )

    def __init__(self, admit: Callable[[Head], int], budget: BodyBudget, limits: EdgeLimits) -> None:
        self._admit = admit
        self._budget = budget
        self._limits = limits
        self.peer_ip = ""
        self.head: Head | None = None
        self.body: Body | None = None
        self.is_complete = False
        # Why a request that is complete must not be served.
        self.refusal: GreenroomError | None = None
        self._parser = httptools.HttpRequestParser(self)
        # What has come of a head that is still incomplete.
        self._raw = bytearray()
        self._headers: Headers = []
        self._head_done = False
        self._keep_alive = False
        self._skipped_line = False
        self._body_limit = 0
        self._pieces: list[bytes] = []
        self._last = b""
        self._chunk_bytes = 0
        self._chunk_idle_bytes = 0
        self._content_bytes = 0
        self._trailer_refused = False

    @property
    def has_begun(self) -> bool:
        """Some bytes of a request are here, but not all."""
        return bool(self._raw) or self.head is not None

    @property
    def received_bytes(self) -> int:
        """How much of the body has come, as it was sent."""
        return self._chunk_bytes or (0 if self.body is None else self.body.length)

    def feed(self, data: bytes) -> bytes:
        """Read on. Gives back the bytes that are not part of this request.

        Raises the GreenroomError to refuse it with when the rest of the connection's bytes cannot be trusted or are not
        wanted.
        """
        try:
            return self._take_head(data) if self.head is None else self._take_body(data)
        except httptools.HttpParserError as error:
            raise BadFraming(f"The request is not valid HTTP/1.1: {error}.") from error

    def take(self) -> tuple[Head, Body]:
        """The request that is complete. The next one may follow."""
        head, body = self.head, self.body
        assert head is not None
        self.head = self.body = self.refusal = None
        self.is_complete = False
        if body is None:
            return head, Body(self._budget)
        if self._chunk_bytes:
            self._last = b""
            self._chunk_bytes = self._chunk_idle_bytes = self._content_bytes = 0
        return head, body

    def drop(self) -> None:
        """Forget the request being read and give its budget back."""
        self._raw.clear()
        self.head = None
        if self.body is not None:
            self.body.close()
            self.body = None

    # --- head -------------------------------------------------------------------------------------------------------

    def _take_head(self, data: bytes) -> bytes:
        raw = self._raw
        if not raw:
            if data[0] == 0x0D and data[:2] == b"\r\n" and not self._skipped_line:
                # One empty line before a request is forgiven, as the standard asks.
                self._skipped_line = True
                return data[2:]
            end = data.find(_END) + 4
            if end == 3:
                return self._take_part_of_head(data)
            piece = whole = data[:end]
        else:
            # The mark may have begun in the bytes before these.
            end = (raw[-3:] + data).find(_END) + 4
            if end == 3:
                return self._take_part_of_head(data)
            end -= min(3, len(raw))
            piece = data[:end]
            whole = bytes(raw) + piece
            raw.clear()
        self._end_head(piece, whole)
        rest = data[end:]
        if self.is_complete or not rest:
            return rest
        return self._take_body(rest)

    def _take_part_of_head(self, data: bytes) -> bytes:
        limits, raw = self._limits, self._raw
        raw += data
        if len(raw) > limits.header_bytes_max:
            raise self._too_large()
        if len(raw) > limits.request_line_max and raw.find(b"\r\n", 0, limits.request_line_max + 2) < 0:
            raise _line_too_long(limits)
        # Fed now rather than when complete, so that nonsense is refused at once.
        self._parser.feed_data(data)
        return b""

    def _too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(f"The headers have more than {self._limits.header_bytes_max} bytes.")

    def _end_head(self, piece: bytes, whole: bytes) -> None:
        if len(whole) > self._limits.header_bytes_max:
            raise self._too_large()
        upgrading = False
        parser = self._parser
        try:
            parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            # The parser stops for good at an upgrade; whether it happens is for the upper layers to say.
            upgrading = True
            self._parser = httptools.HttpRequestParser(self)
        if not self._head_done:
            raise BadFraming("The request ends before its headers do.")
        headers, self._headers = self._headers, []
        self._head_done = self._skipped_line = False
        head = read_head(whole, parser.get_method(), headers, self.peer_ip, self._keep_alive, self._limits)
        if upgrading and head.chunked:
            raise BadFraming("A request to upgrade must not have a chunked body.")
        if not upgrading or head.content_length:
            # Without the Connection header, or with a body, it is an ordinary request.
            head.upgrade = None
        self.head = head
        self.is_complete = not (head.content_length or head.chunked)
        try:
            limit = self._admit(head)
        except GreenroomError as error:
            if not self.is_complete or head.upgrade is not None:
                raise
            # The request has ended, so the start of the next one is known: answer the error and go on reading.
            self.refusal = error
            return
        if head.content_length > limit:
            raise BodyTooLarge(f"The body has {head.content_length} bytes; at most {limit} are accepted here.")
        if not self.is_complete:
            self._body_limit = limit
            self.body = Body(self._budget)

    # --- body -------------------------------------------------------------------------------------------------------

    def _take_body(self, data: bytes) -> bytes:
        head, body = self.head, self.body
        assert head is not None and body is not None
        if head.chunked:
            return self._take_chunked(data, body)
        # The parser need not see bytes that are only counted.
        left = head.content_length - body.length
        body.append(data[:left])
        if body.length == head.content_length:
            self._parser = httptools.HttpRequestParser(self)
            self.is_complete = True
        return data[left:]

    def _take_chunked(self, data: bytes, body: Body) -> bytes:
        """Feed up to each CRLF CRLF: a chunked body can end nowhere else, and bytes after its end are not for it.

        Many short chunks are taken in turns: the rest is given back, and the request is not complete.
        """
        crossing = (self._last + data[:3]).find(_END)
        end = crossing + 4 - len(self._last) if crossing >= 0 else 0
        start = steps = 0
        while start < len(data) and not self.is_complete and steps + len(self._pieces) < CHUNKS_A_TURN:
            if end <= start:
                end = data.find(_END, start, start + _CHUNKED_FEED_BYTES) + 4
                if end == 3:
                    # Its mark may be parted.
                    end = min(len(data), start + _CHUNKED_FEED_BYTES - 3)
            self._feed_chunked(data[start:end], body)
            start = end
            steps += 1
        self._keep_chunks(body)
        self._last = (self._last + data[max(0, start - 3) : start])[-3:]
        return data[start:]

    def _feed_chunked(self, piece: bytes, body: Body) -> None:
        pieces = len(self._pieces)
        self._parser.feed_data(piece)
        if self._trailer_refused:
            raise BadFraming("A trailer must not carry framing headers.")
        self._chunk_bytes += len(piece)
        for content in self._pieces[pieces:]:
            self._content_bytes += len(content)
        self._chunk_idle_bytes = 0 if len(self._pieces) > pieces else self._chunk_idle_bytes + len(piece)
        overhead_max = self._limits.chunk_overhead_bytes_max
        if self._chunk_bytes > 2 * self._content_bytes + overhead_max or self._chunk_idle_bytes > overhead_max:
            raise BadFraming("The chunks of the body hold hardly any content.")

    def _keep_chunks(self, body: Body) -> None:
        if not self._pieces:
            return
        data = b"".join(self._pieces)
        self._pieces.clear()
        if body.length + len(data) > self._body_limit:
            raise BodyTooLarge(f"The body has more than {self._body_limit} bytes; no more are accepted here.")
        body.append(data)

    # --- the parser's notes -----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        name = HEADER_NAMES[name]
        if self.head is None:
            self._headers.append((name, value))
        elif name in FORBIDDEN_IN_TRAILERS:
            self._trailer_refused = True

    def on_headers_complete(self) -> None:
        self._head_done = True
        # The parser knows the answer only now; after the end of the message it says no.
        self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        # The end of a request without a body is seen at its head; this is the end of a chunked one.
        if self.head is not None:
            self.is_complete = True


class Head:
    """One request's line and headers. Header names are lower-cased, everything else is as it was sent."""

    __slots__ = (
        "answer_headers",
        "answer_lines",
        "chunked",
        "content_length",
        "expects_continue",
        "headers",
        "http_version",
        "keep_alive",
        "method",
        "note",
        "path",
        "peer_ip",
        "query",
        "target",
        "upgrade",
    )

    def __init__(
        self, method: bytes, target: bytes, headers: Headers, http_version: str, peer_ip: str, keep_alive: bool
    ) -> None:
        self.method = method
        self.target = target
        self.path, _, self.query = target.partition(b"?")
        self.headers = headers
        self.http_version = http_version
        self.peer_ip = peer_ip
        self.keep_alive = keep_alive
        self.content_length = 0
        self.chunked = False
        self.expects_continue = False
        self.upgrade: bytes | None = None
        # Headers that every answer to this request gets, also errors: see `add_to_answer`.
        self.answer_headers: Headers | None = None
        # Makes more of them, as finished lines, when the answer begins.
        self.answer_lines: Callable[[], bytes] | None = None
        # Set by the upper layer at `admit`, for its own use at `handle`.
        self.note: object = None

    def add_to_answer(self, headers: Headers) -> None:
        """Give these headers to whatever answers this request, an early refusal included."""
        self.answer_headers = headers if self.answer_headers is None else self.answer_headers + headers

    def get(self, name: bytes) -> bytes | None:
        """The first value of this header. `name` is lower-case."""
        for known, value in self.headers:
            if known == name:
                return stripped(value)
        return None

    def get_all(self, names: frozenset[bytes]) -> dict[bytes, bytes]:
        """The last value of each of these headers that there is, found in one pass. `names` are lower-case."""
        found: dict[bytes, bytes] = {}
        for known, value in self.headers:
            if known in names:
                found[known] = stripped(value)
        return found


def stripped(value: bytes) -> bytes:
    """The value of a header without spaces at its end, which the parser leaves there. Most have none."""
    return value.rstrip(b" \t") if value and value[-1] <= 0x20 else value


def _line_too_long(limits: EdgeLimits) -> HeadersTooLarge:
    return HeadersTooLarge(f"The request line has more than {limits.request_line_max} bytes.")


def read_head(raw: bytes, method: bytes, headers: Headers, peer_ip: str, keep_alive: bool, limits: EdgeLimits) -> Head:
    """Check what the parser does not.

    Raises BadFraming, HeadersTooLarge, MethodNotAllowed or ExpectationFailed.

    `raw` is a whole head that the parser has accepted, so its characters are sound: lines end in CRLF, none is folded.
    """
    line = raw[: raw.find(b"\r\n")]
    if len(line) > limits.request_line_max:
        raise _line_too_long(limits)
    if len(headers) > limits.headers_max:
        raise HeadersTooLarge(f"The request has more than {limits.headers_max} headers.")
    # The parser accepts line ends before the method, doubled spaces and other versions; we do not.
    parts = line.split(b" ")
    version = _VERSIONS.get(parts[-1])
    if version is None or len(parts) != 3 or parts[0] != method:
        raise BadFraming("The request line is not METHOD SP TARGET SP HTTP/1.1.")
    head = Head(method, parts[1], headers, version, peer_ip, keep_alive)
    host: bytes | None = None
    lengths = 0
    authorizations = keys = tenants = origins = 0
    for name, value in headers:
        if name not in _FRAMING:
            continue
        value = stripped(value)
        if name == b"host":
            if host is not None:
                raise BadFraming("The request has more than one Host header.")
            host = value
        elif name == b"authorization":
            authorizations += 1
        elif name == b"x-api-key":
            keys += 1
        elif name == b"x-tenant-id":
            tenants += 1
        elif name == b"origin":
            origins += 1
        elif name == b"content-length":
            lengths += 1
            # bytes.isdigit accepts ASCII digits only; int() alone would also take "+3" and "3_0".
            if not value.isdigit() or len(value) > _LENGTH_DIGITS_MAX:
                raise BadFraming("Content-Length is not a number of bytes.")
            head.content_length = int(value)
        elif name == b"transfer-encoding":
            lengths += 1
            _expect_chunked(head, value)
        elif name == b"expect":
            _read_expectation(head, value)
        else:
            head.upgrade = value
    if authorizations > 1 or keys > 1:
        # A proxy before us may have checked the other one.
        raise BadFraming("The request has more than one Authorization or x-api-key header.")
    if tenants > 1:
        raise BadFraming("The request has more than one X-Tenant-ID header.")
    if origins > 1:
        # A browser sends one at most, and by the first a page of the second would be let in.
        raise BadFraming("The request has more than one Origin header.")
    if lengths > 1:
        raise BadFraming("The length of the body is given more than once.")
    if host is None:
        if version == "1.1":
            raise BadFraming("An HTTP/1.1 request needs a Host header.")
    elif not _HOST.fits(host):
        raise BadFraming("The Host header is not HOST or HOST:PORT.")
    if head.target[0] != 0x2F or head.target.find(b"#") >= 0:
        _normalise_target(head, host)
    return head


def _expect_chunked(head: Head, value: bytes) -> None:
    if value.lower() != b"chunked" or head.http_version != "1.1":
        raise BadFraming("The only Transfer-Encoding understood is chunked, in HTTP/1.1.")
    head.chunked = True


def _read_expectation(head: Head, value: bytes) -> None:
    if value.lower() != b"100-continue":
        raise ExpectationFailed("The only expectation understood is 100-continue.")
    # An HTTP/1.0 client would take the interim answer for the final one.
    head.expects_continue = head.http_version == "1.1"


def _normalise_target(head: Head, host: bytes | None) -> None:
    """Targets that are not a plain path: accept http://host/path of our own Host, refuse the rest."""
    target = head.target
    if head.method == b"CONNECT":
        raise MethodNotAllowed("CONNECT is not served here: this is not a forward proxy.")
    scheme, _, rest = target.partition(b"://")
    authority, slash, path = rest.partition(b"/")
    if b"#" in target or scheme.lower() not in (b"http", b"https") or not slash:
        raise BadFraming("The request target must be a path that starts with a slash.")
    if host is None or authority.lower() != host.lower():
        raise BadFraming("The request target names another host than the Host header.")
    head.target = b"/" + path
    head.path, _, head.query = head.target.partition(b"?")
