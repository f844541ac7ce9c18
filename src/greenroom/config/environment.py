"""What the environment says about the configuration: it counts between the file and the command line.

Most are marks of the key that they set. A variable that is empty counts as not set. Where several rows set one key, the
last one wins. `${env.NAME}` in a file is expanded by `macros.py`; addresses and keys of the commands that
call a gateway are in `cli/address.py`.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from greenroom.config.hub import hub_folder
from greenroom.config.kinds import Section, is_section
from greenroom.config.marks import ANY, Variable, marks
from greenroom.config.reader import Problem, Value, Where
from greenroom.config.schema import Config

HIDDEN: Final = "(hidden)"
# Variables that belong to no key and are read elsewhere.
_WITHOUT_KEY: Final = (
    Variable(
        "MODEL_REPO_ID",
        "A repository of the hub, or a path below the folders of models: the first version of a model of this id. Not "
        "read where the file has a model with `versions`.",
    ),
    Variable("HF_TOKEN", "Opens private repositories of the hub to downloads; engines never see it.", is_secret=True),
    Variable(
        "MODEL_BOSS_ALLOW_CLOUD_FALLBACK",
        "Whether requests may fall to remote models (true), until PUT /api/v1/config says it.",
    ),
    Variable("CUDA_VISIBLE_DEVICES", "The GPUs that are seen: numbers or UUIDs, as for every CUDA program."),
)


def _of_keys(section: type[Section], *above: str) -> Iterator[Variable]:
    """The variables of a section's keys, each with its whole key."""
    for name, key in section.model_fields.items():
        for variable in marks(key, Variable):
            yield replace(variable, key=".".join(filter(None, (*above, name, variable.key))))
        if not above and is_section(key.annotation):
            yield from _of_keys(key.annotation, name)


TABLE: Final = (*_of_keys(Config), *_WITHOUT_KEY)


