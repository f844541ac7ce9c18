"""What a caller asks for: the model, the priority, the tenant, and the body that the engine is sent.

Owns the settings that requests go by, and the headers by which callers tell the gateway something: their names, and how
each is read. These are never forwarded; a value that cannot be is answered with BadRequest. `ask_reader.py` reads
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from greenroom.access.keys import Caller, Permission, parse_priority
from greenroom.access.limits import Quota, QuotaHold
from greenroom.access.profiles import RequestProfile
from greenroom.config.schema import Config, Heartbeat
from greenroom.core.events import Choice, RequestArrived
from greenroom.core.model import ModelId, RequestId, TenantId
from greenroom.dialects.chat import CHAT_PATH
from greenroom.dialects.dialect import Route
from greenroom.dialects.translation import Translation
from greenroom.errors import BadRequest
from greenroom.http.body import Body, Payload
from greenroom.http.headers import REQUEST_ALLOWED, Headers
from greenroom.http.request import Head
from greenroom.runtime.catalogue import Entry
from greenroom.serving.answers import LaterAnswer, RemadeAnswer
from greenroom.serving.body import peek
from greenroom.serving.body.long_body import LongBody
from greenroom.serving.prefix_cache import PrefixScope
from greenroom.serving.routes import UPSTREAM

_OFF: Final = Heartbeat.OFF
_EMPTY: Final[frozenset[str]] = frozenset()


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
    json_values_max: int
    keep_alive_max_s: float | None
    governed: bool = False
    """Operations are signed: control paths of engines are closed to admins too."""

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
            json_values_max=server.json_values_max,
            keep_alive_max_s=config.scheduler.keep_alive_max_s,
            governed=config.governance.is_on,
        )


def arrival(
    settings: Settings,
    now: float,
    request: RequestId,
    models: tuple[ModelId, ...],
    priority: int,
    tenant: TenantId,
    patient: bool,
    budget_s: float | None,
    keep_alive_s: float | None = None,
    choice: Choice | None = None,
) -> RequestArrived:
    """The event for the scheduler. A `patient` caller gets heartbeats and can wait long; others soon give up."""
    wait_s = settings.stream_wait_max_s if patient else settings.wait_max_s
    answer_by: float | None = None
    if budget_s is not None:
        wait_s = min(wait_s, budget_s)
        answer_by = now + budget_s
    give_up_at = now + wait_s
    return RequestArrived(now, request, models, priority, tenant, give_up_at, patient, answer_by, keep_alive_s, choice)


@dataclass(frozen=True, slots=True)
class Rungs:
    """The models that may serve a request for a task, in order, by their ids: how each is asked, and what limits it.

    The request itself is none of `asks`: it is changed to what one of them says (`Ask.bind`), and they stay.
    """

    asks: Mapping[ModelId, Ask]
    meters: Mapping[ModelId, Quota | None]
    choice: Choice


# What depends on the model that is asked.
_OF_MODEL: Final = (
    *("entry", "target", "peeked", "puts", "drops", "rewritten", "form_n", "scope", "cache_headers", "is_not_cached"),
    *("spreads", "drop_usage", "remade", "translation"),
)
# What does not, beside what its constructor is given.
_OF_REQUEST: Final = ("charge", "is_patient", "job", "keep_alive_s", "profile", "rungs", "wants_facts")


class Ask:
    """One request to a model, read and checked."""

    __slots__ = (
        "_body",
        "asked_as",
        "budget_s",
        "cache_headers",
        "caller",
        "charge",
        "client",
        "drop_usage",
        "drops",
        "entry",
        "form_n",
        "heartbeat",
        "is_not_cached",
        "is_patient",
        "job",
        "keep_alive_s",
        "peeked",
        "priority",
        "profile",
        "puts",
        "remade",
        "rewritten",
        "route",
        "rungs",
        "scope",
        "spreads",
        "stream",
        "target",
        "tenant",
        "translation",
        "wants_facts",
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
        scope: PrefixScope,
        body: Body,
        budget_s: float | None,
        caller: Caller,
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
        self.caller = caller
        # What it goes by, if a profile is for it.
        self.profile: RequestProfile | None = None
        # How long the model should stay afterwards; None if not given.
        self.keep_alive_s: float | None = None
        # A JSON body as it was read, for a payload that is made at once; and the fields to put in and to leave out.
        self.peeked: peek.BodyFields | None = None
        self.puts: dict[str, bytes] = {}
        self.drops = _EMPTY
        # Makes the payload where the body is not JSON.
        self.rewritten: Callable[[], Payload] | None = None
        # The field `n` of such a payload: how many answers it asks for.
        self.form_n: str | None = None
        # Whose prefixes it may reuse, and the headers for engines that are told by headers.
        self.scope = scope
        self.cache_headers: Headers | None = None
        # No prefix is reused, whatever the engine tells: it keeps none, or the caller asked for none.
        keeps = entry.facts.keeps_prefixes
        self.is_not_cached = route is not UPSTREAM and (keeps is False or (keeps is True and not scope.is_used))
        # A comment at the end of the stream says what only the end tells.
        self.wants_facts = False
        # It asks for several answers at once.
        self.spreads = False
        # We asked the engine for usage and the caller did not: the event with it is dropped.
        self.drop_usage = False
        # What it is counted against; None if nothing that it uses is limited.
        self.charge: QuotaHold | None = None
        # Set if the answer is kept for later, and if it is made anew from the engine's.
        self.job: LaterAnswer | None = None
        self.remade: RemadeAnswer | None = None
        # Set if the engine is asked in another dialect than the caller's.
        self.translation: Translation | None = None
        # Set if it asks for a task. Until one of its models is granted, it reads as a request to the first.
        self.rungs: Rungs | None = None

    def bind(self, model: ModelId) -> None:
        """Ask this one of its models from now on."""
        assert self.rungs is not None
        other = self.rungs.asks[model]
        if other.entry is not self.entry:
            for name in _OF_MODEL:
                setattr(self, name, getattr(other, name))

    def copied(self) -> Ask:
        """The same request, to be changed. (`copy.copy` cannot copy what is compiled.)"""
        copy = Ask(
            self.route,
            self.entry,
            self.asked_as,
            self.target,
            self.stream,
            self.priority,
            self.tenant,
            self.client,
            self.heartbeat,
            self.scope,
            self._body,
            self.budget_s,
            self.caller,
        )
        for name in (*_OF_MODEL, *_OF_REQUEST):
            setattr(copy, name, getattr(self, name))
        return copy

    @property
    def long(self) -> LongBody | None:
        """Its body, if that is JSON and was too long to be read at once."""
        return None if self.peeked is None else self.peeked.long

    def drop_peeked(self) -> None:
        """Keep no copy of the body while it waits. The outline of a long one stays: it is counted with the body."""
        if self.long is not None:
            return
        self.peeked = None
        if self.rungs is not None:
            for other in self.rungs.asks.values():
                other.peeked = None

    @property
    def to_operator(self) -> bool:
        """The caller is shown all of an error."""
        return self.caller.may(Permission.READ)

    def payload(self, pinned: dict[str, bytes] | None = None) -> Payload:
        """The body for the engine, with the fields that pin it. Made at the grant: a waiting request holds no copy."""
        if self.rewritten is not None:
            return self.rewritten()
        peeked, long = self.peeked, self.long
        if peeked is None:
            peeked = self._peeked_again()
        joined = peek.join(peeked.fields, drop=self.drops, put={**self.puts, **pinned} if pinned else self.puts)
        if long is not None:
            return long.outline.put_back(joined)
        self.peeked = None
        return joined

    def _peeked_again(self) -> peek.BodyFields:
        peeked = peek.peek(self._body.read(), lambda _: self.asked_as)
        if self.translation is not None:
            peeked.fields = self.translation.request(peeked.fields)
        return peeked


def kept_alive_s(ask: Ask, said: float | None, settings: Settings) -> float | None:
    """How long its model stays, by request and profile, within the operator's bound."""
    said = said if ask.profile is None else ask.profile.keep_alive_s(said)
    return peek.capped(said, settings.keep_alive_max_s)


