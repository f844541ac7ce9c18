"""What a caller asks for: the model, the priority, the tenant, and the body that the engine is sent.

Owns the reading of `x_*` fields and headers, which are never forwarded, and the settings that requests go by. Raises
the error to answer with.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import quote

import msgspec

from greenroom.config.schema import Ability, Config, Heartbeat
from greenroom.core.events import RequestArrived
from greenroom.core.model import ModelId, RequestId, TenantId
from greenroom.engines.base import UsageSource
from greenroom.errors import BadRequest, GreenroomError, ModelNotFound, NoAbility, NotAllowed, PostOnly
from greenroom.http.body import Body, Payload
from greenroom.http.exchange import Exchange
from greenroom.http.headers import REQUEST_ALLOWED, Headers
from greenroom.http.request import Head
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.server.inference import multipart, peek
from greenroom.server.inference.routes import UPSTREAM_PREFIX, Route, is_open, split_model
from greenroom.tenancy.keys import Caller
from greenroom.tenancy.tenants import Tenants, cap, parse_priority

# The headers that are for the gateway; one pass over a request's headers finds them.
OUR_HEADERS: Final = frozenset(
    (
        *(b"x-priority", b"x-tenant-id", b"x-client-id", b"x-heartbeat", b"x-request-timeout-s"),
        *(b"x-cache-mode", b"x-cache-tag"),
    )
)
_HEARTBEATS: Final = {kind.value.encode(): kind for kind in Heartbeat}
_OFF: Final = Heartbeat.OFF
_IF_ASKED: Final = UsageSource.ASK
CLIENT_CHARS_MAX: Final = 128
_EMPTY: Final[frozenset[str]] = frozenset()

# The fields that an operator sets (encoded) and strips for one revision of a model.
_Rewrites = tuple[Entry, dict[str, bytes], frozenset[str]]


@dataclass(frozen=True, slots=True)
class Settings:
    heartbeat: Heartbeat
    heartbeat_after_s: float
    heartbeat_every_s: float
    wait_max_s: float
    stream_wait_max_s: float
    answer_idle_max_s: float
    forward_headers: frozenset[bytes]
    body_max: int
    upload_max: int
    keep_alive_max_s: float | None

    @classmethod
    def of(cls, config: Config) -> Settings:
        server = config.server
        return cls(
            heartbeat=server.heartbeat,
            heartbeat_after_s=server.heartbeat_after_s,
            heartbeat_every_s=server.heartbeat_every_s,
            wait_max_s=server.wait_max_s,
            stream_wait_max_s=server.stream_wait_max_s,
            answer_idle_max_s=server.answer_idle_max_s,
            forward_headers=REQUEST_ALLOWED | {name.lower().encode("latin-1") for name in server.forward_headers},
            body_max=server.body_max_mib * 1024 * 1024,
            upload_max=server.upload_max_mib * 1024 * 1024,
            keep_alive_max_s=config.scheduler.keep_alive_max_s,
        )


def arrival(
    settings: Settings,
    now: float,
    request: RequestId,
    model: ModelId,
    priority: int,
    tenant: TenantId,
    patient: bool,
    budget_s: float | None,
    keep_alive_s: float | None = None,
) -> RequestArrived:
    """The event for the scheduler. A `patient` caller gets heartbeats and can wait long; others soon give up."""
    wait_s = settings.stream_wait_max_s if patient else settings.wait_max_s
    answer_by: float | None = None
    if budget_s is not None:
        wait_s = min(wait_s, budget_s)
        answer_by = now + budget_s
    return RequestArrived(now, request, (model,), priority, tenant, now + wait_s, patient, answer_by, keep_alive_s)


class LaterAnswer(Protocol):
    """A request whose answer is kept, as far as serving it differs."""

    @property
    def may_run_again(self) -> bool:
        """Whether it may be sent once more if the engine is lost before its first byte."""
        ...

    async def starts(self) -> None:
        """Called before the engine is sent anything. Raises the error that keeps it from that."""
        ...

    def ended(self, error: GreenroomError | None) -> None:
        """Called once, after the request was recorded."""
        ...


class Ask:
    """One request to a model, read and checked."""

    __slots__ = (
        "_body",
        "asked_as",
        "budget_s",
        "cache_headers",
        "client",
        "drop_usage",
        "drops",
        "entry",
        "heartbeat",
        "is_patient",
        "job",
        "keep_alive_s",
        "peeked",
        "priority",
        "puts",
        "rewritten",
        "route",
        "stream",
        "target",
        "tenant",
        "to_operator",
    )

    def __init__(
        self,
        route: Route,
        entry: Entry,
        asked_as: str,
        target: bytes,
        stream: bool,
        priority: int,
        tenant: TenantId,
        client: str,
        heartbeat: Heartbeat,
        body: Body,
        budget_s: float | None,
        to_operator: bool,
    ) -> None:
        self.route = route
        self.entry = entry
        self.asked_as = asked_as
        self.target = target
        self.stream = stream
        self.priority = priority
        self.tenant = tenant
        self.client = client
        self.heartbeat = heartbeat
        # It gets heartbeats while it waits.
        self.is_patient = stream and heartbeat is not _OFF
        self._body = body
        self.budget_s = budget_s
        # The caller is an admin, and is shown all of an error.
        self.to_operator = to_operator
        # How long the model should stay afterwards; None if not given.
        self.keep_alive_s: float | None = None
        # A JSON body as it was read, for a payload that is made at once; and the fields to put in and to leave out.
        self.peeked: peek.Peeked | None = None
        self.puts: dict[str, bytes] = {}
        self.drops = _EMPTY
        # Makes the payload where the body is not JSON.
        self.rewritten: Callable[[], Payload] | None = None
        # For engines that keep a prefix cache: tenant, tag and mode.
        self.cache_headers: Headers | None = None
        # We asked the engine for usage and the caller did not: the event with it is dropped.
        self.drop_usage = False
        # Set if the answer is kept for later.
        self.job: LaterAnswer | None = None

    def payload(self) -> Payload:
        """The body for the engine. Made at the grant, so that a waiting request holds no copy."""
        if self.rewritten is not None:
            return self.rewritten()
        peeked, self.peeked = self.peeked, None
        if peeked is None:
            peeked = peek.peek(self._body.read())
        return peek.join(peeked.fields, drop=self.drops, put=self.puts)


class AskReader:
    def __init__(self, catalog: Catalog, tenants: Tenants) -> None:
        self._catalog = catalog
        self._tenants = tenants
        # By model, so that a new revision takes the place of the old one.
        self._rewrites: dict[ModelId, _Rewrites] = {}

    def read(self, exchange: Exchange, route: Route, caller: Caller, settings: Settings) -> Ask:
        """A JSON request."""
        _expect_post(exchange.head)
        peeked = peek.peek(exchange.body.read())
        ask = self._ask(exchange, route, caller, settings, peeked.model, peeked.priority, stream=peeked.stream)
        ask.client = peeked.client_id or ask.client
        if peeked.budget_s is not None:
            ask.budget_s = _smaller(ask.budget_s, peeked.budget_s)
        if peeked.keep_alive_s is not None:
            ask.keep_alive_s = peek.capped(peeked.keep_alive_s, settings.keep_alive_max_s)
        ask.peeked = peeked
        ask.puts, ask.drops = self._rewrites_of(ask.entry)
        if ask.stream and route.is_text and ask.entry.engine.usage_source is _IF_ASKED:
            options, asked = peek.ask_for_usage(peeked.fields)
            ask.drop_usage = not asked
            if options is not None:
                ask.puts = {**ask.puts, "stream_options": options}
        return ask

    async def read_form(self, exchange: Exchange, route: Route, caller: Caller, settings: Settings) -> Ask:
        """A form with a file. Large forms are read in turns, so that other requests are served meanwhile."""
        _expect_post(exchange.head)
        form = await multipart.scan_in_turns(exchange.body, exchange.head.get(b"content-type"))
        ask = self._ask(exchange, route, caller, settings, form.model, form.priority, stream=form.stream)
        ask.client = form.client_id or ask.client
        ask.budget_s = _smaller(ask.budget_s, form.budget_s)
        ask.keep_alive_s = peek.capped(form.keep_alive_s, settings.keep_alive_max_s)
        config = ask.entry.config
        puts = {name: _as_text(value) for name, value in config.set_params.items()}
        drops = frozenset(config.strip_params)
        ask.rewritten = lambda: form.rewrite(config.use_model_name, drop=drops, put=puts)
        return ask

    def read_upstream(self, exchange: Exchange, route: Route, caller: Caller, settings: Settings) -> Ask:
        """A pass-through: the path after the model's id goes to its engine unchanged."""
        head = exchange.head
        if not caller.admin:
            # Again: the models may have changed while the body came.
            self.check_open(head, caller)
        name, path = self._upstream(head)
        target = path + (b"?" + head.query if head.query else b"")
        ask = self._ask(exchange, route, caller, settings, name, None, target=target)
        ask.rewritten = lambda: exchange.body
        return ask

    def check_open(self, head: Head, caller: Caller) -> None:
        """Raises NotAllowed unless the model opens this path to every key, or ModelNotFound."""
        name, path = self._upstream(head)
        entry = self._catalog.find(name)
        if entry is None or not is_open(path, entry.config.routes):
            raise NotAllowed(
                f"The key {caller.name} may not use {path.decode('ascii', 'replace')} of {name}: its `routes` do not "
                "name it. Use a key with `admin: true`."
            )

    def _upstream(self, head: Head) -> tuple[str, bytes]:
        """The model named after /upstream/, and the path for its engine."""
        found = split_model(head.path[len(UPSTREAM_PREFIX) :], self._catalog.is_known)
        if found is None:
            raise ModelNotFound(
                "No model's id follows /upstream/. GET /v1/models lists those there are.", param="model"
            )
        name, rest = found
        return name, b"/" + rest.lstrip(b"/")

    def _ask(
        self,
        exchange: Exchange,
        route: Route,
        caller: Caller,
        settings: Settings,
        name: str,
        priority: str | int | None,
        *,
        target: bytes | None = None,
        stream: bool = False,
    ) -> Ask:
        head = exchange.head
        entry = self._catalog.find(name)
        if entry is None:
            raise ModelNotFound.named(name)
        if route.ability is not None:
            _check_ability(entry, route.ability)
        said = {known: value for known, value in head.headers if known in OUR_HEADERS}
        ask = Ask(
            route,
            entry,
            name,
            head.target if target is None else target,
            stream,
            _priority(priority, said, entry, caller),
            caller.tenant or self._tenants.name(said.get(b"x-tenant-id")),
            said.get(b"x-client-id", b"").decode("latin-1")[:CLIENT_CHARS_MAX],
            _heartbeat(said, settings.heartbeat),
            exchange.body,
            _budget_s(said),
            caller.admin,
        )
        ask.cache_headers = cache_headers(entry.facts.keeps_prefixes, ask.tenant, said)
        return ask

    def _rewrites_of(self, entry: Entry) -> tuple[dict[str, bytes], frozenset[str]]:
        """The fields that the operator sets and strips for this model, encoded once."""
        known = self._rewrites.get(entry.id)
        if known is None or known[0] is not entry:
            config = entry.config
            puts = {name: msgspec.json.encode(value) for name, value in config.set_params.items()}
            if config.use_model_name is not None:
                puts["model"] = msgspec.json.encode(config.use_model_name)
            known = self._rewrites[entry.id] = (entry, puts, frozenset(config.strip_params) or _EMPTY)
        return known[1], known[2]


