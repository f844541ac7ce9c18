"""Requests to the hub and to wherever it sends us.

Owns what a request may reach, and how long it may take. The token goes to the hub's own scheme, host and port, and
nowhere else. A redirect is followed over https only (http if the hub itself is http), to a private address only if the
hub itself has one, to this machine or its link only if the hub is there, and to a host that the operator has listed. A
name is looked up once and its addresses are checked before one of them is connected to. A server that sends little by
little is as silent as one that sends nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import ipaddress
import socket
import ssl
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from time import monotonic, time
from typing import Any, Final
from urllib.parse import SplitResult, urljoin, urlsplit

from .failures import FetchError

REDIRECTS_MAX: Final = 5
RETRY_AFTER_MAX_S: Final = 300.0
# Of a number of bytes.
DIGITS_MAX: Final = 18
# A host that does not even take a connection by then is tried again, or not at all.
CONNECT_MAX_S: Final = 10.0
# What must come in the time that silence is borne. An attempt that brings less has brought nothing.
PROGRESS_BYTES: Final = 16 * 1024
USER_AGENT: Final = "greenroom"
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_PASSING: Final = (408, 425, 429, 500, 502, 503, 504)
_PORTS: Final = {"http": 80, "https": 443}
# IPv6 addresses that end with the IPv4 address for which they stand.
_STAND_FOR_IPV4: Final = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")))
# Not of the open internet, whatever the registry says.
_INSIDE: Final = tuple(map(ipaddress.ip_network, ("64:ff9b:1::/48", "fec0::/10", "192.0.0.0/24")))
# Where providers of machines tell them who they are, besides the link's own addresses.
_PROVIDERS: Final = tuple(map(ipaddress.ip_address, ("192.0.0.192", "168.63.129.16", "100.100.100.200")))


class AddressScope(Enum):
    PUBLIC = "public"
    PRIVATE = "private"
    MACHINE = "machine"
    """This machine itself."""
    LINK = "link"
    """Its own link, where its provider tells its secrets."""


@dataclass(frozen=True, slots=True)
class HubOrigin:
    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> HubOrigin:
        """Raises FetchError for anything but http and https."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise FetchError("bad_url", "The address cannot be read.") from None
        if parts.scheme not in _PORTS or not parts.hostname or "@" in parts.netloc:
            raise FetchError("bad_url", "An address is http or https, with a host and without a password.")
        return cls(parts.scheme, parts.hostname.lower(), port or _PORTS[parts.scheme])


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """The answer to a request for bytes, with its body unread."""

    response: http.client.HTTPResponse
    deadline: Deadline
    silence_s: float
    start: int
    total: int | None
    """Bytes of the whole file; None if the server does not say."""
    etag: str | None

    @property
    def is_delimited(self) -> bool:
        """False if nothing but the end of the connection ends the body: a cut looks the same."""
        return self.response.length is not None or self.response.chunked

    def pieces(self, size: int) -> Iterator[bytes]:
        """The body as it comes. Raises FetchError if the connection is cut or silent."""
        came, waited_s = 0, 0.0
        with explained():
            while True:
                # Only reading counts: what is done with a piece may take long.
                self.deadline.renew(self.silence_s - waited_s)
                asked = monotonic()
                if not (piece := self.response.read1(size)):
                    return
                came, waited_s = came + len(piece), waited_s + monotonic() - asked
                if came >= PROGRESS_BYTES:
                    came, waited_s = 0, 0.0
                yield piece


class Deadline:
    """When an exchange must be over."""

    def __init__(self, seconds: float) -> None:
        self.renew(seconds)

    def renew(self, seconds: float) -> None:
        self._at = monotonic() + seconds

    def left_s(self) -> float:
        """Raises TimeoutError if nothing is left."""
        left_s = self._at - monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


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


class Network:
    """Names and connections. Tests have another."""

    def look_up(self, host: str, port: int) -> list[str]:
        """The addresses of a host. Raises OSError."""
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        """Raises OSError."""
        connected = socket.create_connection((address, port), timeout=min(timeout_s, CONNECT_MAX_S))
        connected.settimeout(timeout_s)
        return connected


