"""What the OpenAPI document says of the routes to models, which the framework does not serve; and its page without a
script at `/api/v1/docs`.

Made from the table of routes. Engines take more fields than are named here, and answer with more; the gateway reads
`model`, `stream`, the fields of a form and its own. The paths below /upstream/ are those of each engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from starlette.responses import HTMLResponse

from greenroom import errors
from greenroom.access import keys
from greenroom.config.kinds import COUNT_MAX, SECONDS_MAX
from greenroom.config.kinds import NAME_CHARS_MAX as TENANT_CHARS_MAX
from greenroom.config.schema import PRIORITY_NAMES, Heartbeat
from greenroom.config.sections.engine_keys import WITH_PATH
from greenroom.dialects.dialect import Route
from greenroom.dialects.route_docs import RouteDoc, Schema, string, typed
from greenroom.serving.body.peek import CLIENT_ID_CHARS_MAX, NAME_CHARS_MAX
from greenroom.serving.prefix_cache import TAG_CHARS_MAX
from greenroom.serving.routes import GENERATE, MODEL_ROUTES

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_ERROR: Final[Schema] = {"$ref": "#/components/schemas/ErrorBody"}
_ENGINE_ERROR: Final[Schema] = {"type": "object", "description": "An engine's own error, as the engine sent it."}


# Without Ollama's, whose errors and streams have other shapes, and the engines' own, which are theirs to describe.
DOCUMENTED: Final = {path: route for path, route in MODEL_ROUTES.items() if route.doc is not None}


def with_model_routes(document: Schema) -> Schema:
    """The document with the routes to models, whose errors and jobs have the shapes that it has already."""
    components = document["components"]
    schemas = {_body_name(route): _body(route) for route in DOCUMENTED.values()}
    return {
        **document,
        "paths": {**document["paths"], **{path.decode(): _path(route) for path, route in DOCUMENTED.items()}},
        "components": {**components, "schemas": {**components["schemas"], **schemas}},
    }


def _path(route: Route) -> Schema:
    api = route.doc
    assert api is not None
    return {
        "post": {
            "operationId": route.name,
            "summary": api.summary,
            "description": f"{api.summary} Further fields go to the engine.",
            "parameters": _HEADERS if route.is_text else [one for one in _HEADERS if "Cache" not in one["name"]],
            "requestBody": {
                "required": True,
                "content": {
                    "multipart/form-data" if route.form else _JSON: {
                        "schema": {"$ref": f"#/components/schemas/{_body_name(route)}"}
                    }
                },
            },
            "responses": {
                "200": {
                    "description": "The answer. In a stream, an error is an event too, with the body of an error.",
                    "headers": {**_ANSWER_HEADERS, **(_CACHE_HEADERS if route.is_text else {})},
                    "content": _answers(route, api),
                },
                "202": {
                    "description": "The job that will have the answer, where Prefer is respond-async.",
                    "headers": {"Location": _said("Where the job is.")},
                    "content": {_JSON: {"schema": {"$ref": "#/components/schemas/JobView"}}},
                },
                **dict(_errors()),
                "default": {"description": "An engine's answer.", "content": {_JSON: {"schema": _ENGINE_ERROR}}},
            },
        }
    }


def _answers(route: Route, api: RouteDoc) -> Schema:
    if api.answer is None:
        return {"audio/*": {"schema": {"type": "string", "format": "binary"}}, _EVENTS: {}}
    content: Schema = {_JSON: {"schema": api.answer}}
    if route.is_text or route.is_sound:
        content[_EVENTS] = {}
    if route.is_sound:
        content["text/plain"] = {"schema": {"type": "string"}}
    return content


def _errors() -> Iterator[tuple[str, Schema]]:
    """The statuses of the gateway's own errors, each with its codes."""
    for status in sorted({error.status for error in _ERRORS}):
        codes = sorted({f"`{error.code}`" for error in _ERRORS if error.status == status})
        # Of a request that an engine refuses, that engine tells the reason.
        schema = {"anyOf": [_ERROR, _ENGINE_ERROR]} if status == errors.BadRequest.status else _ERROR
        yield str(status), {"description": ", ".join(codes), "content": {_JSON: {"schema": schema}}}


