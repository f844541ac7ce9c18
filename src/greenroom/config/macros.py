"""Expands `${…}`: macros, environment variables, and placeholders that are filled when an engine starts.

Owns every `${…}` of the file. Works on the tree after YAML, so that no value can change the shape of the file and
comments are left alone. Keys are never expanded. A macro sees only those defined before it, so there are no cycles.
`${PORT}`, `${PID}` and those of GPUs stay in the keys that a start fills, and are refused everywhere else.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from greenroom.config.reader import Problem, Value, Where

# Macros inside macros can grow without bound from a small file.
EXPANDED_CHARS_MAX = 8 * 1024 * 1024
# Counted for each value besides its characters, so that many short ones are bounded too.
VALUE_CHARS = 32

# Placeholders that only a start can fill, and the keys of a model in which they may stand.
PORT_KEYS = frozenset({"cmd", "cmd_stop", "env", "args"})
PID_KEYS = frozenset({"cmd_stop"})
# The GPUs of a command, their number, and the MiB on each.
GPU_HOLES = ("GPUS", "GPU_COUNT", "TENSOR_SPLIT")
GPU_KEYS = frozenset({"cmd", "cmd_stop", "env"})
AT_START = {"PORT": PORT_KEYS, "PID": PID_KEYS, **dict.fromkeys(GPU_HOLES, GPU_KEYS)}
HOLES = ("MODEL_ID", *AT_START)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
# An escape, a complete reference, or the beginning of one that is never closed.
_TOKEN = re.compile(r"\$\$\{|\$\{([^{}\n]*)\}|\$\{")
_HOLE = re.compile(rf"\$\{{({'|'.join(HOLES)})\}}")
_ENV = "env."


@dataclass(frozen=True, slots=True)
class Hole:
    """A placeholder, filled where the text is used (MODEL_ID) or when the engine starts (PORT, PID, GPUS …)."""

    name: str


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """A text with holes."""

    pieces: tuple[str | Hole, ...]


# A value whose texts are templates.
Open = TextTemplate | int | float | bool | None | list["Open"] | dict[str, "Open"]


class _TooMuch(Exception):
    """The expanded values exceed EXPANDED_CHARS_MAX."""


class _Unknown(Exception):
    """A reference that cannot be resolved; the message says why."""


def expand(tree: dict[str, Value], environ: Mapping[str, str]) -> tuple[dict[str, Value], tuple[Problem, ...]]:
    """The expanded tree, and the problems found. A value with a problem stays unexpanded."""
    expansion = _Expansion(environ)
    try:
        expanded = {key: expansion.macros(tree[key]) for key in tree if key == "macros"}
        expanded |= {key: expansion.closed(value, (key,)) for key, value in tree.items() if key != "macros"}
    except _TooMuch:
        return tree, (Problem(("macros",), f"expand to more than {EXPANDED_CHARS_MAX // 1024 // 1024} MiB"),)
    return {key: expanded[key] for key in tree}, tuple(expansion.problems)


@dataclass(slots=True)
class _Expansion:
    environ: Mapping[str, str]
    known: dict[str, Open] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    left: int = EXPANDED_CHARS_MAX

    def macros(self, defined: Value) -> Value:
        if not isinstance(defined, dict):
            return defined
        closed: dict[str, Value] = {}
        for name, value in defined.items():
            where: Where = ("macros", name)
            if not _NAME.fullmatch(name) or name in HOLES:
                self.problems.append(Problem(where, _bad_name(name)))
            self.known[name] = self._opened(value, where)
            closed[name] = self._filled(self.known[name], where)
        return closed

    def closed(self, value: Value, where: Where) -> Value:
        if isinstance(value, dict):
            return {key: self.closed(each, (*where, key)) for key, each in value.items()}
        if isinstance(value, list):
            return [self.closed(each, (*where, at)) for at, each in enumerate(value)]
        before = len(self.problems)
        filled = self._filled(self._opened(value, where), where)
        return filled if len(self.problems) == before else value

    def _opened(self, value: Value, where: Where) -> Open:
        """Replace macros and environment variables; keep holes."""
        if isinstance(value, dict):
            return {key: self._opened(each, (*where, key)) for key, each in value.items()}
        if isinstance(value, list):
            return [self._opened(each, (*where, at)) for at, each in enumerate(value)]
        if not isinstance(value, str):
            return value
        try:
            return self._template(value)
        except _Unknown as unknown:
            self.problems.append(Problem(where, str(unknown)))
            # Its placeholders are none the less real, here and wherever a macro brings them.
            parts = _HOLE.split(value)
            return TextTemplate(tuple(Hole(part) if place % 2 else part for place, part in enumerate(parts)))

    def _template(self, text: str) -> Open:
        pieces: list[str | Hole] = []
        end = 0
        for token in _TOKEN.finditer(text):
            pieces.append(text[end : token.start()])
            end = token.end()
            if token.group() == "$${":
                pieces.append("${")
            elif token.group(1) is None:
                raise _Unknown("${ is never closed by }; write $${ for a plain ${")
            else:
                value = self._referred(token.group(1))
                if token.group() == text:
                    return value
                pieces += self._as_pieces(value, token.group(1))
        pieces.append(text[end:])
        self._spend(sum(len(piece) if isinstance(piece, str) else 1 for piece in pieces))
        return TextTemplate(tuple(piece for piece in pieces if piece))

    def _referred(self, name: str) -> Open:
        if name in HOLES:
            return TextTemplate((Hole(name),))
        if name.startswith(_ENV):
            return TextTemplate((self._from_environment(name.removeprefix(_ENV)),))
        if name in self.known:
            return self.known[name]
        # Compare without case: ${port} is meant for ${PORT}.
        names = {known.lower(): known for known in (*self.known, *HOLES)}
        near = difflib.get_close_matches(name.lower(), names, n=1)
        hint = (
            f", did you mean ${{{names[near[0]]}}}?"
            if near
            else "; macros are defined under macros, before their first use"
        )
        raise _Unknown(f"${{{name}}} is not known{hint}")

    def _from_environment(self, name: str) -> str:
        if name not in self.environ:
            near = difflib.get_close_matches(name, list(self.environ), n=1, cutoff=0.8)
            hint = f", did you mean {near[0]}?" if near else ""
            raise _Unknown(f"the environment variable {name} is not set{hint}")
        value = self.environ[name]
        if any(char in value for char in "\r\n\0") or not _is_text(value):
            raise _Unknown(f"the environment variable {name} holds a line break or bytes that are no text")
        return value

    def _as_pieces(self, value: Open, name: str) -> tuple[str | Hole, ...]:
        if isinstance(value, TextTemplate):
            return value.pieces
        if isinstance(value, bool):
            return ("true" if value else "false",)
        if isinstance(value, int | float):
            return (str(value),)
        kind = "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else "nothing"
        raise _Unknown(f"${{{name}}} is {kind}, which cannot be part of a text; use it as a whole value")

    def _filled(self, value: Open, where: Where) -> Value:
        """Fill the holes for this place, or keep them for the start."""
        self._spend(VALUE_CHARS)
        if isinstance(value, dict):
            return {key: self._filled(each, where) for key, each in value.items()}
        if isinstance(value, list):
            return [self._filled(each, where) for each in value]
        if not isinstance(value, TextTemplate):
            return value
        text = "".join(piece if isinstance(piece, str) else self._hole(piece.name, where) for piece in value.pieces)
        self._spend(len(text))
        self._check_no_false_hole(text, value, where)
        return text

    def _hole(self, name: str, where: Where) -> str:
        kept = f"${{{name}}}"
        if where[0] == "macros":
            return kept
        in_model = where[0] == "models" and len(where) > 2
        if name == "MODEL_ID" and in_model:
            return str(where[1])
        allowed = AT_START.get(name, frozenset[str]())
        if not (in_model and where[2] in allowed):
            place = f"only in {', '.join(sorted(allowed))} of a model" if allowed else "only inside a model"
            self.problems.append(Problem(where, f"{kept} can be used {place}"))
        return kept

    def _check_no_false_hole(self, text: str, template: TextTemplate, where: Where) -> None:
        """Refuse an escaped ${PORT} in keys that a start fills: the start could not tell it from a real one."""
        if where[0] != "models" or len(where) < 3 or where[2] not in PORT_KEYS:
            return
        for name in AT_START:
            if text.count(f"${{{name}}}") > sum(piece == Hole(name) for piece in template.pieces):
                self.problems.append(Problem(where, f"${{{name}}} is filled at the start and cannot be escaped here"))

    def _spend(self, chars: int) -> None:
        self.left -= chars
        if self.left < 0:
            raise _TooMuch


def _bad_name(name: str) -> str:
    if name in HOLES:
        return f"{name} has a meaning of its own and cannot be a macro"
    return (
        "a macro's name is made of letters, digits, _ and -, begins with a letter or _, and has at most 64 characters"
    )


def _is_text(value: str) -> bool:
    """False for bytes of the environment that are not UTF-8: they arrive as lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in value)
