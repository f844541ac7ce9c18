"""The head of a request, and the rules that make its framing unambiguous.

Owns `Head` and every check that the parser does not make itself: one Host, one way of framing, one way of writing the
request line. Never reads from a socket and never decodes the path: what is authorised is what is routed by.
"""

from __future__ import annotations

import re
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from greenroom.errors import BadFraming, ExpectationFailed, GatewayBug, HeadersTooLarge, MethodNotAllowed
from greenroom.http.limits import EdgeLimits

Headers = list[tuple[bytes, bytes]]

_FRAMING: Final = frozenset((b"host", b"content-length", b"transfer-encoding", b"expect", b"upgrade"))
_HOST: Final = re.compile(rb"(?:[A-Za-z0-9._~%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_LENGTH_DIGITS_MAX: Final = 18
_VERSIONS: Final = {b"HTTP/1.1": "1.1", b"HTTP/1.0": "1.0"}

# Names that mean something only before the body. After it they could only be meant to confuse someone.
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


class Head:
    """One request's line and headers. Header names are lower-cased, everything else is as it was sent."""

    __slots__ = (
        "answer_headers",
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
        # What every answer to this request carries besides, whoever gives it.
        self.answer_headers: Headers | None = None
        # What the upper layer found out at `admit` and wants to have at `handle`.
        self.note: object = None

    def get(self, name: bytes) -> bytes | None:
        """The first value of this header. `name` is lower-case."""
        for known, value in self.headers:
            if known == name:
                # The parser leaves spaces at the end of a line in place.
                return value.rstrip(b" \t")
        return None

    def get_all(self, names: frozenset[bytes]) -> dict[bytes, bytes]:
        """The first value of each of these headers that there is, found in one pass. `names` are lower-case."""
        found: dict[bytes, bytes] = {}
        for known, value in self.headers:
            if known in names and known not in found:
                found[known] = value.rstrip(b" \t")
        return found

    @property
    def has_body(self) -> bool:
        return self.chunked or self.content_length > 0


def read_head(raw: bytes, method: bytes, headers: Headers, peer_ip: str, keep_alive: bool, limits: EdgeLimits) -> Head:
    """Check what the parser let through. Raises BadFraming, HeadersTooLarge, MethodNotAllowed or ExpectationFailed.

    `raw` is a whole head that the parser has accepted, so its characters are sound: lines end in CRLF, none is folded.
    """
    line = raw[: raw.find(b"\r\n")]
    if len(line) > limits.request_line_max or len(headers) > limits.headers_max:
        raise HeadersTooLarge(
            f"The request line may have {limits.request_line_max} bytes and the request {limits.headers_max} headers."
        )
    # The parser forgives line ends before the method, doubled spaces and other versions; here one spelling is right.
    parts = line.split(b" ")
    version = _VERSIONS.get(parts[-1])
    if version is None or len(parts) != 3 or parts[0] != method:
        raise BadFraming("The request line is not METHOD SP TARGET SP HTTP/1.1.")
    head = Head(method, parts[1], headers, version, peer_ip, keep_alive)
    host: bytes | None = None
    lengths = 0
    for name, value in headers:
        if name not in _FRAMING:
            continue
        value = value.rstrip(b" \t")
        if name == b"host":
            if host is not None:
                raise BadFraming("The request has more than one Host header.")
            host = value
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
    if lengths > 1:
        raise BadFraming("The length of the body is given more than once.")
    if host is None:
        if version == "1.1":
            raise BadFraming("An HTTP/1.1 request needs a Host header.")
    elif _HOST.fullmatch(host) is None:
        raise BadFraming("The Host header is not HOST or HOST:PORT.")
    if head.target[0] != 0x2F or b"#" in head.target:
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


CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
CLOSE: Final = b"connection: close\r\n"
KEEP_ALIVE: Final = b"connection: keep-alive\r\n"
CHUNKED: Final = b"transfer-encoding: chunked\r\n"

# Always HTTP/1.1: it is our version, not the client's.
_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") for status in HTTPStatus
}
_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Names found to be tokens once are not looked at again. Bounded, because engines choose names too.
_known_names: set[bytes] = set()
_KNOWN_NAMES_MAX: Final = 512


def render_head(status: int, headers: Headers, framing: bytes, date: bytes) -> bytes:
    """The whole head; `framing` and `date` are finished lines. Raises GatewayBug for a header that breaks its line."""
    block = b"".join([b"%b: %b\r\n" % header for header in headers])
    # One look at all lines instead of one at each value: without our own line ends there must be none left.
    if len(block.translate(None, b"\r\n\0")) + 2 * len(headers) != len(block):
        raise GatewayBug("A response header holds a line break or NUL.")
    for name, _ in headers:
        if name not in _known_names:
            _learn_name(name)
    return b"%b%b%b%b\r\n" % (_STATUS_LINES.get(status) or _odd_status_line(status), block, framing, date)


def _odd_status_line(status: int) -> bytes:
    if not 100 <= status <= 999:
        raise GatewayBug(f"{status} is not an HTTP status.")
    return b"HTTP/1.1 %d Unknown\r\n" % status


def date_line(now: float) -> bytes:
    return f"date: {formatdate(now, usegmt=True)}\r\n".encode("ascii")


def _learn_name(name: bytes) -> None:
    if _NAME.fullmatch(name) is None:
        raise GatewayBug(f"{name!r} is not a header name.")
    if len(_known_names) < _KNOWN_NAMES_MAX:
        _known_names.add(name)