_ERRORS: Final[tuple[type[errors.GreenroomError], ...]] = (
    *(errors.BadRequest, errors.BodiesFull, errors.BodyTooLarge, errors.BudgetPassed, errors.EngineLost),
    *(errors.EngineTimeout, errors.ExpectationFailed, errors.GatewayBug, errors.HeadersTooLarge),
    *(errors.HostNotAllowed, errors.InvalidKey, errors.LoadFailed, errors.MediaRefused, errors.ModelLoading),
    *(errors.ModelNotFound, errors.NoAbility, errors.NotAllowed, errors.NotFound, errors.OperationsFull),
    *(errors.OperationStoreFull, errors.PictureStoreFull, errors.PostOnly, errors.QueueFull, errors.ShuttingDown),
    *(errors.TooLarge, errors.TooManyModels, errors.TooManyUnfinished, errors.TooSlow, errors.Unloaded),
)


# --- bodies ---------------------------------------------------------------------------------------------------------


def _body_name(route: Route) -> str:
    return f"{''.join(word.title() for word in route.name.split('_'))}Request"


def _body(route: Route) -> Schema:
    """Of a form, the fields that the gateway requires; of JSON, those without which no engine can answer."""
    api = route.doc
    assert api is not None
    return {
        "type": "object",
        # The model of /generate may be named by ?model=, or be the only one.
        "required": [*(() if route is GENERATE else ("model",)), *(route.form or api.required)],
        "properties": {"model": _MODEL, **api.fields, **_OURS, **_ADHOC},
        "additionalProperties": True,
    }


def _said(about: str, kind: str = "string") -> Schema:
    """A header of an answer."""
    return {"description": about, "schema": {"type": kind}}


_MODEL: Final = string(
    "An id, an alias, a path below a root, or an id of the hub.", minLength=1, maxLength=NAME_CHARS_MAX
)
_PRINTABLE: Final = "^[ -~]+$"

# Read by the gateway, never sent to an engine.
# null counts as left out in JSON, and is not a word that forms have: it is not named.
_PRIORITY: Final = f"{', '.join(PRIORITY_NAMES)} or a whole number; lower goes first."
_KEEP_ALIVE: Final = (
    'How long the model stays after this: seconds, or a time such as "5m"; 0 leaves when idle, -1 stays.'
)
_TIME: Final[Schema] = {
    "anyOf": [
        {"type": "number", "maximum": SECONDS_MAX},
        {"type": "string", "maxLength": 64, "pattern": "^-?([0-9]+|([0-9]+(ns|us|ms|s|m|h))+)$"},
    ]
}
_OURS: Final[Schema] = {
    "x_priority": {
        "description": _PRIORITY,
        "anyOf": [
            {"type": "integer", "minimum": keys.PRIORITY_MIN, "maximum": keys.PRIORITY_MAX},
            {"type": "string", "enum": list(PRIORITY_NAMES)},
        ],
    },
    "x_client_id": string("The caller's program, for logs.", maxLength=CLIENT_ID_CHARS_MAX, pattern=_PRINTABLE),
    "x_budget_s": typed("number", "Seconds that the whole answer may take.", exclusiveMinimum=0),
    "keep_alive": {"description": _KEEP_ALIVE, **_TIME},
    "x_keep_alive_s": {"description": "The same; counts where both are sent.", **_TIME},
}
_ADHOC: Final[Schema] = {
    "backend": string("For a model that no configuration names: its engine.", enum=list(WITH_PATH)),
    "device": string("For such a model: cuda or cpu.", enum=["cuda", "cpu"]),
    "n_gpu_layers": typed("integer", "For such a model: -1 is all.", minimum=-1, maximum=COUNT_MAX),
    "gpu_memory_utilization": typed(
        "number", "For such a model: its share of a GPU's memory.", exclusiveMinimum=0, maximum=1
    ),
    "ttl": typed(
        "number",
        "For such a model: seconds without a request until it leaves; 0 = never.",
        minimum=0,
        maximum=SECONDS_MAX,
    ),
}


