"""Engines by name. The only file that lists them."""

from __future__ import annotations

from collections.abc import Mapping

from greenroom.config.schema import Model
from greenroom.engines.base import Engine
from greenroom.engines.command import CommandEngine
from greenroom.engines.llamacpp import LlamaCppEngine
from greenroom.engines.transformers import TransformersEngine

_ALL: tuple[Engine, ...] = (LlamaCppEngine(), TransformersEngine(), CommandEngine())
ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in _ALL}


def engine_for(model: Model) -> Engine:
    """The engine of a model. The configuration has inferred its name if the operator gave none."""
    assert model.engine is not None, "a model whose engine is in doubt is refused"
    return ENGINES[model.engine]
