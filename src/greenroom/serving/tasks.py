"""From the name of a task to the models that may serve a request: the one place where tasks are resolved.

Requests, explanations and listings ask here. Which of the candidates a request gets, the scheduler decides
(`core/decide/arrival.py`); here is only said which there are, in which order, and by which rule it chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from greenroom.config.schema import PRIORITY_NAMES, Ability, Config, Model, Require, Task
from greenroom.config.sections.model import KEYS_OF_ENGINES
from greenroom.core.events import Choice
from greenroom.core.model import ModelId
from greenroom.errors import ModelNotFound, NoCandidate
from greenroom.runtime.catalogue import Catalog

_NOTHING: Final = Require()
_NO_JSON: Final = "it does not promise strict JSON"


@dataclass(frozen=True, slots=True)
class CandidateFacts:
    """What is known of a candidate. None where it is not known."""

    id: ModelId
    abilities: frozenset[Ability] | None = None
    ctx_size: int | None = None
    keeps_json: bool = False
    is_remote: bool = False

    @classmethod
    def of(
        cls,
        id: ModelId,
        model: Model,
        engine: str,
        abilities: frozenset[Ability] | None,
        *,
        keeps_json: bool,
        is_remote: bool,
    ) -> CandidateFacts:
        """What its configuration says, and else what its engine promises."""
        ctx_size = model.ctx_size if "ctx_size" in KEYS_OF_ENGINES.get(engine, ()) else None
        strict_json = keeps_json if model.strict_json is None else model.strict_json
        return cls(id, abilities, ctx_size or None, strict_json, is_remote)


# The facts of the model of this id or alias; None if it cannot be asked for, as before its first version.
FactsOf = Callable[[str], CandidateFacts | None]
# Whether the caller may use the model of this id.
Sees = Callable[[str], bool]


def model_facts(catalog: Catalog) -> FactsOf:
    """What tasks need to know of the models in this catalog."""

    def facts_of(name: str) -> CandidateFacts | None:
        entry = catalog.find(name)
        if entry is None:
            return None
        facts, engine = entry.facts, entry.engine
        return CandidateFacts.of(
            entry.id,
            entry.config,
            engine.name,
            facts.abilities,
            keeps_json=engine.keeps_json,
            is_remote=facts.is_remote,
        )

    return facts_of


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A candidate that cannot serve a request, and why not."""

    model: str
    why: str


@dataclass(frozen=True, slots=True)
class Ladder:
    """The models that may serve a request for a task, the best first; and those that may not.

    `last_resort` are remote ones that stand after another candidate in the configuration.
    """

    task: TaskRoute
    models: tuple[CandidateFacts, ...]
    left_out: tuple[LeftOut, ...] = ()
    last_resort: frozenset[ModelId] = frozenset()

    def choice(self, served_as: Mapping[ModelId, ModelId]) -> Choice:
        """How the scheduler chooses among these of its models, each under its id in the scheduler."""
        section = self.task.section
        remote = tuple(known for model, known in served_as.items() if model in self.last_resort)
        return Choice(section.prefer_first_s, section.pin_primary, remote)


class TaskRoute:
    """A configured task, with what is encoded once."""

    __slots__ = ("name", "puts", "section")

    def __init__(self, name: str, section: Task) -> None:
        self.name = name
        self.section = section
        self.puts: Final = {field: msgspec.json.encode(value) for field, value in section.set_params.items()}

    def priority_or(self, other: int) -> int:
        """The priority of its requests; `other` where it says none."""
        said = self.section.priority
        return other if said is None else PRIORITY_NAMES[said] if isinstance(said, str) else said


