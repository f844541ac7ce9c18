"""The scheduler's numbers and rules, as the core takes them, from the configuration."""

from __future__ import annotations

from greenroom.config.coresidency import rules_of
from greenroom.config.schema import Config, Model, StayWarm
from greenroom.core.events import Limits
from greenroom.core.model import TenantId


def limits_of(config: Config) -> Limits:
    # A deadline after wait_max_s would have no effect: the request is refused by then.
    scheduler, latest_s = config.scheduler, config.server.wait_max_s
    return Limits(
        policy=scheduler.policy,
        swapper=scheduler.swapper,
        company=rules_of(scheduler.company),
        tenant_weights={TenantId(name): weight for name, weight in scheduler.tenant_weights.items()},
        queue_depth_max=scheduler.queue_depth_max,
        overtakes_max=scheduler.overtakes_max,
        residency_swaps=scheduler.residency_swaps,
        batch_swaps=scheduler.batch_swaps,
        lift_s=scheduler.lift_s,
        deadlines_s=(
            min(scheduler.deadline_high_s, latest_s),
            min(scheduler.deadline_normal_s, latest_s),
            min(scheduler.deadline_low_s, latest_s),
        ),
        recency_s=scheduler.recency_s,
        backoff_s=scheduler.backoff_s,
        backoff_max_s=scheduler.backoff_max_s,
        green_room_mib=config.memory.green_room_mib,
    )


def ttl_s_of(model: Model, stay_warm: StayWarm) -> float:
    """Seconds a model stays ready when idle; 0 = for ever. A caller's `keep_alive` overrides it."""
    if model.ttl_s is not None:
        return model.ttl_s
    by_category = {"llm": stay_warm.llm_s, "vision": stay_warm.vision_s, "diffusion": stay_warm.diffusion_s}
    return by_category[model.category]


def is_named(config: Config, tenant: str) -> bool:
    """True if an API key belongs to this tenant, or the tenant has a weight."""
    keys = config.server.api_keys
    return tenant in config.scheduler.tenant_weights or any((key.tenant or key.name) == tenant for key in keys)