def _expect_post(head: Head) -> None:
    if head.method != b"POST":
        raise PostOnly(f"{head.path.decode('ascii', 'replace')} takes POST.")


def _as_text(value: object) -> str:
    """Fields of a form are text; other values are written as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _check_ability(entry: Entry, ability: Ability) -> None:
    abilities = entry.facts.abilities
    if abilities is not None and ability not in abilities:
        can = ", ".join(sorted(one.value for one in abilities))
        raise NoAbility(f"{entry.id} does not do {ability.value}; it does {can}.", param="model")


def _priority(in_body: str | int | None, said: dict[bytes, bytes], entry: Entry, caller: Caller) -> int:
    """From the body, else from the header, else from the model; never better than the key allows."""
    if in_body is not None:
        priority = parse_priority(in_body)
    elif (in_header := said.get(b"x-priority")) is not None:
        priority = parse_priority(in_header, param="X-Priority")
    else:
        priority = entry.spec.priority
    return cap(priority, caller.priority_max)


def _heartbeat(said: dict[bytes, bytes], default: Heartbeat) -> Heartbeat:
    raw = said.get(b"x-heartbeat")
    if raw is None:
        return default
    if raw not in _HEARTBEATS:
        raise BadRequest("X-Heartbeat is comment, chunk or off.", param="X-Heartbeat")
    return _HEARTBEATS[raw]


def _budget_s(said: dict[bytes, bytes]) -> float | None:
    """How long the whole answer may take, by the request's header."""
    raw = said.get(b"x-request-timeout-s")
    return None if raw is None else peek.read_budget_s(raw.decode("latin-1"), param="X-Request-Timeout-S")


