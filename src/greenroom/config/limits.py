"""The scheduler, and its numbers, rules, policy and swapper, as the core takes them, from the configuration. Those of
other packages are found by entry point when the configuration names them (`plugins.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Final

from greenroom.config.plugins import POLICY_GROUP, SCHEDULER_GROUP, SWAPPER_GROUP, Named
from greenroom.config.reader import Problem, dotted
from greenroom.config.schema import Config, Model, SchedulerSection, StayWarm, TenantLimits
from greenroom.config.sections.keys import DEFAULT_TENANT
from greenroom.config.sections.scheduler import rules_of
from greenroom.core.contract import Scheduler, SchedulerFactory
from greenroom.core.effects import Effects
from greenroom.core.events import Limits
from greenroom.core.model import TenantId
from greenroom.core.plain import PlainScheduler
from greenroom.core.policy import BUILT_IN, SWAPPERS, SwapperFactory, make_policy
from greenroom.core.policy.base import PolicyFactory
from greenroom.core.scheduler import DefaultScheduler
from greenroom.errors import ConfigError

# What the core has under the names of keys. It knows companies by their rules.
_SAME: Final = SchedulerSection.model_fields.keys() & {field.name for field in fields(Limits)} - {"company"}


def limits_of(config: Config) -> Limits:
    scheduler, latest_s = config.scheduler, _latest_s(config)
    same: dict[str, Any] = {key: getattr(scheduler, key) for key in _SAME}
    return Limits(
        **same,
        company=rules_of(scheduler.company),
        tenant_depths=_depths(config),
        tenant_depth_max=_depth(config.tenants.get(DEFAULT_TENANT), config) if config.tenants else None,
        others_share_depth=bool(config.tenants) and not config.server.has_keys,
        wait_max_s=latest_s,
        deadlines_s=(
            min(scheduler.deadline_high_s, latest_s),
            min(scheduler.deadline_normal_s, latest_s),
            min(scheduler.deadline_low_s, latest_s),
        ),
        green_room_mib=config.memory.green_room_mib,
    )


def _latest_s(config: Config) -> float:
    """When the first callers are refused: a later deadline would have no effect. Those that never wait do not count."""
    waits_s = (config.server.wait_max_s, config.server.stream_wait_max_s)
    return min((wait_s for wait_s in waits_s if wait_s > 0), default=0.0)


def _depths(config: Config) -> dict[TenantId, int]:
    named = config.tenants.items()
    return {TenantId(name): _depth(limits, config) for name, limits in named if name != DEFAULT_TENANT}


def _depth(limits: TenantLimits | None, config: Config) -> int:
    """How many requests of a tenant may wait: by default as many as may wait at all."""
    if limits is None or limits.queue_depth_max is None:
        return config.scheduler.queue_depth_max
    return limits.queue_depth_max


def ttl_s_of(model: Model, stay_warm: StayWarm) -> float:
    """Seconds a model stays ready when idle; 0 = for ever. A caller's `keep_alive` overrides it."""
    if model.ttl_s is not None:
        return model.ttl_s
    seconds: float = getattr(stay_warm, f"{model.category}_s")
    return seconds


def is_named(config: Config, tenant: str) -> bool:
    """True if an API key of the configuration belongs to this tenant, or the tenant has limits or a weight."""
    if tenant in config.scheduler.tenant_weights or tenant in config.tenants:
        return True
    return any((key.tenant or key.name) == tenant for key in config.server.api_keys)


POLICIES: Named[PolicyFactory] = Named("policy", BUILT_IN, POLICY_GROUP)
SWAPPERS_BY_NAME: Named[SwapperFactory] = Named("swapper", SWAPPERS, SWAPPER_GROUP)


def _default(effects: Effects) -> Scheduler:
    return DefaultScheduler(effects, POLICIES, SWAPPERS_BY_NAME)


SCHEDULERS: Named[SchedulerFactory] = Named(
    "implementation", {"default": _default, "plain": PlainScheduler}, SCHEDULER_GROUP
)


def make_scheduler(name: str, effects: Effects) -> Scheduler:
    """Raises ConfigError if there is none of this name, or if it cannot be made."""
    for problem in scheduler_problems(name):
        raise ConfigError(f"{dotted(problem.where)}: {problem.message}")
    try:
        return SCHEDULERS[name](effects)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"scheduler.implementation: {name!r} cannot be made: {why}") from error


def scheduler_problems(name: str) -> Iterator[Problem]:
    """What is wrong with the name of a scheduler, if anything is."""
    try:
        SCHEDULERS[name]
    except ConfigError as error:
        yield Problem(("scheduler", SCHEDULERS.word), error.message)


def require(limits: Limits) -> None:
    """Raise ConfigError unless the named policy and swapper exist and can be constructed."""
    for problem in plugin_problems(limits):
        raise ConfigError(f"{dotted(problem.where)}: {problem.message}")


def plugin_problems(limits: Limits) -> Iterator[Problem]:
    """Problems of the named policy and swapper, at most one: the first."""
    for named, name in ((POLICIES, limits.policy), (SWAPPERS_BY_NAME, limits.swapper)):
        try:
            named[name]
        except ConfigError as error:
            yield Problem(("scheduler", named.word), error.message)
            return
    try:
        make_policy(limits, POLICIES, SWAPPERS_BY_NAME)
    except Exception as error:
        yield Problem(
            ("scheduler", POLICIES.word), f"{limits.policy!r} cannot be made: {type(error).__name__}: {error}"
        )
