"""How long a model stays ready without a request: its own `ttl_s`, else what its category says."""

from __future__ import annotations

from greenroom.config.schema import Model, StayWarm


def ttl_s_of(model: Model, stay_warm: StayWarm) -> float:
    """Seconds; 0 = for ever. What a caller says with `keep_alive` comes before this."""
    if model.ttl_s is not None:
        return model.ttl_s
    by_category = {"llm": stay_warm.llm_s, "vision": stay_warm.vision_s, "diffusion": stay_warm.diffusion_s}
    return by_category[model.category]
