"""A request to a model, as it was read: what the caller asks for, and the models that may answer it.

Owns the settings that requests go by, and how the body for an engine is made. Nothing here changes after it was read,
but that a body which was looked at can be dropped and is then read again. `read.py` reads requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from greenroom.access.keys import Permission
from greenroom.access.limits import Quota, QuotaHold
from greenroom.config.schema import Config, Heartbeat
from greenroom.core.events import Choice, RequestArrived
from greenroom.core.model import ModelId, RequestId, TenantId
from greenroom.dialects.dialect import Route
from greenroom.dialects.translation import Translation
from greenroom.http.body import Body, Payload
from greenroom.http.headers import REQUEST_ALLOWED, Headers
from greenroom.runtime.catalogue import Entry
from greenroom.serving.admitted import Admitted
from greenroom.serving.answers import LaterAnswer, RemadeAnswer
from greenroom.serving.body import peek
from greenroom.serving.body.long_body import LongBody
from greenroom.serving.body.multipart import MultipartForm
from greenroom.serving.prefix_cache import PrefixScope

_OFF: Final = Heartbeat.OFF


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


def smaller(one: float | None, other: float | None) -> float | None:
    """The smaller of two budgets, either of which may be missing."""
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)


# --- the body for an engine -----------------------------------------------------------------------------------------


class Content:
    """The body for one engine, here as it came. It is made at the grant: a waiting request holds no copy."""

    __slots__ = ("body", "long")

    def __init__(self, body: Body, long: LongBody | None = None) -> None:
        self.body = body
        # Set for JSON that was too long to be read at once.
        self.long = long

    def payload(self, pinned: Mapping[str, bytes]) -> Payload:
        """`pinned` are further fields of JSON."""
        return self.body

    def release(self) -> None:
        """Drop what was read of the body, while the request waits. It can be read again."""

    def tokens_asked(self) -> int:
        """How many tokens the answer may have, as far as the body says so. Ask before `release`."""
        return 0

    @property
    def answers(self) -> str | None:
        """The field `n` of a form: how many answers it asks for."""
        return None


class JsonContent(Content):
    """The fields of the body, in the engine's dialect, with those of the gateway in their place."""

    __slots__ = ("_drop", "_fields", "_model", "_put", "_translation")

    def __init__(
        self,
        body: Body,
        read: peek.BodyFields,
        translation: Translation | None,
        put: dict[str, bytes],
        drop: frozenset[str],
    ) -> None:
        """`read` has the fields after the translation. `put` replaces fields, in JSON; those in `drop` are left out."""
        self.body, self.long = body, read.long
        self._model = read.model
        self._fields: peek.Fields | None = read.fields
        self._translation = translation
        self._put = put
        self._drop = drop

    def payload(self, pinned: Mapping[str, bytes]) -> Payload:
        fields, long = self._fields, self.long
        if fields is None:
            fields = self._read_again()
        joined = peek.join(fields, drop=self._drop, put={**self._put, **pinned} if pinned else self._put)
        if long is not None:
            return long.outline.put_back(joined)
        self._fields = None
        return joined

    def release(self) -> None:
        # The outline of a long one stays: it is counted with the body.
        if self.long is None:
            self._fields = None

    def tokens_asked(self) -> int:
        return 0 if self._fields is None else peek.tokens_asked(self._fields)

    def _read_again(self) -> peek.Fields:
        fields = peek.fields_of(self.body.read())
        if "model" not in fields:
            fields["model"] = msgspec.Raw(msgspec.json.encode(self._model))
        return fields if self._translation is None else self._translation.request(fields)


class FormContent(Content):
    """A form, with those fields replaced and left out that the gateway says."""

    __slots__ = ("_drop", "_form", "_model", "_put")

    def __init__(
        self, body: Body, form: MultipartForm, model: str | None, put: dict[str, str], drop: frozenset[str]
    ) -> None:
        """`model` is the name that the engine is told; None: the caller's."""
        super().__init__(body)
        self._form = form
        self._model = model
        self._put = put
        self._drop = drop

    def payload(self, pinned: Mapping[str, bytes]) -> Payload:
        return self._form.rewrite(self._model, drop=self._drop, put=self._put)

    @property
    def answers(self) -> str | None:
        return self._put.get("n", None if "n" in self._drop else self._form.fields.get("n"))


