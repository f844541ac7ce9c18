"""What a key says beside its type, its default and its sentence: marks in the `Annotated` of its field.

Whatever knows all keys reads them here: a reload's comparison, the environment, the example, the reference, the paths.
Owns no key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from pydantic.fields import FieldInfo

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
