"""Which routes need a token beside the key, and the one place through which all of them pass.

Owns the table of governed routes: what operation each is, and which model it names. Every route that does more than
read is in one of the two tables; one that is in neither is refused while tokens are needed. The body is read once,
here, and the handler gets what was checked, without the token: no two readers can understand it differently. A field
is signed wherever it is, so it may only be where the handler reads it: in the query, or in the body.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl

from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.routing import Match, Route

from greenroom.config.sections.governance import Operation
from greenroom.dialects.ollama_request import pulled
from greenroom.errors import (
    AuditUnavailable,
    BadRequest,
    GreenroomError,
    ModelNotFound,
    NotAllowed,
    TokenMalformed,
    shown,
)
from greenroom.library.orders import DownloadOrder, OrderRules, read_order
from greenroom.server.admin.governed_models import GovernedModels, NeededOperation
from greenroom.server.admin.models.downloads import DownloadAsked
from greenroom.server.asgi import Message
from greenroom.server.inference.routes import name_before
from greenroom.telemetry.logs import get_logger
from greenroom.tenancy.governance.canonical_json import NotCanonical, read
from greenroom.tenancy.governance.gate import Done, GovernanceGate, GovernedCall
from greenroom.tenancy.governance.tokens import FIELD, HEADER
from greenroom.tenancy.keys import Caller

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_READING: Final = ("GET", "HEAD", "OPTIONS")
_PREFIX: Final = b"/api/v1/models/"

_log = get_logger("governance")


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A call as the table's rows read it."""

    fields: Mapping[str, Any]
    """Of the body and the query."""
    path: Mapping[str, str]
    raw_path: bytes


# None if this call needs no token after all.
Reading = Callable[[ReadCall], NeededOperation | None]


def _by_body(operation: Operation, *keys: str) -> Reading:
    """The model is named by one of these fields."""

    def needed(asked: ReadCall) -> NeededOperation:
        return NeededOperation(operation, _named(asked, *keys), _names(asked, "evictModel"))

    return needed


def _named(asked: ReadCall, *keys: str) -> str:
    """The name in one of these fields. Raises BadRequest."""
    named = [asked.fields[key] for key in keys if asked.fields.get(key) is not None]
    if len(named) != 1 or not isinstance(named[0], str):
        raise BadRequest(f"say which model as {keys[0]}, once", param=keys[0])
    return named[0]


def _load(asked: ReadCall) -> NeededOperation:
    """A load, which may fetch the model first."""
    said = asked.fields.get("quantization")
    return _loading(
        _named(asked, "modelId", "model"), _names(asked, "evictModel"), said if isinstance(said, str) else None
    )


def _native_load(asked: ReadCall) -> NeededOperation:
    return _loading(_named(asked, "model"), (), None)


def _loading(name: str, evicted: tuple[str, ...], quantization: str | None) -> NeededOperation:
    def read_fetch(rules: OrderRules) -> DownloadOrder:
        return read_order(rules, model=name, quantization=quantization)

    return NeededOperation("model-load", name, evicted, read_fetch=read_fetch, quantization=quantization)


def _by_path(operation: Operation, order: str) -> Reading:
    """The model is named by the path before the order, as the handler reads it."""

    def needed(asked: ReadCall) -> NeededOperation:
        return NeededOperation(operation, _in_path(asked, _PREFIX, order.encode()), _names(asked, "evict"))

    return needed


def _in_path(asked: ReadCall, prefix: bytes, order: bytes = b"") -> str:
    """The name between these parts of the path. Raises ModelNotFound."""
    raw = asked.raw_path
    name = name_before(raw[len(prefix) :], order) if raw.startswith(prefix) else None
    if name is None:
        raise ModelNotFound.named(asked.path["model_id"])
    return name


def _unload_one(asked: ReadCall) -> NeededOperation:
    """The model is named by the rest of the path, as the handler reads it."""
    return NeededOperation("model-unload", _in_path(asked, b"/api/models/unload/"))


def _unload_all(asked: ReadCall) -> NeededOperation:
    """Of every model, for which every rule must hold."""
    return NeededOperation("model-unload", None)


def _delete(asked: ReadCall) -> NeededOperation:
    return NeededOperation("model-delete", asked.path["model_id"])


def _download(asked: ReadCall) -> NeededOperation:
    """By the id of the hub or the address, whichever is given."""

    def read_fetch(rules: OrderRules) -> DownloadOrder:
        try:
            return DownloadAsked.model_validate(asked.fields).order(rules)
        except ValidationError as error:
            mistake = error.errors(include_url=False)[0]
            where = ".".join(map(str, mistake["loc"]))
            raise BadRequest(f"{where}: {mistake['msg']}", param=where) from None

    return NeededOperation("model-download", _named(asked, "model", "url"), read_fetch=read_fetch)


