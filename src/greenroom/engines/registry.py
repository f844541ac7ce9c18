"""Engines by name. The one place that knows which there are."""

from __future__ import annotations

from collections.abc import Mapping

from greenroom.config.schema import Model
from greenroom.engines.base import Engine
from greenroom.engines.command import CommandEngine
from greenroom.engines.llamacpp import LlamaCppEngine

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (LlamaCppEngine(), CommandEngine())}


def engine_for(model: Model) -> Engine:
    """The engine the operator named, or the one its file or command implies; the configuration refuses neither."""
    return ENGINES[model.engine or ("llamacpp" if model.path else "command")]
