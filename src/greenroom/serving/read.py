"""Reads what a caller asks for: from a JSON body, a form, or a path that is passed through.

Owns the reading of `x_*` fields, which are never forwarded, and the order of checks: the model first, then what headers
say, then the body for each model that may answer. Raises the error to answer with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from urllib.parse import parse_qs

import msgspec

from greenroom.access.keys import OTHER, Caller, Tenants, cap
from greenroom.access.limits import Limiter, Quota, QuotaHold
from greenroom.access.profiles import Profiles, RequestProfile
from greenroom.base.names import public_name
from greenroom.config.part import GatewayState
from greenroom.config.schema import Ability, Config, Heartbeat
from greenroom.core.events import Choice
from greenroom.core.model import NO_TENANT, ModelId, RequestId
from greenroom.dialects.chat import CHAT_PATH
from greenroom.dialects.dialect import Route
from greenroom.dialects.openai.requests import CHAT, TOOLS, expect_functions
from greenroom.engines.base import UsageSource
from greenroom.errors import (
    BadRequest,
    BodyTooLarge,
    GreenroomError,
    MediaRefused,
    ModelNotFound,
    NoAbility,
    NotAllowed,
    PostOnly,
)
from greenroom.http.exchange import Exchange
from greenroom.http.headers import Headers
from greenroom.http.request import Head
from greenroom.library.records import Version
from greenroom.runtime.adhoc_model import NO_OPTIONS, ModelOptions
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.resolver import Resolver
from greenroom.serving.admitted import Admitted
from greenroom.serving.answers import (
    AS_BASE64,
    AS_URL,
    RESPONSE_FORMAT,
    LaterAnswer,
    PictureUrls,
    RemadeAnswer,
    expect_no_stream,
)
from greenroom.serving.body import model_options, multipart, peek
from greenroom.serving.body.long_body import LongBody
from greenroom.serving.body.media import check_media, is_upload
from greenroom.serving.prefix_cache import ONLY_SCOPE, PrefixSalts, PrefixScope, cache_scope
from greenroom.serving.request import Candidate, Content, FormContent, JsonContent, Request, Settings, smaller
from greenroom.serving.routes import (
    GENERATE,
    UPSTREAM,
    UPSTREAM_PREFIX,
    has_one_path,
    is_open,
    split_model,
)
from greenroom.serving.tasks import Ladder, TaskRoute, Tasks
from greenroom.serving.translating import check_native, check_whole, translated
from greenroom.serving.versioned import versioned_model

_EMPTY: Final[frozenset[str]] = frozenset()
_READING: Final = (b"GET", b"HEAD")
_IF_ASKED: Final = UsageSource.ASK
_OFF: Final = Heartbeat.OFF
# Fields of llama.cpp that say how many answers are wanted.
_COUNTS: Final = ("n", "n_cmpl")
# By these a caller would choose another model, price, address or account at a provider than the operator did.
_CHOICES_AT_PROVIDERS: Final = frozenset(
    (
        *("models", "fallbacks", "route", "provider", "plugins", "service_tier", "chat_template_kwargs"),
        *("api_base", "base_url", "api_key", "api_version", "custom_llm_provider", "litellm_params", "user_config"),
    )
)
# The fields that an operator sets (encoded) and strips for one revision of a model.
_Rewrites = tuple[Entry, dict[str, bytes], frozenset[str]]


class Reader:
    """What all requests are read by. `configure` applies a changed configuration to those that are read from now on."""

    def __init__(
        self,
        resolver: Resolver,
        catalog: Catalog,
        tenants: Tenants,
        limiter: Limiter,
        tasks: Tasks,
        salts: PrefixSalts,
        gateway: GatewayState,
        picture_urls: PictureUrls | None = None,
    ) -> None:
        """Without `picture_urls` engines are asked for what the caller asked for."""
        self.resolver: Final = resolver
        self.catalog: Final = catalog
        self.tenants: Final = tenants
        self.limiter: Final = limiter
        self.salts: Final = salts
        self.gateway: Final = gateway
        self.picture_urls: Final = picture_urls
        self._tasks = tasks
        # By model, so that a new revision takes the place of the old one.
        self._rewrites: dict[ModelId, _Rewrites] = {}
        self.configure(gateway.config)

    def configure(self, config: Config) -> None:
        self.settings = Settings.of(config)
        # None while there are none.
        self.profiles = Profiles(config.profiles) if config.profiles else None
        self.tasks = self._tasks if config.tasks else None

    def profile(self, admitted: Admitted, client: str) -> RequestProfile | None:
        if self.profiles is None:
            return None
        return self.profiles.of(admitted.caller.name, admitted.tenant, client)

    def narrowed(self, admitted: Admitted) -> Caller:
        """The caller, limited to the models that the profile of this request allows, by its headers."""
        profile = self.profile(admitted, admitted.client)
        return admitted.caller if profile is None else profile.narrowed(admitted.caller)

    def version_of(self, model: str) -> Version | None:
        """The version that this model serves now."""
        entry = self.catalog.find(model)
        return None if entry is None else entry.version

    def is_known(self, name: str, caller: Caller) -> bool:
        """True if the caller can ask for a model or a task of this name."""
        if self.resolver.is_seen(name, caller):
            return True
        return self.tasks is not None and self.tasks.is_task(name, caller.sees)

    def check_open(self, head: Head, caller: Caller) -> None:
        """Raises NotAllowed unless the model opens this path to every key, or ModelNotFound."""
        name, path = self.upstream(head, caller)
        entry = self.catalog.find(name)
        if entry is None or not is_open(path, entry.config.routes):
            raise NotAllowed(
                f"The key {caller.name} may not use {path.decode('ascii', 'replace')} of {name}: its `routes` do not "
                "name it. Use a key with `admin: true`."
            )

    def upstream(self, head: Head, caller: Caller) -> tuple[str, bytes]:
        """The model named after /upstream/, and the path for its engine."""

        def is_known(name: str) -> bool:
            entry = self.catalog.find(name)
            return entry is not None and caller.sees(entry.base_id)

        found = split_model(head.path[len(UPSTREAM_PREFIX) :], is_known)
        if found is None:
            raise ModelNotFound(
                "No model's id follows /upstream/. GET /v1/models lists those there are.", param="model"
            )
        name, rest = found
        return name, b"/" + rest.lstrip(b"/")

    def rewrites_of(self, entry: Entry) -> tuple[dict[str, bytes], frozenset[str]]:
        """The fields that the operator sets and strips for this model, encoded once."""
        known = self._rewrites.get(entry.id)
        if known is None or known[0] is not entry:
            config = entry.config
            put = {name: msgspec.json.encode(value) for name, value in config.set_params.items()}
            if (name := _name_in_engine(entry)) is not None:
                put["model"] = msgspec.json.encode(name)
            if len(self._rewrites) > 2 * len(self.catalog):
                # Of models that are no longer there.
                self._rewrites = {one.id: kept for one in self.catalog if (kept := self._rewrites.get(one.id))}
            known = self._rewrites[entry.id] = (entry, put, _stripped(entry) or _EMPTY)
        return known[1], known[2]


class Reading:
    """One request while it is read, which may take several tries. What was found so far is told by a refusal.

    `client` is the one that it names, `asked` the model, empty until that is found.
    """

    __slots__ = (
        *("_budget_s", "_caller", "_heartbeat", "_job", "_profile", "_reader", "_said_priority", "_stream"),
        *("_wants_facts", "admitted", "asked", "client", "exchange", "id", "route"),
    )

    def __init__(
        self,
        reader: Reader,
        exchange: Exchange,
        admitted: Admitted,
        route: Route,
        id: RequestId,
        job: LaterAnswer | None = None,
    ) -> None:
        self.exchange: Final = exchange
        self.admitted: Final = admitted
        self.id: Final = id
        self.client = admitted.client
        self.asked = ""
        self._reader: Final = reader
        self.route: Final = route
        self._job: Final = job
        # Limited to the models of its profile, if one is for it.
        self._caller = admitted.caller
        self._profile: RequestProfile | None = None
        self._stream = False
        # What the headers say, once a model was found.
        self._heartbeat: Heartbeat | None = None
        self._said_priority: int | None = None
        self._budget_s: float | None = None
        self._wants_facts = False

    def read(self, long: LongBody | None = None) -> Request:
        """The request, unless it is a form; `long` is its body if that is long JSON.

        Raises NeedsDiskLookup if only the disk tells which model it names, and Pending where `long` is given.
        """
        return self._read_upstream(long) if self.route is UPSTREAM else self._read_json(long)

    # --- JSON -------------------------------------------------------------------------------------------------------

    def _read_json(self, long: LongBody | None) -> Request:
        exchange, route = self.exchange, self.route
        _expect_post(exchange.head)
        body = peek.peek(exchange.body.read()) if long is None else peek.peek_long(long)
        self._comes_from(body.client_id)
        if not body.model:
            body.name_model(self._default_model())
        if (meant := route.dialect.meant) is not None:
            body.model = meant(body.model, self._is_known())
        self._stream = body.stream if route.translate is None else route.is_stream(body.stream, body.fields)
        tasks, task = self._reader.tasks, None
        if tasks is not None and (task := tasks.find(body.model)) is not None:
            ladder = tasks.ladder(task, self._caller.sees, route.ability, wants_json=peek.wants_json(body.fields))
            candidates, choice = self._candidates(ladder, self._json_for(body, task))
        else:
            candidates, choice = (self._of_json(body, body.model, None),), None
        return self._request(candidates, body.model, task, choice, body.budget_s, body.keep_alive_s)

    # Functions inside of others cost their caller something at every call, so they are made in functions of their own.

    def _is_known(self) -> Callable[[str], bool]:
        reader, caller = self._reader, self.admitted.caller
        return lambda name: reader.is_known(name, caller)

    def _json_for(self, body: peek.BodyFields, task: TaskRoute) -> Callable[[str], Candidate]:
        # Each is read for itself: engines have different dialects.
        return lambda name: self._of_json(peek.copied(body), name, task)

    def _default_model(self) -> str:
        """The model of a JSON request that names none. Raises BadRequest."""
        route, config = self.route, self._reader.gateway.config
        if route is GENERATE:
            return versioned_model(config, _query_model(self.exchange.head), self._caller)
        profile = self._profile
        if profile is not None and profile.default_model is not None:
            return profile.default_model
        if not route.is_native:
            raise BadRequest("The body has no field model, which says which model to ask.", param="model")
        if (name := config.server.default_model) is None:
            raise BadRequest("The body names no model, and there is no server.default_model.", param="model")
        return name

    def _of_json(self, body: peek.BodyFields, name: str, task: TaskRoute | None) -> Candidate:
        reader, exchange, route = self._reader, self.exchange, self.route
        options = model_options.of_json(body.fields) if reader.resolver.takes_options else NO_OPTIONS
        found = self._find(name, options, body.priority)
        entry = self._instance(found)
        scope = ONLY_SCOPE if not self.admitted.given and not self.admitted.tenant else self._scope(found)
        target, translation = route.sent_to or exchange.head.target, None
        if route.translate is not None:
            told = body.model if task is None else entry.public_id
            translation, target = translated(route, route.translate, entry, target, body, told, self._stream)
        elif route.is_native:
            translation = check_native(entry, target, body, exchange.body)
        fields = body.fields
        put, drop = reader.rewrites_of(entry)
        facts, engine = entry.facts, entry.engine
        if task is not None:
            put = {"model": msgspec.json.encode(entry.public_id), **put, **task.puts}
        if self._profile is not None:
            put = self._set_by_profile(self._profile, target, fields, put, drop)
        spreads = bool(facts.prompt_slots) and any(_is_several(put.get(one, fields.get(one))) for one in _COUNTS)
        drop_usage = False
        if self._stream and route.is_text and engine.usage_source is _IF_ASKED:
            with_usage, is_asked = peek.ask_for_usage(fields)
            drop_usage = not is_asked
            if with_usage is not None:
                put = {**put, "stream_options": with_usage}
        remade: RemadeAnswer | None = None
        if route.makes_pictures:
            remade = self._remade(entry, peek.text(fields, RESPONSE_FORMAT))
            if remade is not None and RESPONSE_FORMAT not in entry.config.strip_params:
                put = {**put, RESPONSE_FORMAT: msgspec.json.encode(AS_BASE64)}
        cache_headers = _cache_headers(entry, scope)
        # Tokens may be counted by a chat, whose prefix is kept as well.
        has_prompt = route.has_prompt or target == CHAT_PATH
        if cache_headers is not None and engine.salt_field is not None and has_prompt:
            salt = reader.salts.of(scope, fields.get(engine.salt_field), entry.public_id)
            put, cache_headers = {**put, engine.salt_field: salt}, None
        plain = ""
        if route.check is not None:
            plain = route.check.check(fields, len(exchange.body), put, drop)
            if route.check is CHAT and (raw := fields.get(TOOLS)) is not None:
                _expect_tools(entry, raw, is_operators=TOOLS in put or TOOLS in drop)
        if body.long is not None:
            _check_long_media(body.long, entry, fields)
        elif peek.has_parts(fields, plain):
            check_media(fields, entry.config.media_hosts)
        if options is not NO_OPTIONS:
            drop = drop | model_options.FIELDS
        return Candidate(
            entry,
            target,
            JsonContent(exchange.body, body, translation, put, drop),
            scope,
            cache_headers,
            self._quota(found) if self._reader.limiter.is_on else None,
            is_not_cached=_is_not_cached(entry, scope),
            spreads=spreads,
            drop_usage=drop_usage,
            translation=translation,
            remade=remade,
        )

    def _set_by_profile(
        self, profile: RequestProfile, target: bytes, fields: peek.Fields, put: dict[str, bytes], drop: frozenset[str]
    ) -> dict[str, bytes]:
        """Also with what the profile sets. Raises BadRequest."""
        of_model = put
        if self.route.is_text:
            put = {**profile.params(of_model, drop), **of_model}
        if target.partition(b"?")[0] == CHAT_PATH:
            put = {**put, **profile.template_switches(fields, of_model, drop)}
        return put

    # --- a form -----------------------------------------------------------------------------------------------------

    async def read_form(self) -> Request:
        """A form with a file. Large forms are read in turns, so that other requests are served meanwhile."""
        exchange, reader = self.exchange, self._reader
        _expect_post(exchange.head)
        form = await multipart.scan_in_turns(exchange.body, exchange.head.get(b"content-type"))
        self._comes_from(form.client_id)
        self._stream = form.stream
        tasks, task, choice = reader.tasks, None, None
        if tasks is not None and (task := tasks.find(form.model)) is not None:
            of_task = task
            ladder = tasks.ladder(task, self._caller.sees, self.route.ability)
            candidates, choice = self._candidates(ladder, lambda name: self._of_form(form, name, NO_OPTIONS, of_task))
        else:
            options = model_options.of_form(form.fields) if reader.resolver.takes_options else NO_OPTIONS
            # So that it is found without a look at the disk.
            await reader.resolver.named(form.model, options, self._caller)
            candidates = (self._of_form(form, form.model, options, None),)
        return self._request(candidates, form.model, task, choice, form.budget_s, form.keep_alive_s)

    def _of_form(
        self, form: multipart.MultipartForm, name: str, options: ModelOptions, task: TaskRoute | None
    ) -> Candidate:
        route = self.route
        found = self._find(name, options, form.priority)
        entry = self._instance(found)
        scope = self._scope(found)
        given = entry.config.set_params if task is None else {**entry.config.set_params, **task.section.set_params}
        form.expect(field for field in route.form if field not in given)
        put = {field: _as_text(value) for field, value in given.items()}
        drop = _stripped(entry) | (_EMPTY if options is NO_OPTIONS else model_options.FIELDS)
        remade: RemadeAnswer | None = None
        if route.makes_pictures:
            remade = self._remade(entry, form.fields.get(RESPONSE_FORMAT))
            if remade is not None and RESPONSE_FORMAT not in entry.config.strip_params:
                put[RESPONSE_FORMAT] = AS_BASE64
        told = _name_in_engine(entry) or (None if task is None else entry.public_id)
        return Candidate(
            entry,
            self.exchange.head.target,
            FormContent(self.exchange.body, form, told, put, drop),
            scope,
            _cache_headers(entry, scope),
            self._quota(found) if self._reader.limiter.is_on else None,
            is_not_cached=_is_not_cached(entry, scope),
            remade=remade,
        )

    # --- a path that is passed through ------------------------------------------------------------------------------

    def _read_upstream(self, long: LongBody | None) -> Request:
        """The path after the model's id goes to its engine unchanged.

        Raises NotAllowed for control paths of the engine, also to admins: its state is the scheduler's.
        """
        exchange, reader, settings = self.exchange, self._reader, self._reader.settings
        head = exchange.head
        self._comes_from(None)
        if not self._caller.admin:
            # Again: the models may have changed while the body came.
            reader.check_open(head, self._caller)
        name, path = reader.upstream(head, self._caller)
        self._check_passed(head, name, path)
        if settings.governed and (head.method not in _READING or head.upgrade is not None):
            self._check_governed(head, name, path)
        found = self._find(name, NO_OPTIONS, None)
        entry = self._instance(found)
        scope = self._scope(found)
        if entry.engine.fetches_media and not is_upload(head.get(b"content-type")):
            if len(exchange.body) > settings.body_max:
                raise BodyTooLarge(f"The body has more than {settings.body_max:,} bytes.")
            check_whole(entry, exchange.body, long, entry.engine.peer_fields)
        target, quota = (
            path + (b"?" + head.query if head.query else b""),
            self._quota(found) if self._reader.limiter.is_on else None,
        )
        only = Candidate(entry, target, Content(exchange.body), scope, _cache_headers(entry, scope), quota)
        return self._request((only,), name)

    def _check_passed(self, head: Head, name: str, path: bytes) -> None:
        entry = self._reader.catalog.find(name)
        if entry is None or (passed := entry.engine.upstream_paths) is None:
            return
        if not has_one_path(head.upgrade):
            head.upgrade = None
        if not is_open(path, passed):
            told = f"{path.decode('ascii', 'replace')} of {name} is not passed on"
            if entry.facts.is_remote:
                raise NotAllowed(f"{told}: a remote model is asked by the gateway's own routes only.")
            raise NotAllowed(
                f"{told}: it may control the engine, which the gateway does. These are: {', '.join(passed)}."
            )

    def _check_governed(self, head: Head, name: str, path: bytes) -> None:
        """Raises NotAllowed unless the model or its engine says that this path only answers: no token permits more."""
        entry = self._reader.catalog.find(name)
        passed = () if entry is None else (*entry.config.routes, *(entry.engine.upstream_paths or ()))
        if not is_open(path, passed) or not has_one_path(head.upgrade):
            raise NotAllowed(
                f"{path.decode('ascii', 'replace')} of {name} may control its engine, and operations are signed here: "
                "add it to the model's `routes` if it only answers."
            )

    # --- what all kinds have ----------------------------------------------------------------------------------------

    def _comes_from(self, client: str | None) -> None:
        """The client that the body names, if it does: it decides about the profile."""
        self.client = client or self.admitted.client
        # Of a long body again at each try: a reload may have changed the profiles.
        self._profile = profile = self._reader.profile(self.admitted, self.client)
        caller = self.admitted.caller
        self._caller = caller if profile is None else profile.narrowed(caller)

    def _find(self, name: str, options: ModelOptions, priority_in_body: str | int | None) -> Entry:
        """The model of this name. What the headers say is read with the first one."""
        entry = self._reader.resolver.find(name, options, self._caller)
        self.asked = public_name(entry.id)
        if self.route.ability is not None:
            _check_ability(entry, self.route.ability)
        if self._heartbeat is None:
            self._read_headers(priority_in_body)
        return entry

    def _read_headers(self, priority_in_body: str | int | None) -> None:
        admitted, heartbeat = self.admitted, self._reader.settings.heartbeat
        if admitted.bad_tenant is not None:
            raise admitted.bad_tenant
        if admitted.given or priority_in_body is not None:
            self._said_priority = admitted.priority(priority_in_body)
            heartbeat = admitted.heartbeat(heartbeat)
            self._budget_s = admitted.budget_s()
            self._wants_facts = admitted.wants_facts()
        self._heartbeat = _OFF if self._job is not None else heartbeat

    def _instance(self, entry: Entry) -> Entry:
        """What serves this tenant: an entry of its own where each has a process of its own."""
        if entry.isolation != "process":
            return entry
        return self._reader.resolver.instances.of(entry, self.admitted.tenant)

    def _scope(self, entry: Entry) -> PrefixScope:
        admitted = self.admitted
        kept_for = NO_TENANT if entry.isolation == "off" else admitted.tenant
        if not kept_for and not admitted.given:
            return ONLY_SCOPE
        scope = cache_scope(kept_for, admitted.given)
        if scope.tenant == OTHER and admitted.caller.tenant is None:
            # Several tenants have this name.
            return PrefixScope(scope.tenant, scope.tag, is_used=False)
        return scope

    def _quota(self, entry: Entry) -> Quota | None:
        return self._reader.limiter.of_model(self._reader.catalog.limited_as(entry))

    def _remade(self, entry: Entry, said: str | None) -> RemadeAnswer | None:
        """Set if the request is for URLs of pictures: the engine makes the pictures."""
        urls = self._reader.picture_urls
        if urls is None or entry.config.set_params.get(RESPONSE_FORMAT, said) != AS_URL:
            return None
        expect_no_stream(self._stream)
        return urls.for_request(self.exchange.head, self.admitted.tenant, entry.public_id)

    def _candidates(self, ladder: Ladder, read_for: Callable[[str], Candidate]) -> tuple[tuple[Candidate, ...], Choice]:
        """Those models of a task that can take just this request; the others are passed over.

        Raises the first one's error if none can take it.
        """
        served_as: dict[ModelId, ModelId] = {}
        found: dict[ModelId, Candidate] = {}
        refused: GreenroomError | None = None
        for facts in ladder.models:
            try:
                candidate = read_for(facts.id)
            except (NoAbility, MediaRefused, ModelNotFound) as error:
                refused = refused or error
            else:
                found[candidate.entry.id] = candidate
                served_as[facts.id] = candidate.entry.id
        if refused is not None and not found:
            raise refused
        return tuple(found.values()), ladder.choice(served_as)

    def _request(
        self,
        candidates: tuple[Candidate, ...],
        asked_as: str,
        task: TaskRoute | None = None,
        choice: Choice | None = None,
        budget_s: float | None = None,
        keep_alive_s: float | None = None,
    ) -> Request:
        reader, admitted, profile, first = self._reader, self.admitted, self._profile, candidates[0]
        priority = first.entry.spec.priority
        if self._budget_s is not None:
            budget_s = smaller(self._budget_s, budget_s)
        if task is not None:
            self.asked, asked_as, priority = first.entry.id, task.name, task.priority_or(priority)
            budget_s = smaller(budget_s, task.section.budget_s)
            keep_alive_s = task.section.keep_alive_s if keep_alive_s is None else keep_alive_s
        said = self._said_priority
        if profile is not None:
            said, keep_alive_s = profile.priority(said, priority), profile.keep_alive_s(keep_alive_s)
        hold: QuotaHold | None = None
        if reader.limiter.is_on:
            quotas = [one.quota for one in candidates]
            said_tenant, is_task = admitted.named_tenant, task is not None
            hold = reader.limiter.charge_of(admitted.hold, admitted.caller, said_tenant, quotas, is_task=is_task)
            if hold is not None and (is_task or hold.counts_tokens()):
                hold.tokens_asked = first.content.tokens_asked()
        assert self._heartbeat is not None, "a model was found"
        return Request(
            self.id,
            admitted,
            self.route,
            candidates,
            asked_as,
            self.client,
            stream=self._stream,
            heartbeat=self._heartbeat,
            priority=cap(priority if said is None else said, admitted.caller.priority_max),
            budget_s=budget_s,
            keep_alive_s=peek.capped(keep_alive_s, reader.settings.keep_alive_max_s),
            wants_facts=self._wants_facts,
            hold=hold,
            choice=choice,
            job=self._job,
        )


def _cache_headers(entry: Entry, scope: PrefixScope) -> Headers | None:
    """For engines that are told by headers whose prefixes a request may reuse."""
    return scope.headers if entry.facts.keeps_prefixes and not entry.facts.prompt_slots else None


def _is_not_cached(entry: Entry, scope: PrefixScope) -> bool:
    """True if no prefix is reused: its engine keeps none, or the caller asked for none."""
    keeps = entry.facts.keeps_prefixes
    return keeps is False or (keeps is True and not scope.is_used)


def _check_long_media(long: LongBody, entry: Entry, fields: peek.Fields) -> None:
    hosts = entry.config.media_hosts
    long.done(("media", entry.id), lambda: check_media(fields, hosts))


def _expect_tools(entry: Entry, raw: msgspec.Raw, *, is_operators: bool) -> None:
    """Raises NoAbility for tools that the model's engine would refuse, after the model was loaded."""
    if entry.engine.takes_functions_only and not is_operators:
        expect_functions(raw, entry.public_id)


def _name_in_engine(entry: Entry) -> str | None:
    """The model's name in requests to its engine; None: as the caller says it."""
    return entry.config.use_model_name or (entry.engine_name if entry.engine.checks_model_name else None)


def _stripped(entry: Entry) -> frozenset[str]:
    """The fields of callers that its engine is not sent."""
    stripped = entry.engine.peer_fields.union(entry.config.strip_params)
    return stripped | _CHOICES_AT_PROVIDERS if entry.facts.is_remote else stripped


def _is_several(count: msgspec.Raw | bytes | None) -> bool:
    return count is not None and bytes(count) not in (b"1", b"null")


def _query_model(head: Head) -> str | None:
    """The model that ?model= names."""
    found = parse_qs(head.query.decode("latin-1")).get("model")
    return None if found is None else found[-1]


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
