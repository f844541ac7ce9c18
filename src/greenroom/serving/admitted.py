"""What is known of a request at the end of its headers: its route, its caller, and what it tells the gateway.

Owns the headers by which callers tell the gateway something: their names, and how each is read. These are never
forwarded; a value that cannot be is answered with BadRequest.
"""

from __future__ import annotations

from typing import Final

from greenroom.access.keys import Caller, Permission, Tenants, parse_priority
from greenroom.access.limits import QuotaHold
from greenroom.config.schema import Heartbeat
from greenroom.core.model import NO_TENANT, TenantId
from greenroom.dialects.dialect import Route
from greenroom.errors import BadRequest
from greenroom.serving.body import peek

TENANT_HEADER: Final = b"x-tenant-id"
CLIENT_HEADER: Final = b"x-client-id"
PREFER: Final = b"prefer"
# The headers that are for the gateway; one pass over a request's headers finds them.
OUR_HEADERS: Final = frozenset(
    (
        *(b"x-priority", TENANT_HEADER, CLIENT_HEADER, b"x-heartbeat", b"x-request-timeout-s"),
        *(b"x-cache-mode", b"x-cache-tag", b"x-facts"),
    )
)
CLIENT_CHARS_MAX: Final = 128
_HEARTBEATS: Final = {kind.value.encode(): kind for kind in Heartbeat}


class Admitted:
    """A request whose headers were checked, kept as the note of its head. `route` is None if it asks no model itself.

    `given` are the headers for the gateway. `tenant` is the one that it is counted for: none if it names one that
    cannot be, as `bad_tenant` says. `client` is the one that its header names; `hold` what it was counted against.
    `has_preference`: it has the header Prefer.
    """

    __slots__ = ("bad_tenant", "caller", "client", "given", "has_preference", "hold", "route", "tenant")

    def __init__(
        self,
        route: Route | None,
        caller: Caller,
        given: dict[bytes, bytes],
        tenant: TenantId,
        has_preference: bool,
        bad_tenant: BadRequest | None = None,
        hold: QuotaHold | None = None,
    ) -> None:
        self.route = route
        self.caller = caller
        self.given = given
        self.tenant = tenant
        self.has_preference = has_preference
        self.bad_tenant = bad_tenant
        self.client = given[CLIENT_HEADER].decode("latin-1")[:CLIENT_CHARS_MAX] if CLIENT_HEADER in given else ""
        self.hold = hold

    @staticmethod
    def of(said: dict[bytes, bytes], route: Route | None, caller: Caller, tenants: Tenants) -> Admitted:
        """`said` has at least those of OUR_HEADERS that there are."""
        given = {name: value for name, value in said.items() if name in OUR_HEADERS}
        has_preference = PREFER in said
        try:
            tenant = caller.tenant or tenants.name(given.get(TENANT_HEADER))
        except BadRequest as error:
            return Admitted(route, caller, given, NO_TENANT, has_preference, error)
        return Admitted(route, caller, given, tenant, has_preference)

    def counted(self, hold: QuotaHold | None) -> Admitted:
        """The same request, counted against these quotas."""
        return Admitted(self.route, self.caller, self.given, self.tenant, self.has_preference, self.bad_tenant, hold)

    @property
    def named_tenant(self) -> bytes | None:
        """The tenant that its header names. The edge refuses a request that names two."""
        return self.given.get(TENANT_HEADER)

    @property
    def to_operator(self) -> bool:
        """The caller is shown all of an error."""
        return self.caller.may(Permission.READ)

    def priority(self, in_body: str | int | None) -> int | None:
        """The priority that a request names in its body, else by its header; None if it names none."""
        if in_body is not None:
            return parse_priority(in_body)
        raw = self.given.get(b"x-priority")
        return None if raw is None else parse_priority(raw, param="X-Priority")

    def heartbeat(self, default: Heartbeat) -> Heartbeat:
        raw = self.given.get(b"x-heartbeat")
        if raw is None:
            return default
        if raw not in _HEARTBEATS:
            raise BadRequest("X-Heartbeat is comment, chunk or off.", param="X-Heartbeat")
        return _HEARTBEATS[raw]

    def budget_s(self) -> float | None:
        """How long the whole answer may take."""
        raw = self.given.get(b"x-request-timeout-s")
        return None if raw is None else peek.read_budget_s(raw.decode("latin-1"), param="X-Request-Timeout-S")

    def wants_facts(self) -> bool:
        """A comment at the end of its stream tells what only the end knows."""
        raw = self.given.get(b"x-facts")
        if raw not in (None, b"comment", b"off"):
            raise BadRequest("X-Facts is comment or off.", param="X-Facts")
        return raw == b"comment"
