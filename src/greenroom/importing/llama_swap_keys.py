"""What a llama-swap file says: its macros expanded as llama-swap does, and its keys taken one by one.

Owns the order of macros: those of the file, with those of a model in the place of the ones that they replace. A macro
sees only those before it, so there are no circles. `${PORT}`, `${PID}` and `${env.NAME}` stay: our own file has them
too. Owns also that no key is forgotten: what was not taken is named at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from greenroom.config.macros import EXPANDED_CHARS_MAX, HOLES
from greenroom.config.reader import Problem, Scalar, Value, Where
from greenroom.errors import ConfigError
from greenroom.importing.result import Notes, leaves

MODEL_ID: Final = "MODEL_ID"
PORT: Final = "${PORT}"
PID: Final = "${PID}"
_STAYS: Final = re.compile(r"MODEL_ID|PORT|PID|env\.[A-Za-z_][A-Za-z0-9_]*")
_TOKEN: Final = re.compile(r"\$\{([^{}\n]*)\}")
_ENV: Final = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
# What our own file takes as the name of a macro.
_OUR_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
UNKNOWN: Final = "llama-swap has no such key"
# Words that our own reader keeps as text, and that other programs take for true or false.
_WORDS: Final = {"yes": True, "on": True, "no": False, "off": False}


class SwapMacros:
    """The macros of a file. `kept` says whether our own file can define them by the same names."""

    def __init__(self, defined: Mapping[str, Value]) -> None:
        self.defined = defined
        # Macros in macros can grow without bound: this bounds what all of a file become together.
        self._chars_left = EXPANDED_CHARS_MAX

    @property
    def kept(self) -> bool:
        return all(_OUR_NAME.fullmatch(name) and name not in HOLES for name in self.defined)

    def scope(self) -> MacroScope:
        """For what is outside of models."""
        return MacroScope(self, {})

    def scope_of(self, model: str, own: Mapping[str, Value]) -> MacroScope:
        """For one model, whose own macros win."""
        return MacroScope(self, {MODEL_ID: model}, own, ("models", model))

    def spend(self, chars: int) -> None:
        self._chars_left -= chars
        if self._chars_left < 0:
            raise ConfigError(f"macros: expand to more than {EXPANDED_CHARS_MAX // 1024 // 1024} MiB")


class MacroScope:
    """The macros that can be used in one place, each as it is there. `problems` are references to others."""

    def __init__(
        self, macros: SwapMacros, known: dict[str, Scalar], own: Mapping[str, Value] | None = None, owner: Where = ()
    ) -> None:
        self._macros = macros
        self._known = known
        self.problems: list[Problem] = []
        own = own or {}
        for name, value in {**macros.defined, **own}.items():
            where = (*(owner if name in own else ()), "macros", name)
            if isinstance(value, dict | list):
                self.problems.append(Problem(where, "a macro is a text, a number, true or false"))
            else:
                expanded = self.expand(value, where)
                assert not isinstance(expanded, dict | list)
                known[name] = expanded

    def expand(self, value: Value, where: Where) -> Value:
        """The value with all macros in it replaced. One that is a macro alone keeps the macro's type."""
        if isinstance(value, dict):
            return {key: self.expand(each, (*where, key)) for key, each in value.items()}
        if isinstance(value, list):
            return [self.expand(each, (*where, at)) for at, each in enumerate(value)]
        if not isinstance(value, str):
            return value
        whole = _TOKEN.fullmatch(value)
        if whole and whole[1] in self._known:
            self._macros.spend(len(str(self._known[whole[1]])))
            return self._known[whole[1]]
        return self._joined(value, where)

    def _joined(self, text: str, where: Where) -> str:
        pieces, end = [], 0
        for token in _TOKEN.finditer(text):
            pieces += [text[end : token.start()], self._referred(token[1], where)]
            end = token.end()
            self._macros.spend(len(pieces[-1]))
        joined = "".join((*pieces, text[end:]))
        self._macros.spend(len(joined))
        if "$${" in joined:
            self.problems.append(Problem(where, "a $ before ${ cannot be kept: it would be read as a plain ${"))
        return joined

    def _referred(self, name: str, where: Where) -> str:
        if name in self._known:
            value = self._known[name]
            return "true" if value is True else "false" if value is False else "" if value is None else str(value)
        if not _STAYS.fullmatch(name):
            self.problems.append(Problem(where, f"${{{name}}} is no macro that was defined before"))
        return f"${{{name}}}"


