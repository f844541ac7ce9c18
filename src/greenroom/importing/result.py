"""What an import yields: a configuration, and a note for every key of the source that it does not simply contain. Owns
how both are written: as YAML that our own reader reads back unchanged, with the notes as comments above it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from greenroom.config.reader import Problem, Value, Where, dotted, plain
from greenroom.errors import ConfigError

LINE_CHARS_MAX = 120


class Unimportable(Exception):
    """This model cannot be run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Note:
    """A key that is not mapped and why, or one that is mapped and means something else here."""

    where: Where
    text: str
    is_mapped: bool = False

    @property
    def line(self) -> str:
        said = f"{dotted(self.where)}: {'' if self.is_mapped else 'not mapped: '}{self.text}"
        return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in said)


@dataclass(frozen=True, slots=True)
class Imported:
    """`tree` is the configuration. `mapped` counts the keys of the source that are in it."""

    tree: dict[str, Value]
    notes: tuple[Note, ...]
    mapped: int

    def refused(self, problems: Sequence[Problem]) -> ConfigError:
        """The error if the configuration has these problems: in places of the source, where that is a file."""
        return ConfigError("\n".join(f"{dotted(problem.where)}: {problem.message}" for problem in problems))

    def variables_at(self, where: Where) -> list[str]:
        """The environment variables in the text at this place of the configuration, macros in it included."""
        value: Value = self.tree
        for step in where:
            if isinstance(value, dict) and step in value:
                value = value[str(step)]
            elif isinstance(value, list) and isinstance(step, int) and step < len(value):
                value = value[step]
            else:
                return []
        macros = self.tree.get("macros")
        return _variables(value, macros if isinstance(macros, dict) else {})


_TOKEN = re.compile(r"\$\{([^{}\n]*)\}")
_ENV = "env."


def _variables(value: Value, macros: Mapping[str, Value]) -> list[str]:
    """The variables that a text names itself or by macros."""
    found: list[str] = []
    seen: set[str] = set()
    left = [value]
    while left:
        text = left.pop()
        for name in _TOKEN.findall(text) if isinstance(text, str) else ():
            if name.startswith(_ENV):
                found.append(name.removeprefix(_ENV))
            elif name in macros and name not in seen:
                seen.add(name)
                left.append(macros[name])
    return list(dict.fromkeys(found))


@dataclass(slots=True)
class Notes:
    """Collects notes while a source is read."""

    found: list[Note] = field(default_factory=list)
    mapped: int = 0

    def unmapped(self, where: Where, why: str) -> None:
        self.found.append(Note(where, why))

    def differs(self, where: Where, how: str) -> None:
        self.found.append(Note(where, how, is_mapped=True))


def nothing_found(source: Path, notes: Sequence[Note]) -> ConfigError:
    """The refusal of a source of which no model was taken over, with a line for each reason."""
    return ConfigError("\n".join((f"{source}: holds no model that can be served", *(note.line for note in notes))))


def as_yaml(tree: dict[str, Value], title: Sequence[str], notes: Sequence[Note]) -> str:
    """The text of a configuration file; titles and notes are comments above it."""
    head = [*title, *(["", "Keys that are not mapped, or mean something else here:"] if notes else [])]
    comments = [f"# {line}".rstrip() for line in (*head, *(note.line for note in notes))]
    body = yaml.dump(
        tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=LINE_CHARS_MAX, default_flow_style=False
    )
    return "\n".join((*comments, "", body))


class _Dumper(yaml.SafeDumper):
    """Quotes what our reader would take for a number or a word with a meaning; writes long texts as lines."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None if plain(text) == text else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def leaves(value: Value, where: Where) -> Iterator[Where]:
    """The places of all values that are no mapping, and of empty mappings."""
    if not isinstance(value, dict) or not value:
        yield where
        return
    for key, below in value.items():
        yield from leaves(below, (*where, key))
