"""Finds stop sequences in text that comes in pieces, and lets out nothing that may belong to one.

Owns the text held back. The first sequence to be complete in the text ends it.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.is_found = False

    def add(self, text: str) -> str:
        """The text that surely comes before any stop sequence."""
        if not self._stops:
            return text
        if self.is_found:
            return ""
        self._held += text
        # The one that is complete first counts, so that it does not matter where pieces end; of several the longest.
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.is_found = True
            return self._release(min(found)[1])
        return self._release(len(self._held) - self._hopeful())

    def end(self) -> str:
        """No more text comes: what was held back was no stop sequence."""
        return "" if self.is_found else self._release(len(self._held))

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], "" if self.is_found else self._held[length:]
        return released

    def _hopeful(self) -> int:
        """How many of the last characters could be the beginning of a stop sequence."""
        for length in range(min(len(self._held), self._longest - 1), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