class Tasks:
    """All tasks. `facts_of` tells about models; `allows_remote` whether requests may fall to remote ones."""

    def __init__(self, facts_of: FactsOf, allows_remote: Callable[[], bool] = lambda: True) -> None:
        self._facts_of = facts_of
        self._routes: Mapping[str, TaskRoute] = {}
        self.allows_remote = allows_remote

    def configure(self, config: Config) -> None:
        self._routes = {name: TaskRoute(name, task) for name, task in config.tasks.items()}

    def __bool__(self) -> bool:
        return bool(self._routes)

    def find(self, name: str) -> TaskRoute | None:
        return self._routes.get(name)

    def seen_by(self, sees: Sees) -> Iterator[TaskRoute]:
        """The tasks of which the caller may use at least one model."""
        return (task for task in self._routes.values() if self.is_seen(task, sees))

    def is_seen(self, task: TaskRoute, sees: Sees) -> bool:
        return any(sees(one.id) for one in self._facts(task))

    def is_task(self, name: str, sees: Sees) -> bool:
        """True if there is such a task for this caller."""
        return (task := self.find(name)) is not None and self.is_seen(task, sees)

    def ladder(
        self, task: TaskRoute, sees: Sees, ability: Ability | None = None, *, wants_json: bool = False
    ) -> Ladder:
        """The models that may serve this caller's request. Models that the caller may not use are not mentioned.

        Raises ModelNotFound if it may use none of them, and NoCandidate if none of those can do it.
        """
        found: list[CandidateFacts] = []
        left_out: list[LeftOut] = []
        fallbacks: set[ModelId] = set()
        is_seen = False
        for place, name in enumerate(task.section.candidates):
            facts = self._facts_of(name)
            if not sees(name if facts is None else facts.id):
                continue
            is_seen = is_seen or facts is not None
            why = (
                "it has no version yet"
                if facts is None
                else self._lack(facts, task.section, ability, place, wants_json)
            )
            if facts is None or why is not None:
                left_out.append(LeftOut(name, why or ""))
                continue
            found.append(facts)
            if place:
                fallbacks.add(facts.id)
        if not is_seen:
            raise ModelNotFound.named(task.name)
        last_resort = frozenset(one.id for one in found if one.is_remote and one.id in fallbacks)
        if wants_json and (outdone := _outdone(found, last_resort)):
            left_out += [LeftOut(one.id, _NO_JSON) for one in outdone]
            found = [one for one in found if one not in outdone]
        if not found:
            reasons = "; ".join(f"{one.model}: {one.why}" for one in left_out)
            raise NoCandidate(f"No model of the task {task.name} can serve this request. {reasons}.", param="model")
        return Ladder(task, tuple(found), tuple(left_out), last_resort)

    def never(self, task: TaskRoute) -> dict[str, str]:
        """The candidates that can serve no request for this task, by their names in it, and why not."""
        known = {name: self._facts_of(name) for name in task.section.candidates}
        lacks = {name: facts and _lack(facts, task.section, None) for name, facts in known.items()}
        return {name: why for name, why in lacks.items() if isinstance(why, str)}

    def _lack(
        self, facts: CandidateFacts, task: Task, ability: Ability | None, place: int, wants_json: bool
    ) -> str | None:
        """Why this model cannot serve; None if it can. The first candidate is asked for even if it promises no JSON."""
        if place and facts.is_remote and not self.allows_remote():
            return "it is remote, and remote models are no fallback now"
        if place and wants_json and not facts.keeps_json:
            return _NO_JSON
        return _lack(facts, task, ability)

    def _facts(self, task: TaskRoute) -> Iterator[CandidateFacts]:
        return (facts for name in task.section.candidates if (facts := self._facts_of(name)) is not None)


def _outdone(found: list[CandidateFacts], last_resort: frozenset[ModelId]) -> list[CandidateFacts]:
    """Those that promise no JSON where another does. The promise of a last resort does not count against local ones."""
    promising = [one for one in found if one.keeps_json]
    is_kept_before = any(one.id not in last_resort for one in promising)
    return [one for one in found if promising and not one.keeps_json and (is_kept_before or one.is_remote)]


def _lack(facts: CandidateFacts, task: Task, ability: Ability | None) -> str | None:
    """What the model lacks for this request or this task; None if nothing."""
    require = task.require or _NOTHING
    wanted = (*require.abilities, *(() if ability is None else (ability,)))
    if facts.abilities is not None and (missing := [one for one in wanted if one not in facts.abilities]):
        return f"it does not do {missing[0].value}"
    least = require.ctx_size
    if least is not None and facts.ctx_size is not None and facts.ctx_size < least:
        return f"its context holds {facts.ctx_size:,} tokens, and the task needs {least:,}"
    if require.strict_json and not facts.keeps_json:
        return _NO_JSON
    return None
