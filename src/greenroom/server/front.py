"""The front door: who may come in, how much they may bring, and who answers them.

Owns the order of checks. Everything is decided on the raw path that is then routed by, so that no other spelling of a
path can reach what it was not authorised for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from urllib.parse import unquote_to_bytes

from greenroom.errors import BadRequest, GreenroomError, NotAllowed
from greenroom.http.edge import Exchange, Head
from greenroom.http.head import Headers
from greenroom.http.hosts import HostRule
from greenroom.server import cors, render
from greenroom.server.asgi import AsgiBridge
from greenroom.server.inference.ids import MODEL_ROUTES, UPSTREAM, UPSTREAM_PREFIX
from greenroom.server.inference.requests import Inference
from greenroom.server.inference.settings import Settings
from greenroom.tenancy.keys import ANYONE, Caller, Keys, Permission, presented_key

# Answered to anyone: load balancers and orchestrators ask it and hold no key.
OPEN_PATHS: Final = frozenset({b"/health"})
# What a browser says of a page of our own, and of an address that a person has typed or kept.
OWN_SITES: Final = (b"same-origin", b"none")
GUARDED: Final = frozenset((b"host", b"origin", b"sec-fetch-site", b"referer"))
READING: Final = (b"GET", b"HEAD")
# The management API takes small JSON only.
MANAGEMENT_BODY_MAX: Final = 1024 * 1024


class FrontDoor:
    def __init__(
        self,
        inference: Inference,
        management: AsgiBridge,
        needs: Callable[[Head, bytes], Permission],
        settings: Callable[[], Settings],
    ) -> None:
        """`needs` says what the management API wants of who asks for this path."""
        self._inference = inference
        self._management = management
        self._needs = needs
        self._settings = settings
        self.keys = Keys(())
        self.hosts = HostRule()

    def admit(self, head: Head) -> int:
        """At the end of the headers: how large the body may be. Raises the error to answer with."""
        said = head.get_all(GUARDED)
        origin = said.get(b"origin")
        self.hosts.check(said.get(b"host"), origin)
        if origin is None:
            if not self.keys.enabled:
                # Where there are keys, no page knows one.
                self._check_page(head, said)
        else:
            head.answer_headers = cors.answer_headers(origin)
            if cors.is_preflight(head):
                return 0
        self._authorise(head)
        route = MODEL_ROUTES.get(head.path)
        settings = self._settings()
        if route is not None:
            return settings.upload_max if route.is_multipart else settings.body_max
        if head.path.startswith(UPSTREAM_PREFIX):
            return settings.upload_max
        return MANAGEMENT_BODY_MAX

    def handle(self, exchange: Exchange) -> None:
        head = exchange.head
        if head.answer_headers is not None and cors.is_preflight(head):
            exchange.respond(204, cors.preflight_headers(head), b"")
            return
        route = MODEL_ROUTES.get(head.path)
        if route is not None:
            self._inference.handle(exchange, route, _caller(head))
        elif head.path.startswith(UPSTREAM_PREFIX):
            self._inference.handle(exchange, UPSTREAM, _caller(head))
        else:
            caller = head.note if isinstance(head.note, Caller) else None
            is_admin = caller is not None and caller.admin
            request_id = self._inference.next_id()
            self._management.handle(exchange, routed_path(head), request_id, is_admin=is_admin, caller=caller)

    def refuse(self, exchange: Exchange | None, head: Head | None, error: GreenroomError) -> tuple[int, Headers, bytes]:
        """What the edge answers itself: to a caller without a key, to a request that is none, to one too many."""
        self._inference.refused(error)
        return render.response(error, self._inference.next_id(), to_operator=False)

    def _check_page(self, head: Head, said: dict[bytes, bytes]) -> None:
        """No page of another origin may load, change or hold anything by an image, a frame or a form, which name none.

        Browsers say for whom they ask in Sec-Fetch-Site; programs do not. Those too old for it say at most Referer.
        """
        site, referer = said.get(b"sec-fetch-site"), said.get(b"referer")
        if site in OWN_SITES or (site is None and referer is None):
            return
        asks_model = head.path in MODEL_ROUTES or head.path.startswith(UPSTREAM_PREFIX)
        only_reads = not asks_model and head.method in READING
        if site is not None:
            # What only reads may be linked to: the person sees it, the other page does not.
            if not (only_reads and head.get(b"sec-fetch-dest") == b"document"):
                self.hosts.refuse_page()
        elif referer is not None and not only_reads:
            self.hosts.check_referer(said.get(b"host"), referer)

    def _authorise(self, head: Head) -> None:
        if not self.keys.enabled:
            head.note = ANYONE
            return
        if head.path in OPEN_PATHS:
            return
        head.note = caller = self.keys.check(presented_key(head.get))
        if head.path in MODEL_ROUTES or caller.admin:
            return
        if head.path.startswith(UPSTREAM_PREFIX):
            self._inference.check_open(head, caller)
            if head.upgrade is not None and head.upgrade.lower() != b"websocket":
                # HTTP/2 (h2c) would reach every path of the engine. A server need not take up what it is offered.
                head.upgrade = None
            return
        needed = self._needs(head, routed_path(head))
        if not caller.may(needed):
            raise _not_allowed(caller, needed)


def _not_allowed(caller: Caller, needed: Permission) -> NotAllowed:
    if needed is Permission.LEASE:
        return NotAllowed(f"The key {caller.name} may not take leases. Use a key with `leases: true` or `admin: true`.")
    return NotAllowed(f"The key {caller.name} may ask models, not manage them. Use a key with `admin: true`.")


def _caller(head: Head) -> Caller:
    """Who was admitted."""
    assert isinstance(head.note, Caller), "every path to a model is authorised"
    return head.note


def routed_path(head: Head) -> bytes:
    """The path the management API routes by: decoded once, here, for the check and for the routing alike."""
    path = unquote_to_bytes(head.path)
    if b"\0" in path:
        raise BadRequest("The path holds a NUL.")
    return path
