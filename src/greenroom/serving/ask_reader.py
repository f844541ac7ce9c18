"""Reads what a caller asks for: from a JSON body, a form, or a path that is passed through.

Owns the reading of `x_*` fields and headers, which are never forwarded. Raises the error to answer with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from urllib.parse import parse_qs

import msgspec

from greenroom.access.keys import OTHER, Caller, Tenants, cap
from greenroom.access.limits import Limiter, QuotaHold
from greenroom.access.profiles import Profiles, RequestProfile
from greenroom.base.names import public_name
from greenroom.config.live import GatewayState
from greenroom.config.schema import Ability
from greenroom.core.model import NO_TENANT, ModelId, TenantId
from greenroom.dialects.chat import CHAT_PATH
from greenroom.dialects.dialect import Route
from greenroom.dialects.openai.requests import CHAT, TOOLS, expect_functions
from greenroom.engines.base import UsageSource
from greenroom.errors import BadRequest, BodyTooLarge, ModelNotFound, NoAbility, NotAllowed, PostOnly
from greenroom.http.exchange import Exchange
from greenroom.http.request import Head
from greenroom.library.records import Version
from greenroom.runtime.adhoc_model import NO_OPTIONS, ModelOptions
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.resolver import Resolver
from greenroom.serving.answers import AS_BASE64, AS_URL, RESPONSE_FORMAT, PictureUrls, expect_no_stream
from greenroom.serving.ask import (
    CLIENT_HEADER,
    TENANT_HEADER,
    Ask,
    Settings,
    budget_s_of,
    client_named,
    client_of,
    heartbeat_of,
    kept_alive_s,
    said_in,
    said_priority,
    said_tenant,
    set_by_profile,
    smaller,
    wants_facts,
)
from greenroom.serving.body import model_options, multipart, peek
from greenroom.serving.body.long_body import LongBody
from greenroom.serving.body.media import check_media, is_upload
from greenroom.serving.prefix_cache import ONLY_SCOPE, PrefixSalts, cache_scope
from greenroom.serving.routes import (
    GENERATE,
    UPSTREAM_PREFIX,
    has_one_path,
    is_open,
    split_model,
)
from greenroom.serving.rungs import RungReader
from greenroom.serving.tasks import TaskRoute, Tasks
from greenroom.serving.translating import check_native, check_whole, translate_ask
from greenroom.serving.versioned import versioned_model

_EMPTY: Final[frozenset[str]] = frozenset()
_READING: Final = (b"GET", b"HEAD")
_IF_ASKED: Final = UsageSource.ASK
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


class AskReader:
    def __init__(
        self,
        resolver: Resolver,
        catalog: Catalog,
        tenants: Tenants,
        salts: PrefixSalts,
        gateway: GatewayState,
        picture_urls: PictureUrls | None = None,
    ) -> None:
        """Without `picture_urls` engines are asked for what the caller asked for."""
        self._resolver = resolver
        self._catalog = catalog
        self._tenants = tenants
        self._salts = salts
        self._gateway = gateway
        # By model, so that a new revision takes the place of the old one.
        self._rewrites: dict[ModelId, _Rewrites] = {}
        # None while nothing is limited, and while there are no profiles.
        self.limiter: Limiter | None = None
        self.profiles: Profiles | None = None
        # None while there are none.
        self.tasks: Tasks | None = None
        self._picture_urls = picture_urls

    def read(
        self, exchange: Exchange, route: Route, caller: Caller, settings: Settings, long: LongBody | None = None
    ) -> Ask:
        """A JSON request; `long` is its body if it is long. Raises NeedsDiskLookup if only the disk tells which model
        it names, and Pending where `long` is given."""
        head = exchange.head
        _expect_post(head)
        may_be_meant = route is GENERATE or route.is_native or self.profiles is not None
        meant = self._meaning(head, route, caller) if may_be_meant else None
        peeked = peek.peek(exchange.body.read(), meant) if long is None else peek.peek_long(long, meant)
        if peeked.client_id is not None:
            head.client = peeked.client_id
        if (meant_by := route.dialect.meant) is not None:
            peeked.model = meant_by(peeked.model, self._seen_by(caller))
        if self.tasks is not None and (task := self.tasks.find(peeked.model)) is not None:
            return self._read_task(exchange, route, caller, settings, peeked, task)
        return self._read_json(exchange, route, caller, settings, peeked, peeked.model)

    # Functions inside of others cost their caller something at every call, so they are made in functions of their own.

    def _meaning(self, head: Head, route: Route, caller: Caller) -> Callable[[str | None], str | None]:
        return lambda client: self._meant(head, route, caller, client)

    def _seen_by(self, caller: Caller) -> Callable[[str], bool]:
        return lambda name: (
            self._resolver.is_seen(name, caller) or (self.tasks is not None and self.tasks.is_task(name, caller.sees))
        )

    def _read_task(
        self,
        exchange: Exchange,
        route: Route,
        caller: Caller,
        settings: Settings,
        peeked: peek.BodyFields,
        task: TaskRoute,
    ) -> Ask:
        def read_for(name: str) -> Ask:
            # Each is read for itself: engines have different dialects.
            return self._read_json(exchange, route, caller, settings, peek.copied(peeked), name, task)

        assert self.tasks is not None
        sees, wants_json = self.narrowed(exchange.head, caller).sees, peek.wants_json(peeked.fields)
        ladder = self.tasks.ladder(task, sees, route.ability, wants_json=wants_json)
        return self._of_task(exchange, caller, RungReader(ladder, read_for))

    def _read_json(
        self,
        exchange: Exchange,
        route: Route,
        caller: Caller,
        settings: Settings,
        peeked: peek.BodyFields,
        name: str,
        task: TaskRoute | None = None,
    ) -> Ask:
        options = model_options.of_json(peeked.fields) if self._resolver.takes_options else NO_OPTIONS
        ask = self._ask(
            exchange,
            route,
            caller,
            settings,
            name,
            peeked.priority,
            options=options,
            target=route.sent_to,
            stream=peeked.stream if route.translate is None else route.is_stream(peeked.stream, peeked.fields),
            task=task,
        )
        if peeked.budget_s is not None:
            ask.budget_s = smaller(ask.budget_s, peeked.budget_s)
        if peeked.keep_alive_s is not None:
            ask.keep_alive_s = kept_alive_s(ask, peeked.keep_alive_s, settings)
        ask.peeked = peeked
        if route.translate is not None:
            translate_ask(ask, peeked, route.translate, ask.asked_as if task is None else ask.entry.public_id)
        elif route.is_native:
            check_native(ask, peeked, exchange.body)
        if ask.charge is not None and ask.charge.counts_tokens():
            ask.charge.tokens_asked = peek.tokens_asked(peeked.fields)
        if peeked.long is not None:
            self._check_long_media(ask, peeked, peeked.long)
        elif peek.has_parts(peeked.fields):
            check_media(peeked.fields, ask.entry.config.media_hosts)
        self._rewrite(ask, peeked, exchange.head, task)
        if route.check is not None:
            route.check.check(peeked.fields, len(exchange.body), ask.puts, ask.drops)
            if route.check is CHAT and (raw := peeked.fields.get(TOOLS)) is not None:
                self._expect_tools(ask, raw)
        if options is not NO_OPTIONS:
            ask.drops = ask.drops | model_options.FIELDS
        return ask

    def _expect_tools(self, ask: Ask, raw: msgspec.Raw) -> None:
        """Raises NoAbility for tools that the model's engine would refuse, after the model was loaded."""
        is_operators = TOOLS in ask.puts or TOOLS in ask.drops
        if ask.entry.engine.takes_functions_only and not is_operators:
            expect_functions(raw, ask.entry.public_id)

    def _check_long_media(self, ask: Ask, peeked: peek.BodyFields, long: LongBody) -> None:
        fields, hosts = peeked.fields, ask.entry.config.media_hosts
        long.done(("media", ask.entry.id), lambda: check_media(fields, hosts))

    def _rewrite(self, ask: Ask, peeked: peek.BodyFields, head: Head, task: TaskRoute | None) -> None:
        """Note which fields the engine is sent in place of the caller's, or not at all."""
        route = ask.route
        ask.puts, ask.drops = self._rewrites_of(ask.entry)
        if task is not None:
            ask.puts = {"model": msgspec.json.encode(ask.entry.public_id), **ask.puts, **task.puts}
        if ask.profile is not None:
            set_by_profile(ask, ask.profile, peeked.fields)
        if ask.entry.facts.prompt_slots:
            ask.spreads = any(_is_several(ask.puts.get(name, peeked.fields.get(name))) for name in _COUNTS)
        if ask.stream and route.is_text and ask.entry.engine.usage_source is _IF_ASKED:
            with_usage, asked = peek.ask_for_usage(peeked.fields)
            ask.drop_usage = not asked
            if with_usage is not None:
                ask.puts = {**ask.puts, "stream_options": with_usage}
        if route.makes_pictures and self._as_urls(ask, head, peek.text(peeked.fields, RESPONSE_FORMAT)):
            ask.puts = {**ask.puts, RESPONSE_FORMAT: msgspec.json.encode(AS_BASE64)}
        salt_field = ask.entry.engine.salt_field
        # Tokens may be counted by a chat, whose prefix is kept as well.
        has_prompt = route.has_prompt or ask.target == CHAT_PATH
        if salt_field is not None and has_prompt and ask.cache_headers is not None:
            salt = self._salts.of(ask.scope, peeked.fields.get(salt_field), ask.entry.public_id)
            ask.puts, ask.cache_headers = {**ask.puts, salt_field: salt}, None

    def _meant(self, head: Head, route: Route, caller: Caller, client: str | None) -> str | None:
        """The model of a JSON request that names none; `client` is the one that its body names. Raises BadRequest."""
        head.client = client
        if route is GENERATE:
            return versioned_model(self._gateway.config, _query_model(head), self.narrowed(head, caller))
        profile = self._profile_of(head, caller)
        if profile is not None and profile.default_model is not None:
            return profile.default_model
        if not route.is_native:
            return None
        if (name := self._gateway.config.server.default_model) is None:
            raise BadRequest("The body names no model, and there is no server.default_model.", param="model")
        return name

    def narrowed(self, head: Head, caller: Caller) -> Caller:
        """The caller, limited to the models that the profile of this request allows."""
        profile = self._profile_of(head, caller)
        return caller if profile is None else profile.narrowed(caller)

    def _profile_of(self, head: Head, caller: Caller) -> RequestProfile | None:
        """By what is known so far of the request."""
        if self.profiles is None:
            return None
        return self.profiles.of(caller.name, self.tenant_of(head, caller), client_named(head))

    def version_of(self, model: str) -> Version | None:
        """The version that this model serves now."""
        entry = self._catalog.find(model)
        return None if entry is None else entry.version

    async def read_form(self, exchange: Exchange, route: Route, caller: Caller, settings: Settings) -> Ask:
        """A form with a file. Large forms are read in turns, so that other requests are served meanwhile."""
        _expect_post(exchange.head)
        form = await multipart.scan_in_turns(exchange.body, exchange.head.get(b"content-type"))
        exchange.head.client = form.client_id
        narrowed = self.narrowed(exchange.head, caller)
        if self.tasks is not None and (task := self.tasks.find(form.model)) is not None:

            def read_for(name: str) -> Ask:
                return self._read_form(exchange, route, caller, settings, form, name, NO_OPTIONS, task)

            ladder = self.tasks.ladder(task, narrowed.sees, route.ability)
            return self._of_task(exchange, caller, RungReader(ladder, read_for))
        options = model_options.of_form(form.fields) if self._resolver.takes_options else NO_OPTIONS
        # So that it is found without a look at the disk.
        await self._resolver.named(form.model, options, narrowed)
        return self._read_form(exchange, route, caller, settings, form, form.model, options)

    def _read_form(
        self,
        exchange: Exchange,
        route: Route,
        caller: Caller,
        settings: Settings,
        form: multipart.MultipartForm,
        name: str,
        options: ModelOptions,
        task: TaskRoute | None = None,
    ) -> Ask:
        ask = self._ask(
            exchange, route, caller, settings, name, form.priority, options=options, stream=form.stream, task=task
        )
        ask.budget_s = smaller(ask.budget_s, form.budget_s)
        if task is None or form.keep_alive_s is not None:
            ask.keep_alive_s = kept_alive_s(ask, form.keep_alive_s, settings)
        config = ask.entry.config
        given = config.set_params if task is None else {**config.set_params, **task.section.set_params}
        form.expect(field for field in route.form if field not in given)
        puts = {field: _as_text(value) for field, value in given.items()}
        drops = _stripped(ask.entry) | (_EMPTY if options is NO_OPTIONS else model_options.FIELDS)
        if route.makes_pictures and self._as_urls(ask, exchange.head, form.fields.get(RESPONSE_FORMAT)):
            puts[RESPONSE_FORMAT] = AS_BASE64
        told = _name_in_engine(ask.entry) or (None if task is None else ask.entry.public_id)
        ask.rewritten = lambda: form.rewrite(told, drop=drops, put=puts)
        ask.form_n = puts.get("n", None if "n" in drops else form.fields.get("n"))
        return ask

    def _of_task(self, exchange: Exchange, caller: Caller, rungs: RungReader) -> Ask:
        """A request for a task, which reads as one to the first of its models until one is granted."""
        head, charge, meters = exchange.head, None, None
        if self.limiter is not None:
            assert head.charge is None or isinstance(head.charge, QuotaHold)
            models = [self._catalog.limited_as(one.entry) for one in rungs.asks.values()]
            charge, meters = self.limiter.charge_of_any(head.charge, caller, said_tenant(head), models)
        ask = rungs.ask(charge, meters)
        head.asked = ask.entry.id
        return ask

    def read_upstream(
        self, exchange: Exchange, route: Route, caller: Caller, settings: Settings, long: LongBody | None = None
    ) -> Ask:
        """A pass-through: the path after the model's id goes to its engine unchanged.

        Raises NotAllowed for control paths of the engine, also to admins: its state is the scheduler's. Raises Pending
        where `long` is given: its body.
        """
        head = exchange.head
        if not caller.admin:
            # Again: the models may have changed while the body came.
            self.check_open(head, caller)
        name, path = self._upstream(head, caller)
        self._check_passed(head, name, path)
        if settings.governed and (head.method not in _READING or head.upgrade is not None):
            self._check_governed(head, name, path)
        target = path + (b"?" + head.query if head.query else b"")
        ask = self._ask(exchange, route, caller, settings, name, None, target=target)
        if ask.entry.engine.fetches_media and not is_upload(head.get(b"content-type")):
            if len(exchange.body) > settings.body_max:
                raise BodyTooLarge(f"The body has more than {settings.body_max:,} bytes.")
            check_whole(ask, exchange.body, long, ask.entry.engine.peer_fields)
        ask.rewritten = lambda: exchange.body
        return ask

    def _check_passed(self, head: Head, name: str, path: bytes) -> None:
        entry = self._catalog.find(name)
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

    def check_open(self, head: Head, caller: Caller) -> None:
        """Raises NotAllowed unless the model opens this path to every key, or ModelNotFound."""
        name, path = self._upstream(head, caller)
        entry = self._catalog.find(name)
        if entry is None or not is_open(path, entry.config.routes):
            raise NotAllowed(
                f"The key {caller.name} may not use {path.decode('ascii', 'replace')} of {name}: its `routes` do not "
                "name it. Use a key with `admin: true`."
            )

    def _check_governed(self, head: Head, name: str, path: bytes) -> None:
        """Raises NotAllowed unless the model or its engine says that this path only answers: no token permits more."""
        entry = self._catalog.find(name)
        passed = () if entry is None else (*entry.config.routes, *(entry.engine.upstream_paths or ()))
        if not is_open(path, passed) or not has_one_path(head.upgrade):
            raise NotAllowed(
                f"{path.decode('ascii', 'replace')} of {name} may control its engine, and operations are signed here: "
                "add it to the model's `routes` if it only answers."
            )

    def _upstream(self, head: Head, caller: Caller) -> tuple[str, bytes]:
        """The model named after /upstream/, and the path for its engine."""
        caller = self.narrowed(head, caller)

        def is_known(name: str) -> bool:
            entry = self._catalog.find(name)
            return entry is not None and caller.sees(entry.base_id)

        found = split_model(head.path[len(UPSTREAM_PREFIX) :], is_known)
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
        options: ModelOptions = NO_OPTIONS,
        target: bytes | None = None,
        stream: bool = False,
        task: TaskRoute | None = None,
    ) -> Ask:
        head = exchange.head
        profile = self._profile_of(head, caller)
        entry = self._resolver.find(name, options, caller if profile is None else profile.narrowed(caller))
        head.asked = public_name(entry.id)
        if route.ability is not None:
            _check_ability(entry, route.ability)
        said = said_in(head)
        tenant = caller.tenant or self._tenants.name(said.get(TENANT_HEADER))
        isolation = entry.config.isolate_tenants
        kept_for = NO_TENANT if isolation == "off" else tenant
        scope = cache_scope(kept_for, said) if kept_for or said else ONLY_SCOPE
        if scope.tenant == OTHER and caller.tenant is None:
            # Several tenants have this name.
            scope.is_used = False
        ask = Ask(
            route,
            self._resolver.instances.of(entry, tenant) if isolation == "process" else entry,
            name if task is None else task.name,
            head.target if target is None else target,
            stream,
            _priority(
                said_priority(priority, said),
                entry.spec.priority if task is None else task.priority_or(entry.spec.priority),
                caller,
                profile,
            ),
            tenant,
            head.client or client_of(said.get(CLIENT_HEADER, b"")),
            heartbeat_of(said, settings.heartbeat),
            scope,
            exchange.body,
            budget_s_of(said),
            caller,
        )
        if profile is not None:
            ask.profile = profile
            ask.keep_alive_s = kept_alive_s(ask, None, settings)
        if task is not None and task.section.keep_alive_s is not None:
            ask.keep_alive_s = kept_alive_s(ask, task.section.keep_alive_s, settings)
        if self.limiter is not None and task is None:
            admitted = head.charge
            assert admitted is None or isinstance(admitted, QuotaHold)
            model = self._catalog.limited_as(entry)
            ask.charge = self.limiter.charge_of(admitted, caller, said.get(TENANT_HEADER), model)
        if entry.facts.keeps_prefixes and not entry.facts.prompt_slots:
            ask.cache_headers = ask.scope.headers
        if (facts := said.get(b"x-facts")) is not None:
            ask.wants_facts = wants_facts(facts)
        return ask

    def tenant_of(self, head: Head, caller: Caller) -> TenantId:
        """The tenant that a refused request is counted for; none if it names one that cannot be."""
        try:
            return caller.tenant or self._tenants.name(said_tenant(head))
        except BadRequest:
            return NO_TENANT

    def _as_urls(self, ask: Ask, head: Head, said: str | None) -> bool:
        """Have its pictures replaced if it asks for URLs. True if the engine has to be told to send them instead."""
        config = ask.entry.config
        if self._picture_urls is None or config.set_params.get(RESPONSE_FORMAT, said) != AS_URL:
            return False
        expect_no_stream(ask.stream)
        ask.remade = self._picture_urls.for_request(head, ask.tenant, ask.entry.public_id)
        return RESPONSE_FORMAT not in config.strip_params

    def _rewrites_of(self, entry: Entry) -> tuple[dict[str, bytes], frozenset[str]]:
        """The fields that the operator sets and strips for this model, encoded once."""
        known = self._rewrites.get(entry.id)
        if known is None or known[0] is not entry:
            config = entry.config
            puts = {name: msgspec.json.encode(value) for name, value in config.set_params.items()}
            if (name := _name_in_engine(entry)) is not None:
                puts["model"] = msgspec.json.encode(name)
            if len(self._rewrites) > 2 * len(self._catalog):
                # Of models that are no longer there.
                self._rewrites = {one.id: kept for one in self._catalog if (kept := self._rewrites.get(one.id))}
            known = self._rewrites[entry.id] = (entry, puts, _stripped(entry) or _EMPTY)
        return known[1], known[2]


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


def _priority(said: int | None, default: int, caller: Caller, profile: RequestProfile | None) -> int:
    """As the request says, else by profile, model or task; never better than profile and key allow."""
    if profile is not None:
        said = profile.priority(said, default)
    return cap(default if said is None else said, caller.priority_max)