def set_by_profile(ask: Ask, profile: RequestProfile, fields: peek.Fields) -> None:
    """Put in what the profile sets. Raises BadRequest."""
    of_model = ask.puts
    if ask.route.is_text:
        ask.puts = {**profile.params(of_model, ask.drops), **of_model}
    if ask.target.partition(b"?")[0] == CHAT_PATH:
        ask.puts = {**ask.puts, **profile.template_switches(fields, of_model, ask.drops)}


# --- what headers ask for -------------------------------------------------------------------------------------------

TENANT_HEADER: Final = b"x-tenant-id"
CLIENT_HEADER: Final = b"x-client-id"
# The headers that are for the gateway; one pass over a request's headers finds them.
OUR_HEADERS: Final = frozenset(
    (
        *(b"x-priority", TENANT_HEADER, CLIENT_HEADER, b"x-heartbeat", b"x-request-timeout-s"),
        *(b"x-cache-mode", b"x-cache-tag", b"x-facts"),
    )
)
# White space behind a value is no part of it, and the parser leaves it there.
SPACE: Final = b" \t"
_HEARTBEATS: Final = {kind.value.encode(): kind for kind in Heartbeat}
CLIENT_CHARS_MAX: Final = 128


def said_in(head: Head) -> dict[bytes, bytes]:
    """What a request tells the gateway by headers; of one that is repeated, the last."""
    return {name: value.rstrip(SPACE) for name, value in head.headers if name in OUR_HEADERS}


def said_tenant(head: Head) -> bytes | None:
    """The tenant that a request names. The edge refuses a request that names two."""
    return head.get(TENANT_HEADER)


def client_named(head: Head) -> str:
    """The client that a request names in its body, as far as that is read, or by its header; empty if neither."""
    if head.client:
        return head.client
    found = b""
    for name, value in head.headers:
        if name == CLIENT_HEADER:
            found = value.rstrip(SPACE)
    return client_of(found)


def client_of(raw: bytes) -> str:
    return raw.decode("latin-1")[:CLIENT_CHARS_MAX]


def said_priority(in_body: str | int | None, said: dict[bytes, bytes]) -> int | None:
    """The priority that a request names in its body, else by its header; None if it names none."""
    if in_body is not None:
        return parse_priority(in_body)
    in_header = said.get(b"x-priority")
    return None if in_header is None else parse_priority(in_header, param="X-Priority")


def heartbeat_of(said: dict[bytes, bytes], default: Heartbeat) -> Heartbeat:
    raw = said.get(b"x-heartbeat")
    if raw is None:
        return default
    if raw not in _HEARTBEATS:
        raise BadRequest("X-Heartbeat is comment, chunk or off.", param="X-Heartbeat")
    return _HEARTBEATS[raw]


def wants_facts(raw: bytes) -> bool:
    if raw not in (b"comment", b"off"):
        raise BadRequest("X-Facts is comment or off.", param="X-Facts")
    return raw == b"comment"


def budget_s_of(said: dict[bytes, bytes]) -> float | None:
    """How long the whole answer may take, by the request's header."""
    raw = said.get(b"x-request-timeout-s")
    return None if raw is None else peek.read_budget_s(raw.decode("latin-1"), param="X-Request-Timeout-S")


def smaller(one: float | None, other: float | None) -> float | None:
    """The smaller of two budgets, either of which may be missing."""
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)
