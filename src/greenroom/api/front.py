"""The front door: which requests are admitted, how large their bodies may be, and which part answers them.

Owns the order of checks, the guard against DNS rebinding, and the CORS headers. Everything is decided on the path
that is then routed: raw for models, decoded for the management API. So no other spelling of a path reaches what it was
not authorised for, or goes uncounted.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final, Protocol
from urllib.parse import unquote_to_bytes

from greenroom.access.keys import ANYONE, BY_TOKENS, Caller, Keys, Permission, presented_key
from greenroom.access.limits import Limiter
from greenroom.api.asgi import JOBS_PATH, MANAGEMENT_BODY_MAX, AsgiBridge
from greenroom.api.management import Management
from greenroom.api.ui import files as ui
from greenroom.dialects.dialect import Route
from greenroom.dialects.openai import OPENAI
from greenroom.errors import BadRequest, GreenroomError, HostNotAllowed, NotAllowed, NotFound
from greenroom.http.exchange import Exchange
from greenroom.http.headers import Headers
from greenroom.http.request import Head
from greenroom.serving import render
from greenroom.serving.admitted import OUR_HEADERS, PREFER, Admitted
from greenroom.serving.requests import Inference
from greenroom.serving.routes import (
    MODEL_ROUTES,
    UPSTREAM,
    UPSTREAM_PREFIX,
    dialect_of,
    expect_route,
    has_one_path,
)

# Open without a key, for load balancers and orchestrators.
OPEN_PATHS: Final = frozenset((b"/health", b"/healthz", b"/readyz"))
# Sec-Fetch-Site of our own pages, and of an address that was typed or bookmarked.
OWN_SITES: Final = (b"same-origin", b"none")
# Headers that are looked at before the body; one pass finds them.
_READ: Final = OUR_HEADERS | {b"host", b"origin", b"sec-fetch-site", b"referer", b"authorization", b"x-api-key", PREFER}
READING: Final = (b"GET", b"HEAD")
METRICS_PATH: Final = b"/metrics"


_PICTURE: Final = re.compile(rb"/v1/images/img-[0-9a-f]{32}")
_QUOTED: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')


class Answering(Protocol):
    """Answers requests to models in a way of its own."""

    def handle(self, exchange: Exchange, admitted: Admitted, route: Route) -> None: ...


class Door:
    """`jobs` takes the requests whose callers prefer the answer later; without it they are answered like all others."""

    def __init__(
        self, inference: Inference, bridge: AsgiBridge, management: Management, jobs: Answering | None = None
    ) -> None:
        self._inference = inference
        self._bridge = bridge
        self._management = management
        self._jobs = jobs
        self.keys = Keys(())
        self.hosts = HostRule()
        # Whether the dashboard is served (server.ui).
        self.serves_ui = False
        # None while nothing is limited.
        self.limiter: Limiter | None = None

    def admit(self, head: Head) -> int:
        """At the end of the headers: how large the body may be. Raises the error to answer with."""
        said = head.get_all(_READ)
        origin = said.get(b"origin")
        self.hosts.check(said.get(b"host"), origin)
        if origin is None:
            if not self.keys.enabled:
                # Where there are keys, a page of another site has none.
                self._check_page(head, said)
        else:
            head.add_to_answer(cors_headers(origin))
            if is_preflight(head):
                return 0
        route = _route_of(head)
        admitted = self._authorise(head, route, said)
        is_job = route is None and head.method == b"POST" and routed_path(head) == JOBS_PATH
        if admitted is not None and (route is not None or is_job):
            self._inference.check_cooldown(admitted)
            if self.limiter is not None:
                is_later = is_job or (PREFER in said and self._jobs is not None and prefers_later(head))
                self._count(self.limiter, head, admitted, is_job=is_later)
        settings = self._inference.settings
        if route is not None:
            return settings.upload_max if route.form or route is UPSTREAM else settings.body_max
        # A job's request is inside of the body.
        return settings.body_max if is_job else MANAGEMENT_BODY_MAX

    def admit_to_metrics(self, head: Head) -> int:
        """At the second port: metrics and health checks by the same rules, without a body. Raises NotFound for others,
        or what `admit` raises."""
        if head.method not in READING or not (head.path == METRICS_PATH or head.path in OPEN_PATHS):
            raise NotFound("This port serves GET of /metrics, /health, /healthz and /readyz alone.")
        self.admit(head)
        return 0

    def handle(self, exchange: Exchange) -> None:
        head = exchange.head
        admitted = head.note if isinstance(head.note, Admitted) else None
        if admitted is None and is_preflight(head):
            exchange.respond(204, preflight_headers(head), b"")
        elif admitted is not None and admitted.route is not None:
            if admitted.has_preference and self._jobs is not None and prefers_later(head):
                self._jobs.handle(exchange, admitted, admitted.route)
            else:
                self._inference.handle(exchange, admitted, admitted.route)
        elif self._is_ui(head):
            ui.respond(exchange)
        else:
            is_admin, caller = admitted is not None and admitted.to_operator, None
            if admitted is not None:
                caller = admitted.caller if is_admin else self._inference.narrowed(admitted)
            request_id = self._inference.ids.next()
            self._bridge.handle(exchange, routed_path(head), request_id, is_admin=is_admin, caller=caller)

    def refuse(self, exchange: Exchange | None, head: Head | None, error: GreenroomError) -> tuple[int, Headers, bytes]:
        """Render an error that the edge answers itself: no valid key, a malformed request, too many connections."""
        self._inference.refused(error)
        if head is not None and isinstance(head.note, Admitted) and _asks_model(head, head.note):
            self._inference.count_refused(error, head.note)
        dialect = OPENAI if head is None else dialect_of(head.path)
        return render.response(error, self._inference.ids.next(), to_operator=False, dialect=dialect)

    def _count(self, limiter: Limiter, head: Head, admitted: Admitted, *, is_job: bool) -> None:
        """Count a request for its tenant and key, before its body is read. Raises RateLimited."""
        hold = limiter.admit(admitted.caller, admitted.named_tenant, is_job=is_job)
        if hold is not None:
            head.note = admitted.counted(hold)
            head.answer_lines = hold.answer_lines

    def _is_ui(self, head: Head) -> bool:
        return self.serves_ui and head.method in READING and ui.serves(head)

    def _check_page(self, head: Head, said: dict[bytes, bytes]) -> None:
        """Refuse requests that a page of another site makes by an image, a frame or a form, which send no Origin.

        Browsers send Sec-Fetch-Site, programs do not. Browsers too old for it send at most Referer.
        """
        site, referer = said.get(b"sec-fetch-site"), said.get(b"referer")
        if site in OWN_SITES or (site is None and referer is None) or is_picture(head.path):
            return
        asks_model = head.path in MODEL_ROUTES or head.path.startswith(UPSTREAM_PREFIX)
        only_reads = not asks_model and head.method in READING and not self._management.acts(head, routed_path(head))
        if site is not None:
            # Links to pages that only read are allowed: the user sees the answer, the other page does not.
            if not (only_reads and head.get(b"sec-fetch-dest") == b"document"):
                self.hosts.refuse_page()
        elif referer is not None and not only_reads:
            self.hosts.check_referer(said.get(b"host"), referer)

    def _authorise(self, head: Head, route: Route | None, said: dict[bytes, bytes]) -> Admitted | None:
        """Note whose request it is. None where that is not asked, on open paths. Raises the error to answer with."""
        is_open = route is None and (head.path in OPEN_PATHS or is_picture(head.path) or self._is_ui(head))
        if is_open and self.keys.enabled:
            return None
        caller = self.keys.check(presented_key(said.get(b"authorization"), said.get(b"x-api-key")))
        head.note = admitted = self._inference.admitted(said, route, caller)
        if is_open or caller is ANYONE:
            return admitted
        if caller.routes is not None:
            expect_route(caller, head.path if route is not None else routed_path(head))
        if route is UPSTREAM and not caller.admin:
            self._inference.check_open(head, admitted)
            if not has_one_path(head.upgrade):
                # A server may ignore an offered upgrade.
                head.upgrade = None
        elif route is None and not caller.admin:
            needed = self._management.needs(head, routed_path(head))
            if not caller.may(needed):
                raise _not_allowed(caller, needed)
        return admitted


def prefers_later(head: Head) -> bool:
    """True if the caller prefers a job (Prefer: respond-async). An upgrade cannot be answered later."""
    if head.get(PREFER) is None or head.upgrade is not None:
        return False
    said = b",".join(value for name, value in head.headers if name == PREFER)
    preferences = _QUOTED.sub(b"", said).lower().split(b",")
    # `name; parameter`, where commas in quotes part nothing.
    return any(one.partition(b";")[0].strip() == b"respond-async" for one in preferences)


def is_picture(path: bytes) -> bool:
    """True for the address of a picture, which is itself the permission to see it: for any page, without a key."""
    return _PICTURE.fullmatch(path) is not None


def _not_allowed(caller: Caller, needed: Permission) -> NotAllowed:
    if caller is BY_TOKENS:
        return NotAllowed(
            "Without a key this server answers models and signed operations alone. Give it server.api_keys."
        )
    if needed is Permission.LEASE:
        return NotAllowed(f"The key {caller.name} may not take leases. Use a key with `leases: true` or `admin: true`.")
    verb = "" if needed is Permission.MANAGE else f"`verbs: [{needed.value}]` or "
    return NotAllowed(f"The key {caller.name} may ask models, but not do this. Use a key with {verb}`admin: true`.")


def _route_of(head: Head) -> Route | None:
    """The route of a request to a model; None for all others."""
    route = MODEL_ROUTES.get(head.path)
    return UPSTREAM if route is None and head.path.startswith(UPSTREAM_PREFIX) else route


def _asks_model(head: Head, admitted: Admitted) -> bool:
    """True for requests to models, now or as a job."""
    if admitted.route is not None:
        return True
    return head.method == b"POST" and unquote_to_bytes(head.path) == JOBS_PATH


def routed_path(head: Head) -> bytes:
    """The path that the management API routes: decoded once, for the check and for the routing."""
    path = unquote_to_bytes(head.path)
    if b"\0" in path:
        raise BadRequest("The path holds a NUL.")
    return path


ANY: Final = "*"
_PORTS: Final = {"https": 443, "http": 80}
_LOOPBACK_NAMES: Final = frozenset(("localhost", "ip6-localhost", "ip6-loopback"))
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%-]+)(?::([0-9]{1,5}))?")
# Pairs that were found allowed are remembered. Bounded, because clients choose them.
_REMEMBERED_MAX: Final = 256


class HostRule:
    """Allows the hosts loopback, the addresses we listen on and the names given; any port. `*` allows everything.

    Pages may call that come from the very host and port that they call, and those of the origins given. Other ports
    of loopback may be pages of other users of the machine. `public_url` adds its host and its origin: a proxy in front
    may send the gateway's own address as Host.
    When we listen on every address (0.0.0.0 or ::) any literal address is allowed: rebinding needs a name. So is a name
    without a dot, such as a container's: in public DNS there is none. But a page's own name must be one of those given.
    """

    __slots__ = ("_any_host", "_any_origin", "_everywhere", "_hosts", "_origins", "_remembered")

    def __init__(
        self, hosts: Iterable[str] = (), origins: Iterable[str] = (), *, public_url: str | None = None
    ) -> None:
        names = {host.strip().lower() for host in hosts}
        if public_url is not None:
            scheme, _, rest = public_url.partition("://")
            authority = rest.partition("/")[0]
            names.add(_host_name(authority.encode()))
            origins = [*origins, f"{scheme}://{authority}"]
        self._any_host = ANY in names
        self._hosts = frozenset(_canonical(name) for name in names if name != ANY)
        self._everywhere = bool(self._hosts & {"0.0.0.0", "::"})
        self._origins = frozenset(_canonical_origin(origin.strip()) for origin in origins)
        self._any_origin = ANY in self._origins
        self._remembered: set[tuple[bytes | None, bytes | None]] = set()

    def check(self, host: bytes | None, origin: bytes | None) -> None:
        """Raises HostNotAllowed. A request without a Host (HTTP/1.0) comes from no browser and is allowed."""
        pair = (host, origin)
        if pair in self._remembered:
            return
        name = _host_name(host)
        if host is not None and not self._allows_host(name):
            raise HostNotAllowed(
                f"This server does not answer for the host {_shown(host)}. "
                "Add it to server.allowed_hosts (ALLOWED_HOSTS) if it should."
            )
        if origin is not None and not self._allows_origin(origin, host):
            raise HostNotAllowed(
                f"Pages from {_shown(origin)} may not call this server. Add it to server.allowed_origins if they may."
            )
        if len(self._remembered) < _REMEMBERED_MAX:
            self._remembered.add(pair)

    def refuse_page(self) -> None:
        """Refuse a page of another site that sends no Origin. Raises HostNotAllowed unless every origin is allowed."""
        if not self._any_origin:
            raise HostNotAllowed(
                "Pages of other sites may not have a browser ask this server. If one may, add its origin to "
                "server.allowed_origins and let it ask with CORS: fetch, or the attribute crossorigin."
            )

    def check_referer(self, host: bytes | None, referer: bytes) -> None:
        """Check the page by its Referer, for browsers that send no Sec-Fetch-Site. Raises HostNotAllowed."""
        scheme, _, rest = referer.partition(b"://")
        if not self._allows_origin(scheme + b"://" + rest.partition(b"/")[0], host):
            self.refuse_page()

    def _allows_host(self, name: str) -> bool:
        return self._names(name) or (self._everywhere and name != "" and "." not in name)

    def _names(self, name: str) -> bool:
        """True if a page of this name is our own."""
        if self._any_host or name in self._hosts or _is_loopback(name):
            return True
        return self._everywhere and _is_address(name)

    def _allows_origin(self, origin: bytes, host: bytes | None) -> bool:
        text = _canonical_origin(origin.decode("latin-1"))
        if self._any_origin or text in self._origins:
            return True
        scheme, _, authority = text.partition("://")
        if host is None or scheme not in _PORTS or not self._names(_host_name(host)):
            return False
        # A proxy may have taken https from it: the scheme tells only which port is left out.
        page, port = authority.encode("latin-1"), _PORTS[scheme]
        return _host_name(page) != "" and _place(page, port) == _place(host, port)


def _canonical_origin(origin: str) -> str:
    """Lower case, without a last slash, and without the port that its scheme has anyway: browsers leave that out."""
    text = origin.lower().rstrip("/")
    for scheme, port in _PORTS.items():
        if text.startswith(f"{scheme}://"):
            return text.removesuffix(f":{port}")
    return text


def _host_name(host: bytes | None) -> str:
    """The name or address of HOST or HOST:PORT in its canonical form; empty if it is neither."""
    match = _HOST.fullmatch((host or b"").decode("latin-1"))
    return _canonical(match.group(1).lower()) if match else ""


def _place(host: bytes, default_port: int) -> tuple[str, int]:
    """The name and port of HOST or HOST:PORT."""
    match = _HOST.fullmatch(host.decode("latin-1"))
    return _host_name(host), int((match and match.group(2)) or default_port)


def _canonical(name: str) -> str:
    bare = name.removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return bare.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    if name in _LOOPBACK_NAMES or name.endswith(".localhost"):
        return True
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def _shown(value: bytes) -> str:
    return value[:100].decode("ascii", "backslashreplace")


# Headers of an answer that a page may read.
EXPOSED: Final = (
    b"x-request-id, x-model, x-model-version, x-model-repo-id, x-queue-wait-ms, "
    b"x-cache-hit, x-cache-tokens-reused, x-gpu-time-ms, retry-after, x-should-retry, "
    b"x-ratelimit-limit, x-ratelimit-remaining, x-ratelimit-reset"
)
# How long browsers may remember a preflight.
REMEMBER_S: Final = 600


def cors_headers(origin: bytes) -> Headers:
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", EXPOSED),
        (b"vary", b"origin"),
    ]


def is_preflight(head: Head) -> bool:
    """True for a browser's CORS preflight, which carries no credentials."""
    if head.method != b"OPTIONS" or head.get(b"origin") is None:
        return False
    return head.get(b"access-control-request-method") is not None


def preflight_headers(head: Head) -> Headers:
    """Allow whatever the page asks for: the request itself is checked like every other."""
    headers: Headers = [
        (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE"),
        (b"access-control-max-age", b"%d" % REMEMBER_S),
    ]
    if wanted := head.get(b"access-control-request-headers"):
        headers.append((b"access-control-allow-headers", wanted))
    if head.get(b"access-control-request-private-network") == b"true":
        # For browsers that protect private addresses from pages of the internet. This page's origin is allowed.
        headers.append((b"access-control-allow-private-network", b"true"))
    return headers
