"""Loads a file into a configuration, or raises one error that lists every problem in it.

Owns the steps: read, expand, validate, make paths absolute. A file loads as a whole or not at all. Keeps nothing: a
reload loads again and compares (`diff.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from greenroom.config import environment, kinds, macros
from greenroom.config.hub import WHISPER_SIZES, holds_whisper, hub_folder
from greenroom.config.kinds import Section
from greenroom.config.limits import limits_of, plugin_problems, scheduler_problems
from greenroom.config.marks import PROGRAM, PathKind, marks
from greenroom.config.mistakes import problems_of
from greenroom.config.problems import clashing_recordings, holds_gguf, roots_that_are_files
from greenroom.config.problems import problems as problems_of_config
from greenroom.config.reader import Lines, Problem, SourceFile, Value, Where, read, refusal
from greenroom.config.schema import Config, Model
from greenroom.config.sections.model import TEMPLATE_ENDING
from greenroom.errors import ConfigError

ENVIRONMENT_NAME = "GREENROOM_CONFIG"
DEFAULT_NAME = "greenroom.yaml"
TASKS_NAME = "tasks.yaml"
_ONLY_TASKS = f"unknown key: {TASKS_NAME} has `tasks` and nothing else"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    config: Config
    path: Path | None
    # What will not work although the file is valid. Shown to the operator; never prevents a start.
    warnings: tuple[str, ...]
    # The places of the file that have a value; none without a file.
    places: frozenset[Where] = frozenset()


def load(path: str | Path | None, environ: Mapping[str, str] = os.environ, *, to_serve: bool = False) -> LoadedConfig:
    """Load a file, and apply what the environment says. Raises ConfigError with one line for each problem. No path: the
    environment alone. `to_serve`: the named policy and swapper must exist as well. They may be code of other packages,
    which is imported."""
    # Messages show the path as typed; the working directory may change later, so the result has the absolute path.
    file = Path("environment" if path is None else os.path.expanduser(path))
    absolute, said = Path(os.path.abspath(file)), environment.said(environ)
    tasks = None if path is None or not (beside := file.parent / TASKS_NAME).exists() else beside
    source = _NO_FILE if path is None else _with_tasks(read(file), file, tasks)
    tree, not_expanded = macros.expand(source.tree, environ)
    tree = said.over(_with_engines_of_folders(tree, absolute.parent))
    wrong = [*source.problems, *not_expanded, *said.problems]
    checked = _validated(tree, _with_variables(source.lines, said), [*not_expanded, *said.problems])
    if not isinstance(checked, Config) or wrong:
        found = [] if isinstance(checked, Config) else checked
        raise _refusal(file, tasks, said.blamed([*wrong, *found]), source.lines)
    config = resolved(_with_defaults(checked), absolute.parent)
    config = environment.with_folders(config, environ, is_file=path is not None)
    plugins = _plugin_problems(config) if to_serve else ()
    if wrong := [*clashing_recordings(config.server, absolute), *roots_that_are_files(config), *plugins]:
        raise _refusal(file, tasks, wrong, source.lines)
    warnings = tuple(problems_of_config(config))
    return LoadedConfig(config, None if path is None else absolute, warnings, frozenset(source.lines))


def _plugin_problems(config: Config) -> list[Problem]:
    return [*scheduler_problems(config.scheduler.implementation), *plugin_problems(limits_of(config))]


_NO_FILE = SourceFile({}, {}, ())
AnySection = TypeVar("AnySection", bound=Section)


def _with_tasks(source: SourceFile, file: Path, tasks: Path | None) -> SourceFile:
    """The same with the tasks of a tasks.yaml beside it."""
    if tasks is None:
        return source
    other = read(tasks)
    problems = [*other.problems, *(Problem((key,), _ONLY_TASKS) for key in other.tree if key != "tasks")]
    if "tasks" in source.tree:
        problems.append(Problem(("tasks",), f"are in {file}, too; keep them in one file"))
    if problems:
        raise refusal(str(tasks), problems, other.lines)
    lines = {**source.lines, **other.lines, (): source.lines.get((), 1)}
    return replace(source, tree={**source.tree, **other.tree}, lines=lines)


def _refusal(file: Path, tasks: Path | None, problems: Iterable[Problem], lines: Lines) -> ConfigError:
    """The error for problems of a file and of the tasks.yaml beside it, each in its own file."""
    found = list(problems)
    of_tasks = [problem for problem in found if tasks is not None and problem.where[:1] == ("tasks",)]
    others = [problem for problem in found if problem not in of_tasks]
    if not of_tasks:
        return refusal(str(file), others, lines)
    told = [refusal(str(file), others, lines)] if others else []
    return ConfigError("\n".join(one.message for one in (*told, refusal(str(tasks), of_tasks, lines))))


def _with_variables(lines: Lines, said: environment.Said) -> dict[Where, int]:
    """The lines of a file, and a place for each key that a variable sets: errors are told by place."""
    places = {where[:size]: 1 for where in said.names for size in range(1, len(where) + 1)}
    return {**places, **lines}


def _with_defaults(config: Config) -> Config:
    """The same with what `vllm` says for models of vLLM that do not say it."""
    models = {name: _filled(model, config) for name, model in config.models.items()}
    return config.model_copy(update={"models": models})


def _filled(model: Model, config: Config) -> Model:
    if model.engine != "vllm":
        return model
    given = {key: value for key, value in config.vllm if value is not None and key not in model.model_fields_set}
    if model.memory_mib is not None:
        given.pop("gpu_memory_utilization", None)
    return model.model_copy(update=given)


def find(given: str | Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """The file to load: the one given, else the environment's, else ./greenroom.yaml. Raises ConfigError if none."""
    file = find_any(given, environ)
    if file is None:
        raise ConfigError(
            f"no configuration: there is no {DEFAULT_NAME} here; name a file with --config or {ENVIRONMENT_NAME}"
        )
    return file


