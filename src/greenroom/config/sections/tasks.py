"""Tasks: names for purposes that callers ask for instead of a model, each with a list of models that can do it. Owns
these keys and the rules between them. Resolves nothing: `serving/tasks.py` does."""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Final, Literal

from pydantic import Field, JsonValue

from greenroom.config.kinds import SECONDS_MAX, Count, ModelId, NotBool, Seconds, SecondsAboveZero, Section
from greenroom.config.reader import Problem
from greenroom.config.sections.model import PARAMS_NOT_OURS_TO_CHANGE, Ability, Model

CANDIDATES_MAX: Final = 16


class Require(Section):
    """What a model of this task must be able to do. Models that cannot are passed over."""

    abilities: tuple[Ability, ...] = ()
    """Abilities that it must have; a model whose abilities are not known passes."""
    ctx_size: Count | None = None
    """Tokens that its context must hold at least; a model whose context length is not known passes."""
    strict_json: bool = False
    """It must promise to keep to a response_format of JSON (see `strict_json` of a model)."""


class Task(Section):
    """One purpose, and the models that can serve it."""

    candidates: Annotated[tuple[ModelId, ...], Field(min_length=1, max_length=CANDIDATES_MAX)]
    """Ids or aliases of models, the best first. The first serves; a later one only if the first cannot, or if the later
    one is warm and serves sooner by more than prefer_first_s."""
    prefer_first_s: Seconds = 5
    """How much longer a request waits for a better candidate rather than take a later one that is warm."""
    pin_primary: bool = False
    """Never take a later candidate because it is warm: only if those before it fail or cannot serve at all."""
    budget_s: SecondsAboveZero | None = None
    """Seconds that the whole answer may take, loading included; a caller's own smaller budget counts."""
    keep_alive_s: Annotated[float, Field(ge=-1, le=SECONDS_MAX), NotBool] | None = None
    """How long the model that answered stays afterwards, unless the caller says; 0 leaves at once, -1 stays."""
    priority: Literal["high", "normal", "low"] | Annotated[int, Field(ge=0, le=100), NotBool] | None = None
    """Priority of its requests when they name none; the first candidate's when not given."""
    set_params: dict[str, JsonValue] = {}
    """Top-level request fields set to these values whatever the caller sent; they win over those of the model."""
    require: Require | None = None
    """What a candidate must be able to do."""
    description: str | None = None
    """A sentence for people, shown in listings."""
    unlisted: bool = False
    """Leave it out of /v1/models; it can still be asked for."""

    def _problems(self) -> Iterator[Problem]:
        for name in sorted(PARAMS_NOT_OURS_TO_CHANGE & self.set_params.keys()):
            yield Problem(("set_params", name), "cannot be set: it decides the model or the shape of the answer")
        if self.keep_alive_s is not None and -1 < self.keep_alive_s < 0:
            yield Problem(("keep_alive_s",), "is seconds, or -1 to stay")


Tasks = dict[ModelId, Task]


def of_models(tasks: Mapping[str, Task], models: Mapping[str, Model], remotes: Collection[str]) -> Iterator[Problem]:
    """Tasks with the name of a model, and candidates that are no configured model or are named twice."""
    ids = {name: name for name in models}
    ids |= {alias: name for name, model in models.items() for alias in model.aliases}
    for name, task in tasks.items():
        if name in ids:
            yield Problem((name,), f"is already {'the id' if name in models else 'an alias'} of a model")
        seen: set[str] = set()
        for place, candidate in enumerate(task.candidates):
            where = (name, "candidates", place)
            model = ids.get(candidate)
            if model is None:
                what = "is a task; name models" if candidate in tasks else _not_configured(candidate, remotes)
                yield Problem(where, f"{candidate}: {what}")
            elif model in seen:
                yield Problem(where, f"{candidate} is the model {model}, which is named before")
            else:
                seen.add(model)


def _not_configured(candidate: str, remotes: Collection[str]) -> str:
    prefix, colon, rest = candidate.partition(":")
    if colon and prefix in remotes:
        keys = f"{{engine: remote, remote: {prefix}, use_model_name: {rest}}}"
        return f"a name of a provider can be no candidate; configure a model for it, with {keys}"
    if "/" in candidate or candidate.endswith(".gguf"):
        return "a model that is only on disk can be no candidate; configure it in models, with its path"
    return "there is no model of this id or alias"
