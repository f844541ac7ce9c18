"""Whole parts on several GPUs: which part goes where, so that each GPU can hold what it gets.

Pure arithmetic on sizes. Used for placements, and again by an engine that must know which part is where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# Steps of the search. Pipelines have few components: nearly always the first try fits, or none does.
STEPS_MAX: Final = 2_000


def pack(parts: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """The index of the room for each part, such that every room holds its parts; None if no way was found.

    The largest part goes first, each to the room that is emptiest by then, which balances the rooms.
    """
    order = sorted(range(len(parts)), key=lambda one: -parts[one])
    places, left = [0] * len(parts), list(rooms)
    return places if _place(parts, order, places, left, _Steps()) else None


class _Steps:
    """Counts the steps of one search."""

    def __init__(self) -> None:
        self.left = STEPS_MAX


def _place(parts: Sequence[int], order: Sequence[int], places: list[int], left: list[int], steps: _Steps) -> bool:
    """Place the parts of `order`, the largest first. If it fails, `left` is as it was."""
    if not order:
        return True
    if sum(parts[one] for one in order) > sum(room for room in left if room > 0):
        return False
    first, tried = order[0], set()
    for room in sorted(range(len(left)), key=lambda one: -left[one]):
        steps.left -= 1
        # Rooms of the same size are as good as each other.
        if parts[first] > left[room] or left[room] in tried or steps.left < 0:
            continue
        tried.add(left[room])
        places[first] = room
        left[room] -= parts[first]
        if _place(parts, order[1:], places, left, steps):
            return True
        left[room] += parts[first]
    return False