class Web:
    def __init__(
        self, hub: str, token: str | None, stall_s: float, network: Network | None = None, listed: str | None = None
    ) -> None:
        """`listed` is an address whose host the operator has named: it may be private."""
        self.hub = HubOrigin.of(hub)
        self._listed = None if listed is None else HubOrigin.of(listed)
        self._token = token
        self._stall_s = stall_s
        self._network = network or Network()
        self._reached: frozenset[AddressScope] | None = None
        self._context: ssl.SSLContext | None = None

    @contextlib.contextmanager
    def get(self, url: str, start: int = 0, etag: str | None = None) -> Iterator[HubAnswer]:
        """The bytes from `start` on, or all if the server cannot do that or has another file than `etag`. Raises
        FetchError."""
        deadline = Deadline(self._stall_s)
        ranges = {"Range": f"bytes={start}-", **({} if etag is None else {"If-Range": etag})} if start else {}
        with contextlib.ExitStack() as opened:
            url, response = self._followed(opened, url, ranges, deadline)
            yield _answer(response, url, start, deadline, self._stall_s)

    def whole(self, url: str, bytes_max: int) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Status, headers and body of what the hub itself answers. It all must come in the time that silence is borne.
        Raises FetchError, also for an answer that is larger or encoded."""
        deadline = Deadline(self._stall_s)
        with contextlib.ExitStack() as opened, explained():
            _, response = self._followed(opened, url, {}, deadline, stays=True)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise FetchError("not_the_file", f"{self.hub.host} sends an encoded answer, which was not asked for.")
            body = response.read(bytes_max + 1)
            if len(body) > bytes_max:
                raise FetchError("bad_repo", f"{self.hub.host} answers with more than {bytes_max:,} bytes.")
            if response.length:
                raise http.client.IncompleteRead(body, response.length)
            return response.status, response.headers, body

    def _followed(
        self,
        opened: contextlib.ExitStack,
        url: str,
        headers: Mapping[str, str],
        deadline: Deadline,
        stays: bool = False,
    ) -> tuple[str, http.client.HTTPResponse]:
        """The first answer that is no redirect, and its address. With `stays` only the hub itself is asked."""
        for _ in range(REDIRECTS_MAX + 1):
            response = self._ask(opened, url, headers, deadline)
            if response.status not in _REDIRECTS:
                return url, response
            url = redirected(url, response.headers.get("location"), self.hub)
            if stays and HubOrigin.of(url) != self.hub:
                why = f"{self.hub.host} redirects a question about the repository elsewhere."
                raise FetchError("redirect_refused", why)
        raise FetchError("redirect_refused", f"{_host(url)} redirects more than {REDIRECTS_MAX} times.")

    def _ask(
        self, opened: contextlib.ExitStack, url: str, more: Mapping[str, str], deadline: Deadline
    ) -> http.client.HTTPResponse:
        origin, parts = HubOrigin.of(url), urlsplit(url)
        headers = {"User-Agent": USER_AGENT, "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
        if self._token is not None and origin == self.hub:
            headers["Authorization"] = f"Bearer {self._token}"
        with explained():
            connection = opened.enter_context(contextlib.closing(self._connected(origin, deadline)))
            connection.request("GET", _target(parts), headers={**headers, **more})
            return connection.getresponse()

    # --- connecting ---------------------------------------------------------------------------------------------------

    def _connected(self, origin: HubOrigin, deadline: Deadline) -> http.client.HTTPConnection:
        proxy = _proxy(origin)
        if proxy is not None:
            return self._through(proxy, origin, deadline)
        connection = self._connection(origin.scheme, origin.host, origin.port, deadline)
        plain = self._socket(origin, deadline)
        try:
            connection.sock = (
                self._tls().wrap_socket(plain, server_hostname=origin.host) if origin.scheme == "https" else plain
            )
        except BaseException:
            plain.close()
            raise
        return connection

    def _through(self, proxy: SplitResult, origin: HubOrigin, deadline: Deadline) -> http.client.HTTPConnection:
        """The proxy looks names up: only addresses that are written as such can be checked here."""
        with contextlib.suppress(ValueError):
            self._expect_public(origin, [str(ipaddress.ip_address(origin.host))])
        connection = self._connection("https", proxy.hostname or "", proxy.port or 80, deadline)
        connection.set_tunnel(origin.host, origin.port)
        return connection

    def _connection(self, scheme: str, host: str, port: int, deadline: Deadline) -> http.client.HTTPConnection:
        connection = (
            http.client.HTTPSConnection(host, port, timeout=deadline.left_s(), context=self._tls())
            if scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=deadline.left_s())
        )
        connection.response_class = _timed(deadline)
        return connection

    def _expect_public(self, origin: HubOrigin, addresses: list[str]) -> None:
        if origin in (self.hub, self._listed) or all(map(is_public, addresses)):
            return
        if self._reached is None:
            self._reached = _reached_from(map(scope_of, self._network.look_up(self.hub.host, self.hub.port)))
        if not self._reached.issuperset(map(scope_of, addresses)):
            raise FetchError("address_refused", f"{origin.host} has a private address: nothing is fetched from there.")

    def _socket(self, origin: HubOrigin, deadline: Deadline) -> socket.socket:
        addresses = self._network.look_up(origin.host, origin.port)
        self._expect_public(origin, addresses)
        for number, address in enumerate(addresses, 1):
            try:
                return self._network.connect(address, origin.port, deadline.left_s())
            except OSError:
                if number == len(addresses):
                    raise
        raise AssertionError("a name that is found has an address")

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            context = ssl.create_default_context()
            with contextlib.suppress(ImportError):
                # The package that huggingface_hub trusts by: a small container has no certificates of its own.
                import certifi

                context.load_verify_locations(certifi.where())
            self._context = context
        return self._context


def _reached_from(hub: Iterable[AddressScope]) -> frozenset[AddressScope]:
    """Where a hub at these addresses may lead: never deeper inside than it is itself."""
    own = frozenset(hub)
    inside = {AddressScope.PRIVATE} if AddressScope.MACHINE in own else set()
    return own | inside | {AddressScope.PUBLIC}


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what a connection raises into FetchError."""
    try:
        yield
    except TimeoutError:
        raise FetchError("stalled", "The server sent nothing for too long.", passes=True) from None
    except ssl.SSLCertVerificationError as error:
        raise FetchError("hub_unreachable", f"The certificate cannot be trusted: {error.verify_message}.") from None
    except (OSError, UnicodeError, http.client.HTTPException) as error:
        said = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        raise FetchError("hub_unreachable", f"The connection failed: {said}.", passes=True) from None