def variables_of(text: str) -> list[str]:
    """The environment variables that a text names."""
    return list(dict.fromkeys(_ENV.findall(text)))


class SourceKeys:
    """`tree` is read to decide, `written` is what goes into the new file: there macros may be kept."""

    def __init__(self, tree: Value, written: Value, where: Where, notes: Notes) -> None:
        self.tree = tree if isinstance(tree, dict) else {}
        self.where = where
        self.notes = notes
        self._written = written if isinstance(written, dict) else {}
        self._left = dict(self.tree)

    def number(self, key: str, least: float = 0) -> int | float | None:
        """A number of at least this; None if there is none."""
        value = self._taken(key)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value >= least):
            return value
        self._refuse(key, "a number is wanted" if least < 0 else f"a number of at least {least:g} is wanted")
        return None

    def flag(self, key: str) -> bool | None:
        value = self._taken(key)
        value = _WORDS.get(value.lower(), value) if isinstance(value, str) else value
        if value is None or isinstance(value, bool):
            return value
        self._refuse(key, "true or false is wanted")
        return None

    def text(self, key: str) -> str | None:
        """A text; None if there is none, or an empty one."""
        value = self._taken(key)
        if value is None or isinstance(value, str):
            return value or None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        self._refuse(key, "a text is wanted")
        return None

    def texts(self, key: str) -> list[str]:
        value = self._taken(key)
        if value is None:
            return []
        if isinstance(value, list) and all(isinstance(one, str | int | float) for one in value):
            return [str(one) for one in value]
        self._refuse(key, "a list of texts is wanted")
        return []

    def below(self, key: str) -> SourceKeys:
        """The mapping under this key. Its own keys are taken from it, and told by its `name_rest`."""
        value = self._left.pop(key, None)
        if value is not None and not isinstance(value, dict):
            self.notes.unmapped((*self.where, key), "a mapping is wanted")
        return SourceKeys(value, self._written.get(key), (*self.where, key), self.notes)

    def each(self) -> Iterator[tuple[str, SourceKeys]]:
        """Every key with the mapping under it."""
        for key in list(self._left):
            yield key, self.below(key)

    def written(self, key: str) -> Value:
        """What is written for a key that was taken: with macros where they are kept."""
        return self._written.get(key, self.tree.get(key))

    def name_rest(self, reasons: Mapping[str, str] | None = None) -> None:
        """Name every key that was not taken: with its reason, or as unknown. `*` stands for any one key."""
        for key, value in self._left.items():
            for where in leaves(value, (key,)):
                self.notes.unmapped((*self.where, *where), _reason(where, reasons or {}) or UNKNOWN)
        self._left = {}

    def _taken(self, key: str) -> Value:
        value = self._left.pop(key, None)
        self.notes.mapped += key in self.tree
        return value

    def _refuse(self, key: str, wanted: str) -> None:
        """Name a key that was taken. Its value is not shown: it may be a secret."""
        self.notes.mapped -= 1
        self.notes.unmapped((*self.where, key), wanted)


def _reason(where: Where, reasons: Mapping[str, str]) -> str | None:
    """The reason for this place, or for the nearest mapping around it."""
    names = [str(step) for step in where]
    for size in range(len(names), 0, -1):
        for pattern, reason in reasons.items():
            wanted = pattern.split(".")
            if len(wanted) == size and all(want in ("*", name) for want, name in zip(wanted, names, strict=False)):
                return reason
    return None
