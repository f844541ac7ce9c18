"""Which engine a model has that names none, and what is wrong with keys of other engines. Looks at the names of
installed engines and at nothing else of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Final

from pydantic import BaseModel

from greenroom.config.marks import engines_of
from greenroom.config.plugins import ENGINE_GROUP
from greenroom.config.reader import Problem

KeysOfEngines = Mapping[str, frozenset[str]]
# The engines that cannot do without `path`.
WITH_PATH: Final = ("llamacpp", "transformers", "diffusers", "vllm", "sglang", "whisper")
# The engine of a model whose path is not a .gguf file, where its category tells more than the path.
_ENGINE_OF_CATEGORY = {"diffusion": "diffusers", "transcription": "whisper"}
# Engines that take what a key says as arguments instead.
_ARGUMENTS_IN = {"llamacpp": "args", "vllm": "args", "sglang": "args", "command": "cmd"}


def inferred_engine(model: Mapping[str, object]) -> str | None:
    """The engine of a model that names none, if its keys leave no doubt."""
    path, cmd = model.get("path"), model.get("cmd")
    if model.get("remote") is not None and cmd is None and path is None:
        return "remote"
    if cmd is not None and path is None:
        return "command"
    if path is None:
        path = _path_like(model.get("versions"))
    if cmd is None and isinstance(path, str) and path:
        if path.lower().endswith(".gguf"):
            return "llamacpp"
        return _ENGINE_OF_CATEGORY.get(str(model.get("category")), "transformers")
    return None


def _path_like(versions: object) -> str | None:
    """The repository that a first version is fetched from, as a path that tells its engine in the same way."""
    repo_id = versions.get("repo_id") if isinstance(versions, Mapping) else None
    if not isinstance(repo_id, str):
        return None
    return f"{repo_id}.gguf" if ":" in repo_id or repo_id.lower().endswith("gguf") else repo_id


def keys_of_engines(model: type[BaseModel]) -> KeysOfEngines:
    """The keys of each engine, as their fields say it; in no set are keys that belong to every engine."""
    keys = [(engine, key) for key, field in model.model_fields.items() for engine in engines_of(field)]
    return {engine: frozenset(key for owner, key in keys if owner == engine) for engine, _ in keys}


def unknown_engine(engine: str, ours: KeysOfEngines) -> Problem | None:
    """The problem of a name that is no engine, neither ours nor of a package that is installed."""
    if engine in ours:
        return None
    others = sorted({entry.name for entry in entry_points(group=ENGINE_GROUP)} - ours.keys())
    if engine in others:
        return None
    known = ", ".join(sorted([*ours, *others]))
    return Problem(("engine",), f"there is no engine {engine!r}; there are {known}")


def keys_of_other_engines(engine: str, given: Iterable[str], ours: KeysOfEngines) -> Iterator[Problem]:
    """Keys that are given and that this engine does not have. An engine of another package may read any key."""
    if engine not in ours:
        return
    strange = frozenset().union(*ours.values()) - ours[engine]
    for key in sorted(strange.intersection(given)):
        owners = [name for name, keys in ours.items() if key in keys]
        yield Problem((key,), f"{key} is for engine {_either(owners)}; {_instead(owners, engine)}")


def _either(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _instead(owners: list[str], engine: str) -> str:
    """Where to say the same for an engine that does not have the key."""
    is_about_the_process = owners == ["command"]
    if engine not in _ARGUMENTS_IN or is_about_the_process:
        return f"{engine} has nothing like it"
    return f"{engine} takes its arguments in {_ARGUMENTS_IN[engine]}"