def redirected(url: str, location: str | None, hub: HubOrigin) -> str:
    """The address that an answer of `url` sends us to. Raises FetchError if it may not be followed."""
    if not location or not location.isascii() or not location.isprintable():
        raise FetchError("redirect_refused", f"{_host(url)} redirects to no address.")
    try:
        target = urljoin(url, location)
    except ValueError:
        raise FetchError("redirect_refused", f"{_host(url)} redirects to no address.") from None
    if HubOrigin.of(target).scheme != "https" and hub.scheme != "http":
        raise FetchError("redirect_refused", f"{_host(url)} redirects to {_host(target)} without https.")
    return target


def is_public(address: str) -> bool:
    """True for an address of the open internet."""
    return scope_of(address) is AddressScope.PUBLIC


def scope_of(address: str) -> AddressScope:
    """Where this address is. One of IPv6 that stands for one of IPv4 is where that is."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and not (ip.is_loopback or ip.is_unspecified):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and any(ip in network for network in _STAND_FOR_IPV4):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        ip = inner or ip
    if ip.is_loopback or ip.is_unspecified:
        return AddressScope.MACHINE
    if ip.is_link_local or ip in _PROVIDERS:
        return AddressScope.LINK
    is_open = ip.is_global and not ip.is_multicast and not any(ip in network for network in _INSIDE)
    return AddressScope.PUBLIC if is_open else AddressScope.PRIVATE


def _proxy(origin: HubOrigin) -> SplitResult | None:
    said = urllib.request.getproxies_environment().get("https") if origin.scheme == "https" else None
    if not said or urllib.request.proxy_bypass(origin.host):
        return None
    return urlsplit(said if "://" in said else f"http://{said}")


def _target(parts: SplitResult) -> str:
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _host(url: str) -> str:
    return urlsplit(url).netloc


# --- answers --------------------------------------------------------------------------------------------------------


def _answer(
    response: http.client.HTTPResponse, url: str, start: int, deadline: Deadline, silence_s: float
) -> HubAnswer:
    if response.status not in (200, 206):
        raise refusal(response.status, response.headers, _host(url))
    headers = response.headers
    name = urlsplit(url).path.lower()
    if headers.get_content_type() == "text/html" and not name.endswith((".html", ".htm")):
        raise FetchError("not_the_file", f"{_host(url)} sends a web page instead of the file.", passes=True)
    if headers.get("content-encoding", "identity") != "identity":
        raise FetchError("not_the_file", f"{_host(url)} sends the file encoded.", passes=True)
    if response.status == 200:
        start, total = 0, _count(headers.get("content-length", ""))
    else:
        total = _range_total(headers.get("content-range", ""), start)
    return HubAnswer(response, deadline, silence_s, start, total, headers.get("etag"))


def _range_total(said: str, start: int) -> int | None:
    """The size of the file, by `bytes 5-9/10`."""
    unit, _, rest = said.partition(" ")
    sent, _, total = rest.partition("/")
    if unit != "bytes" or sent.partition("-")[0] != str(start):
        raise FetchError("wrong_size", "The server sends another part of the file than was asked for.", passes=True)
    return _count(total)


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= DIGITS_MAX else None


def refusal(status: int, headers: http.client.HTTPMessage, host: str) -> FetchError:
    if headers.get("x-error-code") == "GatedRepo":
        return FetchError("gated", f"{host} gives this only to users that its owner has let in; set HF_TOKEN.")
    if status in (401, 403):
        return FetchError("not_authorised", f"{host} does not give this to us ({status}); set HF_TOKEN.")
    if status in (404, 410):
        return FetchError("file_not_found", f"{host} does not have this file ({status}).")
    if status == 416:
        return FetchError("wrong_size", f"{host} has fewer bytes of this file than are here.", passes=True)
    code = "hub_busy" if status == 429 else "hub_error"
    wait_s = retry_after_s(headers.get("retry-after"))
    return FetchError(code, f"{host} answers {status}.", passes=status in _PASSING, retry_after_s=wait_s)


def retry_after_s(said: str | None) -> float | None:
    """Seconds of a Retry-After header, bounded; None if there is none that can be read."""
    if said is None:
        return None
    if said.strip().isdecimal():
        return min(float(said), RETRY_AFTER_MAX_S)
    try:
        return min(max(0.0, parsedate_to_datetime(said).timestamp() - time()), RETRY_AFTER_MAX_S)
    except (ValueError, TypeError, OverflowError):
        return None
