"""Expands the macros of a llama-swap file as llama-swap does.

Owns their order: those of the file, with those of a model in the place of the ones that they replace. A macro sees only
those before it, so there are no circles. `${PORT}`, `${PID}` and `${env.NAME}` stay: our own file has them too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from greenroom.config.macros import EXPANDED_CHARS_MAX, HOLES
from greenroom.config.reader import Problem, Scalar, Value, Where
from greenroom.errors import ConfigError

MODEL_ID = "MODEL_ID"
PORT, PID = "${PORT}", "${PID}"
_STAYS = re.compile(r"MODEL_ID|PORT|PID|env\.[A-Za-z_][A-Za-z0-9_]*")
_TOKEN = re.compile(r"\$\{([^{}\n]*)\}")
_ENV = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
# What our own file takes as the name of a macro.
_OUR_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


@dataclass(slots=True)
class ExpansionBudget:
    """Bounds what all macros of a file become together: macros in macros can grow without bound."""

    left: int = EXPANDED_CHARS_MAX

    def spend(self, chars: int) -> None:
        self.left -= chars
        if self.left < 0:
            raise ConfigError(f"macros: expand to more than {EXPANDED_CHARS_MAX // 1024 // 1024} MiB")


@dataclass(slots=True)
class MacroScope:
    """The macros that can be used in one place, each as it is there. `problems` are references to others."""

    budget: ExpansionBudget
    known: dict[str, Scalar] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def define(self, name: str, value: Value, where: Where) -> None:
        if isinstance(value, dict | list):
            self.problems.append(Problem(where, "a macro is a text, a number, true or false"))
        else:
            expanded = self.expand(value, where)
            assert not isinstance(expanded, dict | list)
            self.known[name] = expanded

    def expand(self, value: Value, where: Where) -> Value:
        """The value with all macros in it replaced. One that is a macro alone keeps the macro's type."""
        if isinstance(value, dict):
            return {key: self.expand(each, (*where, key)) for key, each in value.items()}
        if isinstance(value, list):
            return [self.expand(each, (*where, at)) for at, each in enumerate(value)]
        if not isinstance(value, str):
            return value
        whole = _TOKEN.fullmatch(value)
        if whole and whole[1] in self.known:
            self.budget.spend(len(str(self.known[whole[1]])))
            return self.known[whole[1]]
        return self._joined(value, where)

    def _joined(self, text: str, where: Where) -> str:
        pieces, end = [], 0
        for token in _TOKEN.finditer(text):
            pieces += [text[end : token.start()], self._referred(token[1], where)]
            end = token.end()
            self.budget.spend(len(pieces[-1]))
        joined = "".join((*pieces, text[end:]))
        self.budget.spend(len(joined))
        if "$${" in joined:
            self.problems.append(Problem(where, "a $ before ${ cannot be kept: it would be read as a plain ${"))
        return joined

    def _referred(self, name: str, where: Where) -> str:
        if name in self.known:
            value = self.known[name]
            return "true" if value is True else "false" if value is False else "" if value is None else str(value)
        if not _STAYS.fullmatch(name):
            told = "is no macro that was defined before"
            self.problems.append(Problem(where, f"${{{name}}} {told}"))
        return f"${{{name}}}"


@dataclass(frozen=True, slots=True)
class SwapMacros:
    """The macros of a file. `kept` says whether our own file can define them by the same names."""

    defined: Mapping[str, Value]
    budget: ExpansionBudget = field(default_factory=ExpansionBudget)

    @property
    def kept(self) -> bool:
        return all(_OUR_NAME.fullmatch(name) and name not in HOLES for name in self.defined)

    def scope(self) -> MacroScope:
        """For what is outside of models."""
        scope = MacroScope(self.budget)
        self._define(scope, self.defined, {})
        return scope

    def scope_of(self, model: str, own: Mapping[str, Value]) -> MacroScope:
        """For one model, whose own macros win."""
        scope = MacroScope(self.budget, {MODEL_ID: model})
        self._define(scope, {**self.defined, **own}, dict.fromkeys(own, ("models", model)))
        return scope

    @staticmethod
    def _define(scope: MacroScope, defined: Mapping[str, Value], owners: Mapping[str, Where]) -> None:
        for name, value in defined.items():
            scope.define(name, value, (*owners.get(name, ()), "macros", name))


def variables_of(text: str) -> list[str]:
    """The environment variables that a text names."""
    return list(dict.fromkeys(_ENV.findall(text)))
