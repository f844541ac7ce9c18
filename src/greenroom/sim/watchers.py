"""Watchers see every event and effect of a simulated run; these keep them as one hash or as lists.

Two runs with the same hash took the same decisions. Records hold no sets, so their text does not depend on the hash
seed of the process.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Protocol

from greenroom.core import events as ev


class Watcher(Protocol):
    """Sees everything that passes between the world and the scheduler."""

    def told(self, event: ev.Event) -> None:
        """The scheduler is about to handle this."""
        ...

    def asked(self, effect: str, *details: object) -> None:
        """The scheduler asks for this."""
        ...

    def settled(self, event: ev.Event) -> None:
        """The scheduler has handled this."""
        ...


class TraceHash:
    """A watcher that keeps nothing but a hash of all events and effects, with their reasons, in order."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def told(self, event: ev.Event) -> None:
        self._hash.update(repr(event).encode())

    def asked(self, effect: str, *details: object) -> None:
        self._hash.update(f"{effect} {details!r}\n".encode())

    def settled(self, event: ev.Event) -> None:
        """Nothing more is seen then."""

    def hex(self) -> str:
        return self._hash.hexdigest()


class Transcript:
    """A watcher that keeps events and effects, each effect with the number of the event that caused it."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self.effects: list[tuple[int, str, tuple[object, ...]]] = []

    def told(self, event: ev.Event) -> None:
        self.events.append(event)

    def asked(self, effect: str, *details: object) -> None:
        self.effects.append((len(self.events), effect, details))

    def settled(self, event: ev.Event) -> None:
        """Nothing more is seen then."""
