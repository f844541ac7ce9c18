"""Engines by name: ours, and those of other packages (entry point group `greenroom.engines`). Also says what the core
is told of an engine's facts, and how an engine keeps the prompts of tenants apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Final, TypedDict

from greenroom.config.plugins import ENGINE_GROUP, Named
from greenroom.config.schema import Ability, Model
from greenroom.engines.base import (
    Engine,
    EngineFacts,
    HostedEngine,
    ProcessEngine,
    RemoteEngine,
    Split,
    equal_counts,
)
from greenroom.engines.builtin.comfyui import ComfyUiEngine
from greenroom.engines.builtin.command import CommandEngine
from greenroom.engines.builtin.diffusers import DiffusersEngine
from greenroom.engines.builtin.llamacpp import LlamaCppEngine
from greenroom.engines.builtin.sglang import SglangEngine
from greenroom.engines.builtin.transformers import TransformersEngine
from greenroom.engines.builtin.vllm import VllmEngine
from greenroom.engines.builtin.whisper import WhisperEngine
from greenroom.errors import ConfigError

_OURS: Final[tuple[type[Engine], ...]] = (
    *(LlamaCppEngine, TransformersEngine, DiffusersEngine, VllmEngine, SglangEngine),
    *(ComfyUiEngine, WhisperEngine, CommandEngine, RemoteEngine),
)
ENGINES: Final[Named[Callable[[], Engine]]] = Named("engine", {one.name: one for one in _OURS}, ENGINE_GROUP)

# What a category tells where neither the operator nor the engine says it. Language models differ too much.
_OF_CATEGORY: Final[Mapping[str, frozenset[Ability]]] = {
    "embedding": frozenset({Ability.EMBEDDINGS}),
    "diffusion": frozenset({Ability.IMAGES, Ability.IMAGE_EDITS}),
    "transcription": frozenset({Ability.TRANSCRIPTION, Ability.TRANSLATION}),
    "speech": frozenset({Ability.SPEECH}),
}


def engine_for(model: Model) -> Engine:
    """The engine of a model. The configuration has inferred its name if the operator gave none. Raises ConfigError if
    the engine of another package cannot be used."""
    assert model.engine is not None, "a model whose engine is in doubt is refused"
    return engine_named(model.engine)


@functools.cache
def engine_named(name: str) -> Engine:
    """The one engine with this name. Raises ConfigError."""
    make = ENGINES[name]
    try:
        engine = make()
    except Exception as error:
        raise ConfigError(f"engine {name!r} cannot be made: {error}") from error
    if not isinstance(engine, ProcessEngine | HostedEngine | RemoteEngine):
        raise ConfigError(f"engine {name!r} extends neither ProcessEngine nor HostedEngine of greenroom.engines.base")
    if engine.name != name:
        raise ConfigError(f"engine {name!r} calls itself {engine.name!r}; its entry point must have the same name")
    return engine


# Engines that cannot be spread over GPUs, and what runs the same folders and can.
_SPREAD_BY: Final[Mapping[str, str]] = {"transformers": "vllm"}


def spread(model: Model) -> Model | None:
    """The same model on an engine that can be spread over GPUs; None if its own can, or the other is not installed."""
    other = _SPREAD_BY.get(model.engine or "")
    # The Python of its own engine may have the other one, too.
    for python in (model.python, None) if other is not None else ():
        there = model.model_copy(update={"engine": other, "python": python})
        if engine_for(there).missing(there) is None:
            return there
    return None


def spread_by(model: Model) -> str | None:
    """The name of the engine that could be spread in place of its own, whether it is installed or not."""
    return _SPREAD_BY.get(model.engine or "")


def facts_of(model: Model) -> EngineFacts:
    """The facts of its engine, with what the operator says of its abilities."""
    facts = engine_for(model).facts(model)
    if model.abilities is not None:
        return replace(facts, abilities=frozenset(model.abilities))
    return facts if facts.abilities is not None else replace(facts, abilities=_OF_CATEGORY.get(model.category))


class SplitKeys(TypedDict):
    """The fields of a `ModelSpec` that say how a model may be spread over GPUs."""

    can_split: bool
    split_counts: tuple[int, ...]
    parts: tuple[int, ...]
    beside_mib: int


def split_keys(facts: EngineFacts) -> SplitKeys:
    """What the core is told of these facts."""
    parts = tuple(facts.parts.values()) if facts.can_split is Split.PARTS else ()
    return SplitKeys(
        can_split=facts.can_split is not None and (facts.can_split is not Split.PARTS or len(parts) > 1),
        split_counts=equal_counts(facts),
        parts=parts,
        beside_mib=facts.beside_mib if parts else 0,
    )


class Isolation(StrEnum):
    """How an engine keeps the prompts of tenants apart, for people to read (docs/adr/0021)."""

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