# --- the request ----------------------------------------------------------------------------------------------------


class Candidate:
    """One model that may answer a request: what its engine is asked, and what limits it.

    `scope`: whose prefixes it may reuse; `cache_headers` tell so to engines that are told by headers. `is_not_cached`:
    none is reused, whatever the engine tells. `spreads`: it is asked for several answers at once. `drop_usage`: the
    event with usage was not asked for by the caller. `translation`: its engine is asked in another dialect than the
    caller's. `remade`: the answer is made anew from the engine's.
    """

    __slots__ = (
        *("cache_headers", "content", "drop_usage", "entry", "is_not_cached", "name", "quota", "remade", "scope"),
        *("spreads", "target", "translation"),
    )

    def __init__(
        self,
        entry: Entry,
        target: bytes,
        content: Content,
        scope: PrefixScope,
        cache_headers: Headers | None,
        quota: Quota | None,
        *,
        is_not_cached: bool = False,
        spreads: bool = False,
        drop_usage: bool = False,
        translation: Translation | None = None,
        remade: RemadeAnswer | None = None,
    ) -> None:
        self.entry = entry
        # The model, as callers know it.
        self.name = entry.public_id
        self.target = target
        self.content = content
        self.scope = scope
        self.cache_headers = cache_headers
        self.quota = quota
        self.is_not_cached = is_not_cached
        self.spreads = spreads
        self.drop_usage = drop_usage
        self.translation = translation
        self.remade = remade


class Request:
    """One request, read and checked. `candidates` may answer it, the best first; with a `choice` it asks for a task.

    `keep_alive_s`: how long the model should stay afterwards; None if not given. `hold`: what it is counted against;
    None if nothing that it uses is limited. `job`: its answer is kept for later.
    """

    __slots__ = (
        *("asked_as", "budget_s", "caller", "candidates", "choice", "client", "heartbeat", "hold", "id", "job"),
        *("keep_alive_s", "priority", "route", "stream", "tenant", "wants_facts"),
    )

    def __init__(
        self,
        id: RequestId,
        admitted: Admitted,
        route: Route,
        candidates: tuple[Candidate, ...],
        asked_as: str,
        client: str,
        *,
        stream: bool,
        heartbeat: Heartbeat,
        priority: int,
        budget_s: float | None,
        keep_alive_s: float | None,
        wants_facts: bool,
        hold: QuotaHold | None,
        choice: Choice | None,
        job: LaterAnswer | None,
    ) -> None:
        self.id = id
        self.route = route
        self.caller = admitted.caller
        self.tenant = admitted.tenant
        self.candidates = candidates
        self.asked_as = asked_as
        self.client = client
        self.stream = stream
        self.heartbeat = heartbeat
        self.priority = priority
        self.budget_s = budget_s
        self.keep_alive_s = keep_alive_s
        self.wants_facts = wants_facts
        self.hold = hold
        self.choice = choice
        self.job = job

    @property
    def has_choice(self) -> bool:
        """True if several models can serve it."""
        return len(self.candidates) > 1

    @property
    def to_operator(self) -> bool:
        """The caller is shown all of an error."""
        return self.caller.may(Permission.READ)

    @property
    def is_patient(self) -> bool:
        """It gets heartbeats while it waits."""
        return self.stream and self.heartbeat is not _OFF

    @property
    def may_run_again(self) -> bool:
        """True if it may be sent once more where the engine is lost before its first byte."""
        return self.job is None or self.job.may_run_again

    def candidate(self, model: ModelId) -> Candidate:
        """That of this model, of several."""
        return next(one for one in self.candidates if one.entry.id == model)

    def arrival(self, now: float, settings: Settings) -> RequestArrived:
        return arrival(
            settings,
            now,
            self.id,
            tuple([one.entry.id for one in self.candidates]),
            self.priority,
            self.tenant,
            self.stream and self.heartbeat is not _OFF,
            self.budget_s,
            self.keep_alive_s,
            self.choice,
        )

    def release(self) -> None:
        """Keep no copy of the body while it waits."""
        for one in self.candidates:
            one.content.release()