def _pull(asked: ReadCall) -> NeededOperation:
    """By the id of the hub, however it is written."""
    name = pulled(_named(asked, "model", "name"))
    return NeededOperation("model-download", name, read_fetch=lambda rules: read_order(rules, model=name))


def _flush(asked: ReadCall) -> NeededOperation:
    model = asked.fields.get("modelId")
    if model is not None and not isinstance(model, str):
        raise BadRequest("modelId must be a text", param="modelId")
    return NeededOperation("cache-flush", model)


def _updates(asked: ReadCall, model: str | None) -> NeededOperation:
    """An update, which may fetch the weights first."""
    repo, revision = asked.fields.get("model_repo_id"), asked.fields.get("revision")

    def read_fetch(rules: OrderRules) -> DownloadOrder:
        if not isinstance(repo, str):
            raise BadRequest("model_repo_id says where the weights come from", param="model_repo_id")
        return read_order(rules, model=repo, revision=revision if isinstance(revision, str) else None)

    return NeededOperation("model-update", model, read_fetch=read_fetch)


def _update_one(asked: ReadCall) -> NeededOperation:
    """The model is named by the path before the order."""
    return _updates(asked, _in_path(asked, _PREFIX, b"/update"))


def _rollback(asked: ReadCall) -> NeededOperation:
    return NeededOperation("model-update", _in_path(asked, _PREFIX, b"/rollback"), is_rollback=True)


def _update(asked: ReadCall) -> NeededOperation:
    """The model is named by the query; without that it is the configured one."""
    return _updates(asked, asked.fields.get("model"))


def _reload(asked: ReadCall) -> NeededOperation:
    return NeededOperation("config-reload", None)


def _lease(asked: ReadCall) -> NeededOperation | None:
    """A lease that does not wait takes free memory only; any other may evict models, and the scheduler says which."""
    wait_s = asked.fields.get("wait_s", 0)
    takes_free = isinstance(wait_s, int | float) and not isinstance(wait_s, bool) and wait_s == 0
    return None if takes_free else NeededOperation("model-unload", None, unbound=("id", "pid", "holder"))


def _names(asked: ReadCall, key: str) -> tuple[str, ...]:
    """The models that a field names, if it names any; the handler refuses what is no name."""
    value = asked.fields.get(key)
    return tuple(one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str))


_ONE: Final = "/api/v1/models/{model_id:path}"
GOVERNED: Final[Mapping[tuple[str, str], Reading]] = {
    ("POST", "/v1/models/load"): _load,
    ("POST", "/v1/models/unload"): _by_body("model-unload", "modelId", "model"),
    ("POST", "/v1/models/download"): _download,
    ("DELETE", "/v1/models/inventory/{model_id:path}"): _delete,
    ("POST", "/models/load"): _native_load,
    ("POST", "/models/unload"): _by_body("model-unload", "model"),
    ("GET", "/unload"): _unload_all,
    ("POST", "/api/models/unload"): _unload_all,
    ("POST", "/api/models/unload/{model_id:path}"): _unload_one,
    ("POST", "/api/pull"): _pull,
    ("DELETE", "/api/delete"): _by_body("model-delete", "model", "name"),
    ("POST", "/v1/cache/flush"): _flush,
    ("POST", f"{_ONE}/load"): _by_path("model-load", "/load"),
    # Into host memory: a load that stops half way.
    ("POST", f"{_ONE}/prepare"): _by_path("model-load", "/prepare"),
    ("POST", f"{_ONE}/unload"): _by_path("model-unload", "/unload"),
    # Off the GPU: an unload that stops half way.
    ("POST", f"{_ONE}/sleep"): _by_path("model-unload", "/sleep"),
    ("POST", "/update-model"): _update,
    ("POST", f"{_ONE}/update"): _update_one,
    ("POST", f"{_ONE}/rollback"): _rollback,
    ("POST", f"{_ONE}/pin"): _reload,
    ("POST", "/api/v1/reload"): _reload,
    ("PUT", "/api/v1/config"): _reload,
    ("POST", "/api/v1/leases"): _lease,
}
# Paths whose GET changes something, which is llama-swap's way.
ACTING_GETS: Final = frozenset(path for method, path in GOVERNED if method == "GET")
# They change no model: requests to models that are answered later, the end of a request, lease or download, a look.
UNGOVERNED: Final = frozenset(
    {
        ("POST", "/v1/jobs"),
        ("DELETE", "/v1/jobs/{job_id}"),
        ("DELETE", "/v1/models/download/{job_id}"),
        ("DELETE", "/api/v1/leases/{lease_id}"),
        ("POST", "/api/v1/leases/{lease_id}/renew"),
        ("DELETE", "/api/v1/requests/{request_id}"),
        ("POST", "/api/v1/explain"),
        ("POST", "/api/v1/simulate"),
        ("POST", "/api/show"),
    }
)


