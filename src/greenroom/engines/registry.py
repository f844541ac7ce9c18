"""Engines by name: ours, and those of other packages (entry point group `greenroom.engines`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from greenroom.config.plugins import ENGINE_GROUP, Named
from greenroom.config.schema import Ability, Model
from greenroom.engines.base import Engine, EngineFacts, HostedEngine, ProcessEngine
from greenroom.engines.command import CommandEngine
from greenroom.engines.llamacpp import LlamaCppEngine
from greenroom.engines.transformers import TransformersEngine
from greenroom.errors import ConfigError

_OURS: Final[tuple[type[Engine], ...]] = (LlamaCppEngine, TransformersEngine, CommandEngine)
ENGINES: Final[Named[Callable[[], Engine]]] = Named("engine", {one.name: one for one in _OURS}, ENGINE_GROUP)

# What a category tells where neither the operator nor the engine says it. Language models differ too much.
_OF_CATEGORY: Final[Mapping[str, frozenset[Ability]]] = {
    "embedding": frozenset({Ability.EMBEDDINGS}),
    "diffusion": frozenset({Ability.IMAGES, Ability.IMAGE_EDITS}),
    "transcription": frozenset({Ability.TRANSCRIPTION, Ability.TRANSLATION}),
    "speech": frozenset({Ability.SPEECH}),
}


def engine_for(model: Model) -> Engine:
    """The engine of a model. The configuration has inferred its name if the operator gave none.

    Raises ConfigError if the engine of another package cannot be used.
    """
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
    if not isinstance(engine, ProcessEngine | HostedEngine):
        raise ConfigError(f"engine {name!r} extends neither ProcessEngine nor HostedEngine of greenroom.engines.base")
    if engine.name != name:
        raise ConfigError(f"engine {name!r} calls itself {engine.name!r}; its entry point must have the same name")
    return engine


def facts_of(model: Model) -> EngineFacts:
    """The facts of its engine, with what the operator says of its abilities."""
    facts = engine_for(model).facts(model)
    if model.abilities is not None:
        return replace(facts, abilities=frozenset(model.abilities))
    return facts if facts.abilities is not None else replace(facts, abilities=_OF_CATEGORY.get(model.category))
