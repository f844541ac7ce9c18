"""The page at `/api/v1/docs`: the operations of the OpenAPI schema with their fields, without a script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from starlette.responses import HTMLResponse

_HEADERS: Final = {
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
    return HTMLResponse(page, headers=_HEADERS)


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
