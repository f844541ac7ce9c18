"""What a route to models asks for and answers, as JSON schemas: for the document of the API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """`answer` is None for sound. `required`: beside `model`; forms have theirs in `Route.form`."""

    summary: str
    answer: Schema | None
    required: tuple[str, ...] = ()
    fields: Schema = field(default_factory=dict)


def typed(kind: str, about: str, **more: Any) -> Schema:
    return {"type": kind, "description": about, **more}


def string(about: str, **more: Any) -> Schema:
    return typed("string", about, **more)


def object_of(required: str, **properties: Schema) -> Schema:
    return {"type": "object", "required": required.split(), "properties": properties, "additionalProperties": True}


OBJECTS: Final[Schema] = {"type": "array", "items": {"type": "object"}}
STREAM: Final = typed("boolean", "Send the answer as events, as it is made.")
