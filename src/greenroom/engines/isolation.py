"""How the prompts of tenants are kept apart by the engine of a model, for people to read (docs/adr/0021)."""

from __future__ import annotations

from enum import StrEnum

from greenroom.config.schema import Model
from greenroom.engines.registry import engine_for, facts_of


class Isolation(StrEnum):
    NOTHING_KEPT = "nothing kept"
    KEY = "key"
    SALT = "salt"
    SLOTS = "slots"
    PROCESS = "process"
    OFF = "off"
    """The operator lets tenants share."""
    SHARED = "shared"
    """Nothing keeps them apart, and the operator has not said that this is meant."""


def isolation_of(model: Model) -> Isolation:
    if model.isolate_tenants is not None:
        return Isolation(model.isolate_tenants)
    engine, facts = engine_for(model), facts_of(model)
    if facts.keeps_prefixes is False:
        return Isolation.SHARED if facts.keeps_results else Isolation.NOTHING_KEPT
    if facts.prompt_slots:
        return Isolation.SLOTS
    if facts.keeps_prefixes is None:
        return Isolation.SHARED
    # One that is told by headers has them as keys of its cache.
    return Isolation.KEY if engine.salt_field is None else Isolation.SALT
