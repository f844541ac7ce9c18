"""Checks `scheduler.company` and translates it into the rules of the core. Owns the checks of the section against
itself and against the configured models. Never decides which model is evicted: the core does."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from greenroom.config.reader import Problem, Where
from greenroom.config.sections.scheduler import Company, GroupSection, MatrixSection
from greenroom.core.model import ModelId
from greenroom.core.policy import coresidency as core
from greenroom.core.policy.coresidency import Group
from greenroom.core.policy.language import Expression, Mistake, Name, Reference, is_name, leaves, parse
from greenroom.core.policy.matrix import ByMatrix, Matrix


def rules_of(company: Company | None) -> core.Rules | None:
    """The rules as the core takes them; None if the section is absent."""
    if company is None:
        return None
    return _groups(company.groups or {}) if company.matrix is None else _matrix(company.matrix)


def of_models(company: Company, aliases_of: Mapping[str, Iterable[str]]) -> Iterator[Problem]:
    """Rules that name unknown models or cannot be satisfied. Takes model ids with their aliases."""
    models = _KnownModels(aliases_of)
    if company.matrix is not None:
        found = list(_wrong_names(company.matrix, models))
        yield from found or _wrong_as_a_whole(company.matrix)
    for name, group in (company.groups or {}).items():
        yield from _wrong_members(name, group, models)


class _KnownModels:
    """The configured models, and the message for a name that is not one of them."""

    def __init__(self, aliases_of: Mapping[str, Iterable[str]]) -> None:
        self.ids = frozenset(aliases_of)
        self._id_of_alias = {alias: model for model, aliases in aliases_of.items() for alias in aliases}
        self.group_of: dict[str, str] = {}

    def why_not(self, name: str, others: Iterable[str] = ()) -> str | None:
        """Why this name is not a model; None if it is. `others` are further names to suggest."""
        if name in self.ids:
            return None
        if name in self._id_of_alias:
            return f"{name} is an alias; name the model itself, {self._id_of_alias[name]}"
        return f"there is no model {name}{_did_you_mean(name, (*self.ids, *others))}"


def _did_you_mean(name: str, known: Iterable[str], sign: str = "") -> str:
    spellings = {each.lower(): each for each in sorted(known)}
    near = difflib.get_close_matches(name.lower(), spellings, n=1)
    return f", did you mean {sign}{spellings[near[0]]}?" if near else ""


def _groups(groups: Mapping[str, GroupSection]) -> tuple[Group, ...]:
    return tuple(
        Group(name, tuple(map(ModelId, group.members)), group.swap, group.exclusive, group.persistent)
        for name, group in groups.items()
    )


def _matrix(matrix: MatrixSection) -> Matrix:
    short = {name: ModelId(model) for name, model in matrix.vars.items()}
    return Matrix(tuple(matrix.sets.items()), dict(matrix.evict_costs), short)


def _wrong_members(name: str, group: GroupSection, models: _KnownModels) -> Iterator[Problem]:
    for position, member in enumerate(group.members):
        where: Where = ("groups", name, "members", position)
        if why := models.why_not(member):
            yield Problem(where, why)
        elif member in models.group_of:
            yield Problem(where, f"{member} is in group {models.group_of[member]} already")
        models.group_of.setdefault(member, name)


def _wrong_names(matrix: MatrixSection, models: _KnownModels) -> Iterator[Problem]:
    for name, model in matrix.vars.items():
        if not is_name(name):
            yield Problem(("matrix", "vars", name), "a short name is made of letters, digits and _ - . / : @")
        if why := models.why_not(model):
            yield Problem(("matrix", "vars", name), why)
    yield from _wrong_costs(matrix, models)
    for name, text in matrix.sets.items():
        for mistake in _mistakes(name, text, _InSets(matrix, models)):
            yield Problem(("matrix", "sets", name), f"character {mistake.at}: {mistake.message}")


def _wrong_costs(matrix: MatrixSection, models: _KnownModels) -> Iterator[Problem]:
    named: dict[str, str] = {}
    for name in matrix.evict_costs:
        where: Where = ("matrix", "evict_costs", name)
        model = matrix.vars.get(name, name)
        if name not in matrix.vars and (why := models.why_not(name, matrix.vars)):
            yield Problem(where, why)
        elif model in named:
            yield Problem(where, f"is {model}, whose cost is given already as {named[model]}")
        named.setdefault(model, name)


def _wrong_as_a_whole(matrix: MatrixSection) -> Iterator[Problem]:
    """Problems that appear only once every name is right: circles, and sets too large to expand."""
    try:
        ByMatrix(_matrix(matrix))
    except Mistake as mistake:
        yield Problem(("matrix", "sets", mistake.set_name), f"character {mistake.at}: {mistake.message}")


@dataclass(frozen=True, slots=True)
class _InSets:
    matrix: MatrixSection
    models: _KnownModels

    def why_not(self, leaf: Name | Reference) -> str | None:
        return self._no_set(leaf.text) if isinstance(leaf, Reference) else self._no_model(leaf.text)

    def _no_set(self, name: str) -> str | None:
        if name in self.matrix.sets:
            return None
        if name in self.models.ids or name in self.matrix.vars:
            return f"there is no set {name}; a model is written without +"
        return f"there is no set {name}{_did_you_mean(name, self.matrix.sets, '+')}"

    def _no_model(self, name: str) -> str | None:
        if name in self.matrix.vars:
            return None
        why = self.models.why_not(name, self.matrix.vars)
        is_set = name in self.matrix.sets
        return f"there is no model {name}, did you mean +{name}?" if why and is_set else why


def _mistakes(name: str, text: str, known: _InSets) -> Iterator[Mistake]:
    try:
        expression: Expression = parse(name, text)
    except Mistake as mistake:
        yield mistake
        return
    for leaf in leaves(expression):
        if why := known.why_not(leaf):
            yield Mistake(name, leaf.at, why)
