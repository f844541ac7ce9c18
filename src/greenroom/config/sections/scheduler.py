"""The options of the scheduler: order, limits, evictions, and which models may be ready together."""

from collections.abc import Iterator
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
from greenroom.config.reader import Problem
from greenroom.core.events import Limits

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