# --- headers --------------------------------------------------------------------------------------------------------


def _header(name: str, about: str, **schema: Any) -> Schema:
    return {"name": name, "in": "header", "description": about, "schema": {"type": "string", **schema}}


_HEADERS: Final = [
    _header("X-Priority", _PRIORITY, pattern=f"^({'|'.join(PRIORITY_NAMES)}|-?[0-9]{{1,2}})$"),
    _header("X-Tenant-ID", "The tenant, where the key has none. UTF-8.", maxLength=TENANT_CHARS_MAX),
    _header("X-Client-ID", "The caller's program, for logs."),
    _header("X-Heartbeat", "What is sent while a stream waits.", enum=[kind.value for kind in Heartbeat]),
    _header(
        "X-Request-Timeout-S", "Seconds that the whole answer may take.", pattern=r"^[1-9][0-9]{0,5}(\.[0-9]{1,6})?$"
    ),
    _header(
        "X-Cache-Tag", "Only requests with the same tag share prefixes.", maxLength=TAG_CHARS_MAX, pattern="^[!-~]+$"
    ),
    _header("X-Cache-Mode", "none: no prefix is reused, nor left for others.", enum=["prefix", "auto", "none"]),
    _header("X-Facts", "comment: a stream ends with a comment that says what its end tells.", enum=["comment", "off"]),
    _header("Prefer", "respond-async: answer with a job at once."),
    _header("X-Job-Retry", "The job may run twice.", enum=["true", "false"]),
]
_ANSWER_HEADERS: Final[Schema] = {
    "X-Request-ID": _said("For /api/v1/requests."),
    "X-Queue-Wait-Ms": _said("How long it waited. Missing where heartbeats were sent.", "integer"),
}
_CACHE_HEADERS: Final[Schema] = {
    "X-Cache-Hit": _said("true where a prefix was reused, false where none was, else unknown."),
    "X-Cache-Tokens-Reused": _said("Tokens of that prefix; 0 where they are not known.", "integer"),
    "X-GPU-Time-Ms": _said("How long the engine computed, if it tells; a trailer of a stream.", "integer"),
}


# --- the page ---------------------------------------------------------------------------------------------------------


_PAGE_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "code{font-size:.95em}h2{font-size:1rem;margin:1.5rem 0 0}p{margin:.2rem 0}ul{margin:.2rem 0}"
)


def docs_page(schema: Mapping[str, Any], schema_path: str) -> HTMLResponse:
    title = escape(schema["info"]["title"])
    operations = "\n".join(_operations(schema))
    page = (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>\n'
        f"<h1>{title} {escape(schema['info']['version'])}</h1>\n"
        f'<p>{escape(schema["info"].get("description", ""))} <a href="{escape(schema_path)}">OpenAPI schema</a></p>\n'
        f"{operations}\n</html>\n"
    )
    return HTMLResponse(page, headers=_PAGE_HEADERS)


def _operations(schema: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2>"
            yield f"<p>{escape(operation.get('description', ''))}</p>"
            if items := [*_parameters(operation), *_body_fields(schema, operation)]:
                yield f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _parameters(operation: Mapping[str, Any]) -> Iterator[str]:
    for parameter in operation.get("parameters", ()):
        yield _item(parameter["name"], parameter["in"], parameter.get("description", ""))


def _body_fields(schema: Mapping[str, Any], operation: Mapping[str, Any]) -> Iterator[str]:
    """The fields of the request body, if it has a named shape."""
    contents = list(operation.get("requestBody", {}).get("content", {}).values())
    content: Mapping[str, Any] = contents[0].get("schema", {}) if contents else {}
    for option in (content, *content.get("anyOf", ())):
        name = option.get("$ref", "").rpartition("/")[2]
        shape = schema.get("components", {}).get("schemas", {}).get(name, {})
        for field, about in shape.get("properties", {}).items():
            yield _item(field, "body", about.get("description", ""))


def _item(name: str, where: str, about: str) -> str:
    return f"<code>{escape(name)}</code> ({escape(where)}) {escape(about)}".rstrip()
