"""The one place through which all calls pass that need a token beside the key.

A route's declaration says what operation a call is, and which model it names. The body is read once, here, and the
handler gets what was checked, without the token: no two readers can understand it differently. A field is signed
wherever it is, so it may only be where the handler reads it: in the query, or in the body.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any
from urllib.parse import parse_qsl

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from greenroom.access.keys import Caller
from greenroom.api.declared import DeclaredRoute, SignedCall, Signing, declared_routes, route_of
from greenroom.errors import AuditUnavailable, BadRequest, GreenroomError, TokenMalformed, shown
from greenroom.features.governance.canonical_json import NotCanonical, read
from greenroom.features.governance.gate import Done, GovernanceGate, GovernedCall
from greenroom.features.governance.governed_models import GovernedModels
from greenroom.features.governance.tokens import FIELD, HEADER
from greenroom.telemetry.logs import get_logger

_log = get_logger("governance")


class GovernedRoutes:
    """The application behind its routes' signatures; while no operations are signed, the application alone."""

    def __init__(self, app: FastAPI, gate: GovernanceGate, models: GovernedModels) -> None:
        self.routes = declared_routes(app)
        self._app = app
        self._gate = gate
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer, if the call needs no token or has one. Raises the error to answer with."""
        found = None if self._gate.keys is None else route_of(self.routes, scope)
        if found is None or (signed := found[0].declared.signed) is None:
            await self._app(scope, receive, send)
            return
        message = await receive()
        if message["type"] != "http.request":
            return
        try:
            call, body = self._read(scope, *found, signed, message.get("body", b""))
        except GreenroomError as refusal:
            await self._gate.refused(_about(scope), refusal)
            raise
        passed_on = _body_again(message, body, receive)
        if call is None:
            await self._app(scope, passed_on, send)
        else:
            await self._with_token(call, scope, passed_on, send)

    def _read(
        self, scope: Scope, route: DeclaredRoute, routed: Scope, signed: Signing, data: bytes
    ) -> tuple[GovernedCall | None, dict[str, Any]]:
        """The call, or None if it needs no token, and its body without the token. Raises GreenroomError. Once it is
        judged, the handler finds in the scope what it may fetch."""
        body, token = _without_token(scope, data)
        fields = {**body, **_query(scope, body, {one.alias for one in route.dependant.query_params})}
        needed = signed(SignedCall(fields, routed))
        if needed is None:
            return None, body

        async def find_done() -> tuple[Done, ...]:
            done, scope["state"]["fetch"] = await self._models.judged(needed, fields, scope["state"]["caller"])
            return done

        bound = {key: value for key, value in fields.items() if key not in needed.unbound}
        return GovernedCall(needed.operation, needed.model, bound, token, find_done, _about(scope)), body

    async def _with_token(self, call: GovernedCall, scope: Scope, receive: Receive, send: Send) -> None:
        status = None
        await self._gate.permit(call)

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, told)
        finally:
            try:
                await self._gate.answered(call, status)
            except AuditUnavailable as error:
                _log.error("outcome not written to the audit log", request=call.about["request"], error=error.message)


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


def _query(scope: Scope, body: Mapping[str, Any], read_there: Set[str]) -> dict[str, str]:
    """The parameters of the query, which are signed as fields of the body. Raises BadRequest if a field is there twice,
    or where the handler does not read it."""
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