# --- reading --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Said:
    """What the environment says: values by their place in the file, the variable of each, and what is wrong."""

    values: dict[Where, Value] = field(default_factory=dict)
    names: dict[Where, str] = field(default_factory=dict)
    # Of variables of many names: the place that is named by what follows the name's beginning, such as a tenant's.
    rests: dict[Where, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def over(self, tree: dict[str, Value]) -> dict[str, Value]:
        """The tree of a file, with these values instead of its own. Keeps what is no mapping: it is reported."""
        has_versioned = _has_versioned(tree)
        for where, value in self.values.items():
            if not (has_versioned and where[0] == "models"):
                tree = _put(tree, where, value)
        return tree

    def blamed(self, problems: Iterable[Problem]) -> Iterator[Problem]:
        """These problems, each with the variable that it is about."""
        return (replace(problem, variable=self._name_of(problem.where)) for problem in problems)

    def _name_of(self, where: Where) -> str | None:
        steps = range(len(where), 0, -1)
        found = next((name for size in steps if (name := self.names.get(where[:size]))), None)
        return found or self.rests.get(where)


def said(environ: Mapping[str, str], table: tuple[Variable, ...] = TABLE) -> Said:
    """Read the variables that set a key. Their values are not checked yet."""
    found = Said()
    for row in table:
        if row.adds or not row.key:
            continue
        for name in row.names_in(environ):
            where = row.where(name)
            found.names[where] = name
            if row.name.endswith(ANY):
                found.rests[where[:-1]] = name
            if name + ANY == row.name:
                found.problems.append(Problem(where, "is only the beginning of a name"))
                continue
            try:
                found.values[where] = row.read(environ[name].strip())
            except ValueError as error:
                found.problems.append(Problem(where, str(error)))
    if (model := _versioned_name(environ)) is not None:
        where = ("models", model, "versions", "repo_id")
        found.values[where], found.names[where] = environ[MODEL_REPO_ID].strip(), MODEL_REPO_ID
        found.rests[where[:2]] = MODEL_REPO_ID
    return found


def _versioned_name(environ: Mapping[str, str]) -> str | None:
    """The id of the model that MODEL_REPO_ID makes; None if it is not set."""
    repo_id = environ.get(MODEL_REPO_ID, "").strip()
    return (repo_id.strip("/") or repo_id) if repo_id else None


def _has_versioned(tree: Mapping[str, Value]) -> bool:
    models = tree.get("models")
    said = models.values() if isinstance(models, dict) else ()
    return any(isinstance(model, dict) and model.get("versions") is not None for model in said)


def _put(tree: dict[str, Value], where: Where, value: Value) -> dict[str, Value]:
    first, *rest = where
    if not rest:
        return {**tree, str(first): value}
    below = tree.get(str(first), {})
    return {**tree, str(first): _put(below, tuple(rest), value)} if isinstance(below, dict) else tree


# --- folders --------------------------------------------------------------------------------------------------------

MODEL_BASE_PATH: Final = "MODEL_BASE_PATH"
MODEL_REPO_ID: Final = "MODEL_REPO_ID"
# Where the hub's cache is, if one of them is set; the first one counts. HF_HOME has it in a folder.
_CACHES: Final = (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub"), ("TRANSFORMERS_CACHE", ""))


def hub_cache(environ: Mapping[str, str]) -> str | None:
    """The hub's cache as the environment says it; None if it says nothing."""
    for name, folder in _CACHES:
        if given := environ.get(name):
            return os.path.abspath(os.path.join(os.path.expanduser(given), folder))
    return None


def roots(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Folders of models that the environment names, separated as in PATH."""
    given = environ.get(MODEL_BASE_PATH, "")
    return tuple(os.path.abspath(os.path.expanduser(one)) for one in given.split(os.pathsep) if one)


def with_folders(config: Config, environ: Mapping[str, str], *, is_file: bool = True) -> Config:
    """The configuration of a file, or an empty one, with the folders of models that the environment names. The hub's
    cache is added to other folders, or where there is no file: a variable that is set for other programs opens nothing
    beside a configuration that has no folders."""
    library = config.library
    shelves = (*library.roots, *roots(environ))
    cache = hub_cache(environ)
    if cache is not None and (config.model_roots or shelves or not is_file):
        shelves = (*shelves, cache)
    known = dict.fromkeys(root for root in shelves if root not in config.model_roots)
    return config.model_copy(update={"library": library.model_copy(update={"roots": tuple(known)})})


def with_cache(config: Config, environ: Mapping[str, str]) -> Config:
    """The same with the hub's cache, named or not, if the model of MODEL_REPO_ID could be fetched to nowhere else."""
    if config.roots or _versioned_name(environ) not in config.models:
        return config
    cache = hub_cache(environ) or os.path.dirname(hub_folder("", environ))
    return config.model_copy(update={"library": config.library.model_copy(update={"roots": (cache,)})})


# --- showing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShownVariable:
    """A variable, the key it sets, the value in force, and where that value is from."""

    name: str
    key: str
    value: Any
    origin: str
    sentence: str


def shown(config: Config, environ: Mapping[str, str], places: Container[Where]) -> Iterator[ShownVariable]:
    """Every row of the table; for a row of many names, each name that is set, or the row itself. `places` are those of
    the file that have a value."""
    winners = said(environ).names
    for row in TABLE:
        for name in row.names_in(environ) or [row.name]:
            where = row.where(name) if row.key else ()
            winner = winners.get(where)
            origin = "unset" if not row.key else "file" if where in places else "default"
            if row.adds:
                origin = "added" if environ.get(name) else origin
            elif winner is not None and winner != name:
                origin = winner
            elif environ.get(name):
                origin = "environment"
            value = _value(config, where) if row.key else environ.get(name)
            is_hidden = row.is_secret and value is not None
            yield ShownVariable(name, ".".join(map(str, where)), HIDDEN if is_hidden else value, origin, row.sentence)


def _value(config: Config, where: Where) -> Any:
    """The value of this key; None where a mapping has no such name."""
    value: Any = config
    for step in where:
        value = value.get(step) if isinstance(value, Mapping) else getattr(value, str(step), None)
        if value is None:
            return None
    return value