def find_any(given: str | Path | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The same, or None if there is no file."""
    named = given or environ.get(ENVIRONMENT_NAME)
    if named:
        return Path(named)
    return Path(DEFAULT_NAME) if Path(DEFAULT_NAME).exists() else None


def _validated(tree: dict[str, Value], lines: Lines, known: Iterable[Problem]) -> Config | list[Problem]:
    """The configuration, or its problems but those of places that are known to be wrong."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        # The schema compares the names of models only once each model is valid; report clashes now as well.
        found = [*problems_of(error, lines), *kinds.clashes(_names(tree))]
    # A value with an unknown macro is reported once, for the macro.
    blamed = {problem.where for problem in known}
    return [problem for problem in found if not any(_is_within(problem.where, where) for where in blamed)]


def _is_within(where: Where, outer: Where) -> bool:
    return where[: len(outer)] == outer


def _names(tree: dict[str, Value]) -> Iterator[tuple[str, list[str]]]:
    """Ids and aliases of a tree that may be invalid."""
    models = tree.get("models")
    for name, model in models.items() if isinstance(models, dict) else ():
        aliases = model.get("aliases") if isinstance(model, dict) else None
        yield name, [str(alias) for alias in aliases] if isinstance(aliases, list) else []


def resolved(config: Config, folder: Path) -> Config:
    """The same configuration with ~ expanded and paths relative to `folder`."""
    changed: dict[str, Any] = {key: _resolved(value, folder) for key, value in config if isinstance(value, Section)}
    changed["models"] = {name: _model(model, folder) for name, model in config.models.items()}
    changed["remotes"] = {name: _resolved(remote, folder) for name, remote in config.remotes.items()}
    return _resolved(config, folder).model_copy(update=changed)


def _model(model: Model, folder: Path) -> Model:
    made, changed = _resolved(model, folder), {}
    repository = WHISPER_SIZES.get(model.path or "") if model.engine == "whisper" else None
    if repository is not None and not os.path.isdir(made.path or ""):
        changed["path"] = hub_folder(repository, model.env)
    if model.chat_template is not None and model.chat_template.endswith(TEMPLATE_ENDING):
        changed["chat_template"] = _absolute(model.chat_template, folder)
    return made.model_copy(update=changed)


def _resolved(section: AnySection, folder: Path) -> AnySection:
    said = {key: (getattr(section, key), kind) for key, kind in _paths_of(type(section)).items()}
    paths = {key: _paths(value, kind, folder) for key, (value, kind) in said.items() if value not in (None, (), {})}
    return section.model_copy(update=paths)


@cache
def _paths_of(section: type[Section]) -> Mapping[str, PathKind]:
    """The keys of a section that are paths."""
    return {key: kind for key, field in section.model_fields.items() for kind in marks(field, PathKind)}


def _paths(said: Any, kind: PathKind, folder: Path) -> Any:
    """A path, several, or a mapping from paths, made absolute."""
    if isinstance(said, str):
        return said if kind is PROGRAM and _is_bare(said) else _absolute(said, folder)
    if isinstance(said, Mapping):
        return {_absolute(path, folder): value for path, value in said.items()}
    return tuple(_absolute(path, folder) for path in said)


def _with_engines_of_folders(tree: dict[str, Value], folder: Path) -> dict[str, Value]:
    """The same with the engine of models that name none and whose path is a folder that tells it by its files."""
    models = tree.get("models")
    if not isinstance(models, dict):
        return tree
    found = {
        name: {**model, "engine": engine}
        for name, model in models.items()
        if isinstance(model, dict)
        and model.get("engine") is None
        and isinstance(path := model.get("path"), str)
        and (engine := _engine_of_folder(_absolute(path, folder))) is not None
    }
    return {**tree, "models": {**models, **found}} if found else tree


def _engine_of_folder(path: str) -> str | None:
    """The engine that alone can serve what is in this folder; None if its files do not tell."""
    if holds_whisper(path):
        return "whisper"
    if os.path.isfile(os.path.join(path, "model_index.json")):
        return "diffusers"
    return "llamacpp" if holds_gguf(path) and not os.path.exists(os.path.join(path, "config.json")) else None


def _is_bare(path: str) -> bool:
    return "/" not in path and not path.startswith("~")


def _absolute(path: str, folder: Path) -> str:
    return os.path.normpath(folder / os.path.expanduser(path))
