"""The options of the scheduler: order, limits, evictions, and which models may be ready together. Checks these rules
(`company`) against themselves and the configured models, and translates them for the core, which decides by them."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from greenroom.config.kinds import (
    AwayShare,
    Count,
    LiftSeconds,
    ModelId,
    Name,
    Seconds,
    SecondsAboveZero,
    Section,
    TenantWeight,
)
from greenroom.config.marks import RESTART, Variable
from greenroom.config.reader import Problem, Where
from greenroom.core.events import Limits
from greenroom.core.model import ModelId as CoreModelId
from greenroom.core.policy import coresidency as core
from greenroom.core.policy.coresidency import Group
from greenroom.core.policy.language import Expression, Mistake, Reference, is_name, leaves, parse
from greenroom.core.policy.language import Name as NameInSet
from greenroom.core.policy.matrix import ByMatrix, Matrix

# The defaults of these limits are the core's.
DEFAULTS = Limits()


def _written(number: float) -> float:
    """The number as an operator writes it: 60 rather than 60.0."""
    return int(number) if number.is_integer() else number


class GroupSection(Section):
    """Models that share a rule. Models in no group are one more group, with the defaults below."""

    members: tuple[ModelId, ...]
    """Its models, by id; a model is in one group at most."""
    swap: bool = True
    """Only one member is ready at a time."""
    exclusive: bool = True
    """Loading a member evicts the members of all other groups."""
    persistent: bool = False
    """Loading a member of another group does not evict its members."""


class MatrixSection(Section):
    """Sets of models that may be ready together; a set allows every part of it too."""

    vars: dict[Name, ModelId] = {}
    """Short names for models, to be used in sets and evict_costs; they win over ids."""
    evict_costs: dict[Name, Count] = {}
    """The cost of evicting a model, by short name or id; 1 when not given. The cheapest set is chosen."""
    sets: dict[Name, str]
    """Sets by name: a & b is both together, a | b one of them, +name another set, ( ) as needed; first wins ties."""


class Company(Section):
    """Which models may be ready together: groups or a matrix, not both."""

    groups: dict[Name, GroupSection] | None = None
    """Groups by name; {} has one model ready at a time."""
    matrix: MatrixSection | None = None
    """Sets of models. A model in no set is ready alone."""

    def _problems(self) -> Iterator[Problem]:
        if (self.groups is None) == (self.matrix is None):
            yield Problem((), "give groups or matrix" + ("" if self.groups is None else ", not both"))


class SchedulerSection(Section):
    """The order of requests, and how many may wait."""

    implementation: Annotated[str, RESTART] = "default"
    """The scheduler: default, plain (in the order of arrival alone), or one that an installed package registers."""
    policy: str = DEFAULTS.policy
    """Orders requests and decides when models swap: default, fifo, or one that an installed package registers."""
    swapper: str = DEFAULTS.swapper
    """Chooses which models are evicted: memory, coordinator (idle ones only), or one of an installed package."""
    queue_depth_max: Annotated[Count, Variable("MAX_QUEUE_DEPTH", "Requests that may wait at once.")] = (
        DEFAULTS.queue_depth_max
    )
    """Requests that may wait at once; one more is answered 503 queue_full with Retry-After."""
    away_share: AwayShare = _written(DEFAULTS.away_share)
    """A busy model is sent away for requests that wait for others at most this share of the time."""
    lift_s: LiftSeconds = _written(DEFAULTS.lift_s)
    """Waiting this long raises a request by one priority class."""
    deadline_high_s: SecondsAboveZero = _written(DEFAULTS.deadlines_s[0])
    """Before this wait no busy model is closed for a request of high priority; at most server.wait_max_s."""
    deadline_normal_s: SecondsAboveZero = _written(DEFAULTS.deadlines_s[1])
    """The same for normal priority."""
    deadline_low_s: SecondsAboveZero = _written(DEFAULTS.deadlines_s[2])
    """The same for low priority."""
    recency_s: SecondsAboveZero = _written(DEFAULTS.recency_s)
    """A request this long ago still counts for a third in the estimate of how soon a model is needed again."""
    tenant_weights: dict[Name, TenantWeight] = {}
    """Shares between tenants that wait for the same model; 1 for tenants not listed."""
    backoff_s: SecondsAboveZero = _written(DEFAULTS.backoff_s)
    """Pause after a first failed load; doubled with each further one."""
    backoff_max_s: SecondsAboveZero = _written(DEFAULTS.backoff_max_s)
    """Longest pause between failed loads."""
    keep_alive_max_s: Seconds | None = None
    """The longest `keep_alive` a caller gets; -1 (for ever) is reduced to it too. No bound when not given."""
    fit_memory: bool = True
    """Whether models must fit into memory together; false: company alone decides which may be ready at once."""
    company: Company | None = None
    """Rules about which models may be ready together, as groups or a matrix; without any only memory counts."""

    def _problems(self) -> Iterator[Problem]:
        if self.backoff_s > self.backoff_max_s:
            yield Problem(("backoff_s",), f"may not be more than backoff_max_s ({self.backoff_max_s:g})")
        if self.deadline_high_s > self.deadline_normal_s:
            yield Problem(("deadline_high_s",), f"may not be more than deadline_normal_s ({self.deadline_normal_s:g})")
        if self.deadline_normal_s > self.deadline_low_s:
            yield Problem(("deadline_normal_s",), f"may not be more than deadline_low_s ({self.deadline_low_s:g})")
        if not self.fit_memory and self.company is None:
            yield Problem(
                ("fit_memory",), "may only be false with company; nothing else says which models may be ready together"
            )


# --- which models may be ready together -------------------------------------------------------------------------------


def rules_of(company: Company | None) -> core.Rules | None:
    """The rules as the core takes them; None if the section is absent."""
    if company is None:
        return None
    return _groups(company.groups or {}) if company.matrix is None else _matrix(company.matrix)


def problems_of_company(company: Company, aliases_of: Mapping[str, Iterable[str]]) -> Iterator[Problem]:
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
        Group(name, tuple(map(CoreModelId, group.members)), group.swap, group.exclusive, group.persistent)
        for name, group in groups.items()
    )


def _matrix(matrix: MatrixSection) -> Matrix:
    short = {name: CoreModelId(model) for name, model in matrix.vars.items()}
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

    def why_not(self, leaf: NameInSet | Reference) -> str | None:
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
