"""Paths of the file become absolute, once, so that nobody later has to know where the file was.

Never looks whether they exist: `problems.py` does.
"""

from __future__ import annotations

import os
from pathlib import Path

from greenroom.config.schema import Config, Model

# A bare name in these is looked for on PATH when the engine starts, like a shell would.
_PROGRAM_KEYS = frozenset({"program", "python"})
_SERVER_KEYS = ("record_activity", "record_events")
_MODEL_KEYS = ("path", "cwd", *sorted(_PROGRAM_KEYS))


def resolved(config: Config, folder: Path) -> Config:
    """The same configuration with ~ expanded and relative paths starting at `folder`."""
    models = {name: _model(model, folder) for name, model in config.models.items()}
    records = {
        key: _absolute(path, folder) for key in _SERVER_KEYS if (path := getattr(config.server, key)) is not None
    }
    server = config.server.model_copy(update=records)
    memory, state_dir = config.memory, _absolute(config.state_dir, folder)
    if memory.file is not None:
        memory = memory.model_copy(update={"file": _absolute(memory.file, folder)})
    roots = tuple(_absolute(root, folder) for root in config.model_roots)
    return config.model_copy(
        update={"server": server, "memory": memory, "models": models, "state_dir": state_dir, "model_roots": roots}
    )


def _model(model: Model, folder: Path) -> Model:
    said = {key: getattr(model, key) for key in _MODEL_KEYS}
    return model.model_copy(
        update={
            key: _absolute(path, folder)
            for key, path in said.items()
            if path is not None and not (key in _PROGRAM_KEYS and _is_bare(path))
        }
    )


def _is_bare(path: str) -> bool:
    return "/" not in path and not path.startswith("~")


def _absolute(path: str, folder: Path) -> str:
    return os.path.normpath(folder / os.path.expanduser(path))
