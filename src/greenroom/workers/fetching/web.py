"""Requests to the hub and to wherever it sends us.

Owns what a request may reach. The token goes to the hub's own scheme, host and port, and nowhere else. A redirect is
followed over https only (http if the hub itself is http), and to a private address only if the hub itself has one, or
if the operator has listed that very host. A name is looked up once and its addresses are checked before one of them is
connected to.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

from .failures import FetchError

REDIRECTS_MAX: Final = 5
RETRY_AFTER_MAX_S: Final = 300.0
# Of a number of bytes.
DIGITS_MAX: Final = 18
# A host that does not even take a connection by then is tried again, or not at all.
CONNECT_MAX_S: Final = 10.0
USER_AGENT: Final = "greenroom"
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_PASSING: Final = (408, 425, 429, 500, 502, 503, 504)
_PORTS: Final = {"http": 80, "https": 443}
# IPv6 addresses that stand for an IPv4 address behind a translator.
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


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
        with explained():
            while piece := self.response.read1(size):
                yield piece


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
        self._hub_is_private: bool | None = None
        self._context: ssl.SSLContext | None = None

    @contextlib.contextmanager
    def get(self, url: str, start: int = 0, etag: str | None = None) -> Iterator[HubAnswer]:
        """The bytes from `start` on, or all if the server cannot do that or has another file than `etag`.

        Raises FetchError.
        """
        with contextlib.ExitStack() as opened:
            for _ in range(REDIRECTS_MAX + 1):
                response = self._ask(opened, url, start, etag)
                if response.status not in _REDIRECTS:
                    yield _answer(response, url, start)
                    return
                url = redirected(url, response.headers.get("location"), self.hub)
            raise FetchError("redirect_refused", f"{_host(url)} redirects more than {REDIRECTS_MAX} times.")

    def _ask(self, opened: contextlib.ExitStack, url: str, start: int, etag: str | None) -> http.client.HTTPResponse:
        origin, parts = HubOrigin.of(url), urlsplit(url)
        headers = {"User-Agent": USER_AGENT, "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
        if start:
            headers["Range"] = f"bytes={start}-"
            if etag is not None:
                headers["If-Range"] = etag
        if self._token is not None and origin == self.hub:
            headers["Authorization"] = f"Bearer {self._token}"
        with explained():
            connection = opened.enter_context(contextlib.closing(self._connected(origin)))
            connection.request("GET", _target(parts), headers=headers)
            return connection.getresponse()

    # --- connecting ---------------------------------------------------------------------------------------------------

    def _connected(self, origin: HubOrigin) -> http.client.HTTPConnection:
        proxy = _proxy(origin)
        if proxy is not None:
            return self._through(proxy, origin)
        connection = self._connection(origin.scheme, origin.host, origin.port)
        plain = self._socket(origin)
        try:
            connection.sock = (
                self._tls().wrap_socket(plain, server_hostname=origin.host) if origin.scheme == "https" else plain
            )
        except BaseException:
            plain.close()
            raise
        return connection

    def _through(self, proxy: SplitResult, origin: HubOrigin) -> http.client.HTTPConnection:
        """The proxy looks names up: only addresses that are written as such can be checked here."""
        with contextlib.suppress(ValueError):
            self._expect_public(origin, [str(ipaddress.ip_address(origin.host))])
        connection = self._connection("https", proxy.hostname or "", proxy.port or 80)
        connection.set_tunnel(origin.host, origin.port)
        return connection

    def _connection(self, scheme: str, host: str, port: int) -> http.client.HTTPConnection:
        if scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=self._stall_s, context=self._tls())
        return http.client.HTTPConnection(host, port, timeout=self._stall_s)

    def _expect_public(self, origin: HubOrigin, addresses: list[str]) -> None:
        if origin in (self.hub, self._listed) or all(map(is_public, addresses)):
            return
        if self._hub_is_private is None:
            self._hub_is_private = not all(map(is_public, self._network.look_up(self.hub.host, self.hub.port)))
        if not self._hub_is_private:
            raise FetchError("address_refused", f"{origin.host} has a private address: nothing is fetched from there.")

    def _socket(self, origin: HubOrigin) -> socket.socket:
        addresses = self._network.look_up(origin.host, origin.port)
        self._expect_public(origin, addresses)
        for number, address in enumerate(addresses, 1):
            try:
                return self._network.connect(address, origin.port, self._stall_s)
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


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what a connection raises into FetchError."""
    try:
        yield
    except TimeoutError:
        raise FetchError("stalled", "The server sent nothing for too long.", passes=True) from None
    except ssl.SSLCertVerificationError as error:
        raise FetchError("hub_unreachable", f"The certificate cannot be trusted: {error.verify_message}.") from None
    except (OSError, http.client.HTTPException) as error:
        said = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        raise FetchError("hub_unreachable", f"The connection failed: {said}.", passes=True) from None


def redirected(url: str, location: str | None, hub: HubOrigin) -> str:
    """The address that an answer of `url` sends us to. Raises FetchError if it may not be followed."""
    if not location or not location.isascii() or not location.isprintable():
        raise FetchError("redirect_refused", f"{_host(url)} redirects to no address.")
    target = urljoin(url, location)
    if HubOrigin.of(target).scheme != "https" and hub.scheme != "http":
        raise FetchError("redirect_refused", f"{_host(url)} redirects to {_host(target)} without https.")
    return target


def is_public(address: str) -> bool:
    """True for an address of the open internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            ip = inner
    return ip.is_global and not ip.is_multicast


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


def _answer(response: http.client.HTTPResponse, url: str, start: int) -> HubAnswer:
    if response.status not in (200, 206):
        raise refusal(response.status, response.headers, _host(url))
    headers = response.headers
    name = urlsplit(url).path.lower()
    if headers.get_content_type() == "text/html" and not name.endswith((".html", ".htm")):
        raise FetchError("not_the_file", f"{_host(url)} sends a web page instead of the file.", passes=True)
    if headers.get("content-encoding", "identity") != "identity":
        raise FetchError("not_the_file", f"{_host(url)} sends the file encoded.", passes=True)
    if response.status == 200:
        return HubAnswer(response, 0, _count(headers.get("content-length", "")), headers.get("etag"))
    return HubAnswer(response, start, _range_total(headers.get("content-range", ""), start), headers.get("etag"))


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
    except (ValueError, TypeError):
        return None
