"""Routes of the management API, declared beside their handlers: path, permission, and how a call is signed.

Owns what a declaration holds, and how the model of a signed call is read. A route that changes something cannot be
declared without saying whether it is signed. Routes cost next to nothing until they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Match, compile_path
from starlette.types import Scope

from greenroom.access.keys import Permission
from greenroom.config.sections.governance import Operation
from greenroom.errors import BadRequest, ModelNotFound
from greenroom.library.orders import DownloadOrder, OrderRules
from greenroom.serving.routes import name_before

Handler = TypeVar("Handler", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class NeededOperation:
    """The operation that a call is, the model it names, and models that leave for it.

    `read_fetch` reads what it may fetch; it raises BadRequest if it can fetch nothing of that name.
    """

    operation: Operation
    model: str | None
    evicted: tuple[str, ...] = ()
    unbound: tuple[str, ...] = ()
    """Fields that no token is signed for, because they are known only when the call is made."""
    read_fetch: Callable[[OrderRules], DownloadOrder] | None = None
    quantization: str | None = None
    """Which of the models that its name could mean; the handler of few routes reads it."""
    is_rollback: bool = False
    """An update to weights that are kept: those of the field `version`, else the last."""


@dataclass(frozen=True, slots=True)
class SignedCall:
    """A call whose operation may need a token."""

    fields: Mapping[str, Any]
    """Of the body and the query."""
    scope: Scope

    def named(self, *keys: str) -> str:
        """The name in one of these fields. Raises BadRequest."""
        named = [self.fields[key] for key in keys if self.fields.get(key) is not None]
        if len(named) != 1 or not isinstance(named[0], str):
            raise BadRequest(f"say which model as {keys[0]}, once", param=keys[0])
        return named[0]

    def names(self, key: str) -> tuple[str, ...]:
        """The models that a field names, if it names any; the handler refuses what is no name."""
        value = self.fields.get(key)
        return tuple(one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str))

    def text(self, key: str) -> str | None:
        """A field that the handler refuses if it is no text."""
        value = self.fields.get(key)
        return value if isinstance(value, str) else None

    def in_path(self) -> str:
        """The model named by the path. Raises ModelNotFound."""
        return name_in_path(self.scope)


def around_name(scope: Scope) -> tuple[bytes, bytes]:
    """What the path of a call's route has before the name of a model and behind it."""
    before, _, behind = scope["route"].path.partition("{model_id:path}")
    return before.encode(), behind.encode()


def name_in_path(scope: Scope) -> str:
    """The model that a path names, known or not. Raises ModelNotFound if that cannot be a name."""
    raw, (before, order) = scope["raw_path"], around_name(scope)
    name = name_before(raw[len(before) :], order) if raw.startswith(before) else None
    if name is None:
        raise ModelNotFound.named(scope["path_params"]["model_id"])
    return name


# What operation a call is; None if this one needs no token after all.
Signing = Callable[[SignedCall], NeededOperation | None]
# It changes no model: a request to models that is answered later, the end of a request, lease or download, a look.
NEVER: Final = None


def by_body(operation: Operation, *keys: str) -> Signing:
    """The model is named by one of these fields."""
    return lambda call: NeededOperation(operation, call.named(*keys), call.names("evictModel"))


def by_path(operation: Operation) -> Signing:
    """The model is named by the path."""
    return lambda call: NeededOperation(operation, call.in_path(), call.names("evict"))


def of_all(operation: Operation) -> Signing:
    """It names no model: every rule must hold."""
    return lambda call: NeededOperation(operation, None)


@dataclass(frozen=True, slots=True)
class Declaration:
    method: str
    path: str
    needs: Permission
    signed: Signing | None
    options: Mapping[str, Any]
    """Of the framework."""

    def __call__(self, handler: Handler) -> Handler:
        vars(handler).setdefault("declared", []).append(self)
        return handler


def get(path: str, *, needs: Permission, signed: Signing | None = NEVER, **options: Any) -> Declaration:
    """A route that only reads; one that changes something is `signed`."""
    return Declaration("GET", path, needs, signed, options)


def post(path: str, *, needs: Permission, signed: Signing | None, **options: Any) -> Declaration:
    return Declaration("POST", path, needs, signed, options)


def put(path: str, *, needs: Permission, signed: Signing | None, **options: Any) -> Declaration:
    return Declaration("PUT", path, needs, signed, options)


def delete(path: str, *, needs: Permission, signed: Signing | None, **options: Any) -> Declaration:
    return Declaration("DELETE", path, needs, signed, options)


class Routes:
    """Handlers of one part of the API, each below its declaration."""

    in_schema: ClassVar[bool] = True
    """False: they are not in the OpenAPI document, because their shapes are those of another program."""

    def add_to(self, app: FastAPI) -> None:
        for name, member in vars(type(self)).items():
            for one in getattr(member, "declared", ()):
                options = {"include_in_schema": self.in_schema, **one.options}
                app.router.add_api_route(one.path, getattr(self, name), methods=[one.method], **options)
                route = app.routes[-1]
                assert isinstance(route, DeclaredRoute)
                route.declared = one


class DeclaredRoute(APIRoute):
    """A route that is analysed when it first answers, or is first described. Until then it can only be matched.

    The framework analyses the signature of every route and compiles a schema for each of its parameters and its answer.
    For all routes together that takes a tenth of a second, longer than the rest of a gateway's start.
    """

    declared: Declaration

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.path, self.endpoint = path, endpoint
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self.methods = set(options["methods"] or ("GET",))
        self._options = options

    def analyse(self) -> None:
        """Analyse it now, unless that was done."""
        options = self.__dict__.pop("_options", None)
        if options is not None:
            super().__init__(self.path, self.endpoint, **options)

    def __getattr__(self, name: str) -> Any:
        """Called for what only an analysed route has."""
        if "_options" not in self.__dict__:
            raise AttributeError(name)
        self.analyse()
        return getattr(self, name)


def declared_routes(app: FastAPI) -> Sequence[DeclaredRoute]:
    """Every route. Raises TypeError if one is not declared: a gateway with such a route does not start."""
    routes = [route for route in app.routes if isinstance(route, DeclaredRoute) and "declared" in vars(route)]
    if len(routes) != len(app.routes):
        raise TypeError("a route says neither which permission it requires nor how it is signed")
    return routes


def route_of(routes: Iterable[DeclaredRoute], scope: Scope) -> tuple[DeclaredRoute, Scope] | None:
    """The route that will answer, and the scope as its handler sees it. None if there is none: 404 or 405."""
    matched = ((route, *route.matches(scope)) for route in routes)
    return next(((route, {**scope, **child}) for route, match, child in matched if match is Match.FULL), None)
