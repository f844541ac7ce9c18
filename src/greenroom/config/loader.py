"""From a file to a configuration, or to one error that names every problem in it.

Owns the order of things: read, expand, validate, make paths absolute. A file either loads whole or not at all. Never
keeps anything: a reload loads anew and compares (`diff.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from greenroom.config import macros, names, paths
from greenroom.config.problems import clashing_recordings
from greenroom.config.problems import problems as problems_of_config
from greenroom.config.reader import Source, Value, read
from greenroom.config.report import Problem, Where, refusal
from greenroom.config.schema import Config
from greenroom.config.wording import problems_of
from greenroom.errors import ConfigError

ENVIRONMENT_NAME = "GREENROOM_CONFIG"
DEFAULT_NAME = "greenroom.yaml"


@dataclass(frozen=True, slots=True)
class Loaded:
    config: Config
    path: Path
    # What will not work although the file is right; said to the operator, never in the way of a start.
    warnings: tuple[str, ...]


def load(path: str | Path, environ: Mapping[str, str] = os.environ) -> Loaded:
    """Load a file. Raises ConfigError, whose message has one line for each problem, and changes nothing."""
    # `file` is what the operator typed, for messages; the working directory may change later, so the path is absolute.
    file = Path(os.path.expanduser(path))
    source = read(file)
    tree, not_expanded = macros.expand(source.tree, environ)
    checked = _validated(tree, source, not_expanded)
    if not isinstance(checked, Config):
        raise refusal(str(file), [*source.problems, *not_expanded, *checked], source.lines)
    if source.problems or not_expanded:
        raise refusal(str(file), [*source.problems, *not_expanded], source.lines)
    absolute = Path(os.path.abspath(file))
    config = paths.resolved(checked, absolute.parent)
    if clashes := list(clashing_recordings(config.server, absolute)):
        raise refusal(str(file), clashes, source.lines)
    return Loaded(config, absolute, tuple(problems_of_config(config)))


def find(given: str | Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """The file to load: the one given, else the environment's, else ./greenroom.yaml. Raises ConfigError if none."""
    named = given or environ.get(ENVIRONMENT_NAME)
    if named:
        return Path(named)
    if Path(DEFAULT_NAME).exists():
        return Path(DEFAULT_NAME)
    raise ConfigError(
        f"no configuration: there is no {DEFAULT_NAME} here; name a file with --config or {ENVIRONMENT_NAME}"
    )


def _validated(tree: dict[str, Value], source: Source, not_expanded: tuple[Problem, ...]) -> Config | list[Problem]:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        # The schema compares the names of models only once each model is right; here that is not waited for.
        found = [*problems_of(error, source.lines), *names.clashes(_names(tree))]
    # A value whose macro is not known is wrong for that reason alone.
    blamed = {problem.where for problem in not_expanded}
    return [problem for problem in found if not any(_is_within(problem.where, where) for where in blamed)]


def _is_within(where: Where, outer: Where) -> bool:
    return where[: len(outer)] == outer


def _names(tree: dict[str, Value]) -> Iterator[tuple[str, list[str]]]:
    """Ids and aliases of a tree that need not be right."""
    models = tree.get("models")
    for name, model in models.items() if isinstance(models, dict) else ():
        aliases = model.get("aliases") if isinstance(model, dict) else None
        yield name, [str(alias) for alias in aliases] if isinstance(aliases, list) else []
