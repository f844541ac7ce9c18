"""What swaps would be needed if service took no time: the classic offline figures, for traces and drawn arrivals.

Owns counts only: no waiting, no concurrency. Least recently used is what a simple router does; Belady sends away
whoever is asked for again last and is the least that can be had without reordering; regrouping sorts the requests of a
window by model first, which is what letting requests wait can buy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

Asked = Sequence[tuple[float, str]]


def lru(models: Sequence[str], slots: int) -> int:
    """Loads when the least recently used leaves. The last key of a dict is the newest."""
    ready: dict[str, None] = {}
    loads = 0
    for model in models:
        loads += model not in ready
        ready.pop(model, None)
        ready[model] = None
        if len(ready) > slots:
            del ready[next(iter(ready))]
    return loads


def belady(models: Sequence[str], slots: int) -> int:
    """Loads when whoever is asked for again last leaves; the newcomer itself cannot be turned away."""
    again = _asked_again(models)
    ready: dict[str, int] = {}
    loads = 0
    for place, model in enumerate(models):
        if model not in ready:
            loads += 1
            if len(ready) >= slots:
                del ready[max(ready, key=lambda one: ready[one])]
        ready[model] = again[place]
    return loads


def _asked_again(models: Sequence[str]) -> list[int]:
    """For each request, the place of the next one for the same model."""
    following: dict[str, int] = {}
    again = [0] * len(models)
    for place in range(len(models) - 1, -1, -1):
        again[place] = following.get(models[place], len(models))
        following[models[place]] = place
    return again


def regrouped(asked: Asked, window_s: float) -> list[str]:
    """The requests with those of each window grouped by model, the most recently used model first."""
    ordered: list[str] = []
    used: dict[str, int] = {}
    for _, window in groupby(asked, key=lambda one: int(one[0] // window_s)):
        ordered += sorted((model for _, model in window), key=lambda model: (-used.get(model, -1), model))
        used |= {model: place for place, model in enumerate(ordered)}
    return ordered


def swaps_per_request(asked: Asked, slots: int) -> dict[str, float]:
    models = [model for _, model in asked]
    counts = {"lru": lru(models, slots), "belady": belady(models, slots)}
    for window_s in (10.0, 30.0):
        counts[f"regroup {window_s:g} s"] = lru(regrouped(asked, window_s), slots)
    return {name: count / len(models) for name, count in counts.items()}
