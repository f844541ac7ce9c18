"""What a key says beside its type, its default and its sentence: marks in the `Annotated` of its field. Whatever knows
all keys reads them here: a reload's comparison, the environment, the example, the reference, the paths. Owns no key."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Any, Final, TypeVar

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from greenroom.config.reader import Value, Where


class Reload(Enum):
    """What a reload does with a changed key. A key of a section has its section's mark, unless it has its own."""

    # Read anew for each request or decision. The default.
    AT_ONCE = "at once"
    # The process, its memory or its devices change: the old slot drains and the next request gets a new one. The
    # default of keys of engines.
    NEW_SLOT = "new engine"
    # Fixed when the server starts. A reload that changes it is refused.
    RESTART = "restart"


AT_ONCE: Final = Reload.AT_ONCE
NEW_SLOT: Final = Reload.NEW_SLOT
RESTART: Final = Reload.RESTART


class PathKind(Enum):
    # A path, or several. Relative ones start at the folder of the configuration file.
    FILE = "file"
    # Such a path, but a bare name is searched on PATH when the engine starts, as a shell does.
    PROGRAM = "program"


FILE: Final = PathKind.FILE
PROGRAM: Final = PathKind.PROGRAM
# A key of models that run on this machine, by a process of ours.
LOCAL: Final = object()


class Engines:
    """The engines that have this key of a model. Keys without this mark belong to every engine."""

    def __init__(self, *names: str) -> None:
        self.names = names


@dataclass(frozen=True, slots=True)
class Example:
    """Shown in the example file for a default that says nothing."""

    value: Any


# In the name and key of a variable: what follows the name's beginning, such as a tenant.
ANY: Final = "*"


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the environment. `read` makes the key's value of its text, which is checked as one of the file is.

    `read` raises ValueError with the rest of a sentence. A name that ends in * stands for all that begin so.
    """

    name: str
    sentence: str
    read: Callable[[str], Value] = str
    # Dotted. As a mark: what follows the key of its field. Empty for a variable that belongs to no key.
    key: str = ""
    # Its text adds to what the key has, instead of replacing it.
    adds: bool = False
    is_secret: bool = False

    def where(self, name: str) -> Where:
        """The key's place in the file, for a variable of this name."""
        rest = name.removeprefix(self.name.removesuffix(ANY))
        return tuple(rest if step == ANY else step for step in self.key.split("."))

    def names_in(self, environ: Mapping[str, str]) -> list[str]:
        """The variables of this name that are set, in a stable order."""
        if not self.name.endswith(ANY):
            return [self.name] if environ.get(self.name) else []
        start = self.name.removesuffix(ANY)
        return sorted(name for name, text in environ.items() if text and name.startswith(start))


def lower(text: str) -> str:
    return text.lower()


Mark = TypeVar("Mark")


def marks(field: FieldInfo, kind: type[Mark]) -> Iterator[Mark]:
    return (mark for mark in field.metadata if isinstance(mark, kind))


def engines_of(field: FieldInfo) -> tuple[str, ...]:
    """The engines that a key of a model belongs to; none if it belongs to all."""
    return next((mark.names for mark in marks(field, Engines)), ())


def example_of(field: FieldInfo) -> Any:
    return next((mark.value for mark in marks(field, Example)), None)


def reload_of(*fields: FieldInfo) -> Reload:
    """What a reload does with a changed key, given its field and that of its section."""
    for field in fields:
        for mark in marks(field, Reload):
            return mark
        if engines_of(field):
            return NEW_SLOT
    return AT_ONCE


# --- the sentence under a key -----------------------------------------------------------------------------------------


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
    """The docstrings under the model's fields and under those it inherits, by field. Empty without the sources. One of
    a key of some engines begins with their names."""
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
