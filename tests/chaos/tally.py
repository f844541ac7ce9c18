"""How many faults of each kind there were."""

from __future__ import annotations

from collections import Counter


class Tally:
    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()

    def count(self, kind: str) -> None:
        self.faults[kind] += 1

    @property
    def total(self) -> int:
        return self.faults.total()
