"""Models whose fields are described by the docstring under each, read from the source when a schema is asked for.

Pydantic would read the source of every class at import, which took a sixth of the gateway's start.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from greenroom.config.marks import engines_of


class Described(BaseModel):
    """A model whose JSON schema describes its fields."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        fields: dict[str, dict[str, Any]] = handler.resolve_ref_schema(schema).get("properties", {})
        for name, sentence in descriptions(cls).items():
            if name in fields:
                fields[name] = {"description": sentence, **fields[name]}
        return schema


@cache
def descriptions(model: type[BaseModel]) -> Mapping[str, str]:
    """The docstrings under the model's fields and under those it inherits, by field. Empty without the sources.

    One of a key of some engines begins with their names.
    """
    told = {name: text for part in reversed(model.__mro__) for name, text in _docstrings(part).items()}
    return {name: _with_engines(told[name], field) for name, field in model.model_fields.items() if name in told}


def _with_engines(text: str, field: FieldInfo) -> str:
    engines = engines_of(field)
    return f"{', '.join(engines)}: {text}" if engines else text


def _docstrings(of: type) -> dict[str, str]:
    body = _classes(of.__module__).get(of.__qualname__, [])
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


@cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    """The bodies of the module's outermost classes, by name."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