@dataclass(frozen=True, slots=True)
class _Row:
    """How a call is read. `in_query` are the parameters that its handler reads from the query."""

    reading: Reading
    path: Mapping[str, str]
    in_query: frozenset[str]


class GovernedRoutes:
    def __init__(self, routes: Sequence[Any], governance: Callable[[], GovernanceGate], models: GovernedModels) -> None:
        self._routes = routes
        self._governance = governance
        self._models = models

    async def __call__(self, app: Callable[..., Awaitable[None]], scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer, if the call needs no token or has one. Raises the error to answer with."""
        only_reads = scope["method"] in _READING and scope["path"] not in ACTING_GETS
        found = None if only_reads else self._row(scope)
        if found is None:
            await app(scope, receive, send)
            return
        message = await receive()
        if message["type"] != "http.request":
            return
        try:
            call, body = self._read(scope, found, message.get("body", b""))
        except GreenroomError as refusal:
            await self._governance().refused(_about(scope), refusal)
            raise
        passed_on = _body_again(message, body, receive)
        if call is None:
            await app(scope, passed_on, send)
        else:
            await self._with_token(call, app, scope, passed_on, send)

    def _read(self, scope: Scope, row: _Row, data: bytes) -> tuple[GovernedCall | None, dict[str, Any]]:
        """The call, or None if it needs no token, and its body without the token. Raises GreenroomError.

        Once it is judged, the handler finds in the scope what it may fetch.
        """
        body, token = _without_token(scope, data)
        fields = {**body, **_query(scope, body, row.in_query)}
        needed = row.reading(ReadCall(fields, row.path, scope["raw_path"]))
        if needed is None:
            return None, body

        async def find_done() -> tuple[Done, ...]:
            judged = await self._models.judged(needed, fields, scope["state"]["caller"])
            scope["state"]["fetch"] = judged.fetch
            return judged.done

        bound = {key: value for key, value in fields.items() if key not in needed.unbound}
        return GovernedCall(needed.operation, needed.model, bound, token, find_done, _about(scope)), body

    async def _with_token(
        self, call: GovernedCall, app: Callable[..., Awaitable[None]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        governance, status = self._governance(), None
        await governance.permit(call)

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, told)
        finally:
            try:
                await governance.answered(call, status)
            except AuditUnavailable as error:
                _log.error("outcome not written to the audit log", request=call.about["request"], error=error.message)

    def _row(self, scope: Scope) -> _Row | None:
        """How to read this call; None if it needs no token. Raises NotAllowed."""
        for route in self._routes:
            assert isinstance(route, Route)
            match, child = route.matches(scope)
            if match is Match.FULL:
                key = (scope["method"], route.path)
                if key in UNGOVERNED:
                    return None
                if key not in GOVERNED:
                    raise NotAllowed(f"{key[0]} {route.path} cannot be used while operations are signed.")
                assert isinstance(route, APIRoute)
                in_query = frozenset(one.alias for one in route.dependant.query_params)
                return _Row(GOVERNED[key], child["path_params"], in_query)
        # No route: it is answered 404 or 405.
        return None


def _about(scope: Scope) -> dict[str, str]:
    """For the audit log."""
    state = scope.get("state", {})
    caller = state.get("caller")
    return {
        "request": str(state.get("request_id", "")),
        "route": f"{scope['method']} {scope['path'][:256]}",
        "key": caller.name if isinstance(caller, Caller) else "",
    }


def _without_token(scope: Scope, data: bytes) -> tuple[dict[str, Any], Any]:
    """The fields of the body, and the token beside them or in the header. Raises BadRequest or TokenMalformed."""
    try:
        body = read(data) if data else {}
    except NotCanonical as error:
        raise BadRequest(f"The body cannot be read: {error}.") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    token = body.pop(FIELD, None)
    headers = [value for name, value in scope["headers"] if name == HEADER.encode()]
    if len(headers) + (token is not None) > 1:
        raise TokenMalformed("The call has more than one token.")
    return body, headers[0].decode("latin-1").strip(" \t") if headers else token


def _query(scope: Scope, body: Mapping[str, Any], read_there: frozenset[str]) -> dict[str, str]:
    """The parameters of the query, which are signed as fields of the body.

    Raises BadRequest if a field is there twice, or where the handler does not read it.
    """
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    found = dict(pairs)
    if len(found) != len(pairs) or not found.keys().isdisjoint(body):
        raise BadRequest("A field is there twice, in the query and the body.")
    if stray := next((name for name in found if name not in read_there), None):
        raise BadRequest(f"{shown(stray)} is not read from the query here; say it in the body.")
    if stray := next((name for name in body if name in read_there), None):
        raise BadRequest(f"{shown(stray)} is read from the query here, not from the body.", param=stray)
    return found


def _body_again(message: Message, body: Mapping[str, Any], receive: Receive) -> Receive:
    """Gives the handler the body that was read, then what follows it."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {**message, "body": json.dumps(body).encode() if message.get("body") else b""}

    return again