def _smaller(one: float | None, other: float | None) -> float | None:
    """The smaller of two budgets, either of which may be missing."""
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)


# --- what the engine is told of its prefix cache ---

TAG_CHARS_MAX: Final = 64
# All printable characters but the space, which may be stripped, and the percent sign, which escapes.
_PLAIN: Final = "".join(chr(code) for code in range(0x21, 0x7F) if code != ord("%"))
_TAG: Final = re.compile(rb"[!-~]([ -~]*[!-~])?")
_MODES: Final = frozenset((b"prefix", b"none", b"auto"))


def cache_headers(is_kept: bool, tenant: TenantId, said: dict[bytes, bytes]) -> Headers | None:
    """The headers for an engine that keeps a prefix cache (`is_kept`); None for others. Raises BadRequest for both."""
    tag, mode = said.get(b"x-cache-tag"), said.get(b"x-cache-mode")
    if tag:
        check_tag(tag, "X-Cache-Tag")
    if mode is not None and mode.lower() not in _MODES:
        raise BadRequest("X-Cache-Mode is prefix, none or auto.", param="X-Cache-Mode")
    if not is_kept:
        return None
    headers: Headers = [(b"x-tenant-id", tenant_word(tenant).encode())] if tenant else []
    if tag:
        headers.append((b"x-cache-tag", tag))
    if mode is not None:
        headers.append((b"x-cache-mode", mode.lower()))
    return headers


def tenant_word(tenant: str) -> str:
    """A tenant's name for a header: characters that a header cannot carry are percent-encoded."""
    return quote(tenant, safe=_PLAIN)


def check_tag(tag: bytes, param: str) -> None:
    """Raises BadRequest for what cannot be a tag."""
    if len(tag) > TAG_CHARS_MAX or _TAG.fullmatch(tag) is None:
        raise BadRequest(f"{param} has 1 to {TAG_CHARS_MAX} printable ASCII characters.", param=param)
