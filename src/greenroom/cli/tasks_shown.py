"""Tasks as `greenroom check` shows them: their candidates, which of them are remote, and which can never serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from greenroom.config.schema import Config
    from greenroom.serving.tasks import CandidateFacts

TITLES: Final = ("task", "candidates", "note")


def all_tasks(config: Config, warnings: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The tasks, and warnings for candidates that can never serve them. `warnings` are those of models and remotes."""
    from greenroom.serving.tasks import Tasks

    ids = {name: name for name in config.models}
    ids |= {alias: name for name, model in config.models.items() for alias in model.aliases}
    tasks = Tasks(lambda name: _facts(ids[name], config))
    tasks.configure(config)
    found, wrong = [], []
    for name, task in config.tasks.items():
        route = tasks.find(name)
        assert route is not None
        never = tasks.never(route)
        candidates = []
        for said in task.candidates:
            model = config.models[ids[said]]
            places = tuple(f"{place}: " for place in (f"models.{ids[said]}", f"remotes.{model.remote}"))
            problems = [text for text in warnings if text.startswith(places)]
            problems += [f"it can never serve: {never[said]}"] if said in never else []
            candidates.append(
                {"name": said, "model": ids[said], "remote": model.engine == "remote", "problems": problems}
            )
        if len(never) == len(task.candidates):
            reasons = "; ".join(f"{one}: {why}" for one, why in never.items())
            wrong.append(f"tasks.{name}: no candidate can ever serve it, so requests get 400 no_candidate. {reasons}")
        else:
            wrong += [f"tasks.{name}: {one} can never serve it: {why}" for one, why in never.items()]
        found.append(
            {
                "name": name,
                "candidates": candidates,
                "pin_primary": task.pin_primary,
                "budget_s": task.budget_s,
                "unlisted": task.unlisted,
            }
        )
    return found, wrong


def row(task: Mapping[str, Any]) -> Sequence[str]:
    notes = [word for word in ("pin_primary", "unlisted") if task[word]]
    notes += [] if task["budget_s"] is None else [f"budget_s {task['budget_s']:g}"]
    return (task["name"], ", ".join(map(_candidate, task["candidates"])), ", ".join(notes) or "-")


def _candidate(one: Mapping[str, Any]) -> str:
    marks = [*(["remote"] if one["remote"] else []), *(["see below"] if one["problems"] else [])]
    return f"{one['name']} ({', '.join(marks)})" if marks else one["name"]


def _facts(id: str, config: Config) -> CandidateFacts:
    from greenroom.core.model import ModelId
    from greenroom.engines.registry import engine_for, facts_of
    from greenroom.serving.tasks import CandidateFacts

    model = config.models[id]
    engine, facts = engine_for(model), facts_of(model)
    return CandidateFacts.of(
        ModelId(id), model, engine.name, facts.abilities, keeps_json=engine.keeps_json, is_remote=facts.is_remote
    )
