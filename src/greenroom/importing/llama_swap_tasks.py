"""Selectors of a llama-swap file as tasks: a name, and the models that serve it. Owns which strategies are followed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from greenroom.config.kinds import id_problem
from greenroom.config.reader import Value
from greenroom.importing.llama_swap_models import UNKNOWN
from greenroom.importing.source_keys import SourceKeys

CANDIDATES_MAX: Final = 16
# The target that is ready, else the first; or the first alone.
_STRATEGIES: Final[dict[str, dict[str, Value]]] = {"warm": {"prefer_first_s": 0}, "pin": {"pin_primary": True}}
_NOT_MAPPED: Final = {
    "settings.spillover": "requests of one model are not spread over others",
    "name": "a task has no name for people",
    "metadata": "a task has no metadata",
}


def of_selectors(selectors: SourceKeys, known: Collection[str]) -> dict[str, Value]:
    """`known` are the ids and aliases of models that were imported."""
    tasks: dict[str, Value] = {}
    for name, keys in selectors.each():
        strategy, targets = keys.text("strategy") or "", keys.texts("targets")
        candidates = [target for target in targets if target in known]
        for target in targets:
            if target not in known:
                keys.notes.unmapped((*keys.where, "targets"), f"{target} is no model that was imported")
        about: dict[str, Value] = {}
        if (description := keys.text("description")) is not None:
            about["description"] = description
        if keys.flag("unlisted"):
            about["unlisted"] = True
        keys.name_rest(_NOT_MAPPED, UNKNOWN)
        if why := _why_not(name, strategy, candidates, known):
            keys.notes.unmapped(keys.where, f"the whole selector: {why}")
            continue
        tasks[name] = {"candidates": list(candidates), **_STRATEGIES[strategy], **about}
        keys.notes.differs(keys.where, "it is a task here: the next target serves if one fails")
    return tasks


def _why_not(name: str, strategy: str, candidates: list[str], known: Collection[str]) -> str | None:
    if (why := id_problem(name)) is not None:
        return why
    if name in known:
        return "a model has this name"
    if strategy not in _STRATEGIES:
        return "requests are not spread over models" if strategy == "spillover" else "its strategy is warm or pin"
    if not candidates:
        return "none of its targets was imported"
    return f"a task has at most {CANDIDATES_MAX} candidates" if len(candidates) > CANDIDATES_MAX else None
