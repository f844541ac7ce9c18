"""What a run of the world can be given: faults that decide how things end, and watchers that see everything.

The world asks `Faults` how each move, answer and recall ends. Whatever happens at times of its own (foreign memory, a
changed configuration, a crash) is arranged with `World.after`. A `Watcher` sees every event and effect. Two runs with
the same `TraceHash` took the same decisions: records hold no sets, so their text does not depend on the hash seed of
the process.
"""

from __future__ import annotations

from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

from greenroom.core import events as ev
from greenroom.core.model import Claim, LeaseId, Move, MoveId, Outcome, Tier
from greenroom.sim.records import SimCall


class MoveFate(NamedTuple):
    """How a move ends. A move that hangs fails at its time limit."""

    outcome: Outcome
    took_s: float
    seen: Claim | None = None


class Ending(Enum):
    ANSWERED = "answered"
    CLIENT_GOES = "client_goes"
    LOST_EARLY = "lost_early"  # before its first byte; the engine goes on
    BUSY = "busy"  # the engine has no room for it and goes on
    CRASH = "crash"  # the engine dies with all its requests


class ServeFate(NamedTuple):
    """How an answer ends, and after how long. `left_in` is the tier in which a crash leaves the slot."""

    ending: Ending
    after_s: float
    left_in: Tier = Tier.COLD


class Faults:
    """All goes well. A subclass lets some things go wrong."""

    def on_move(self, move: Move, usual: MoveFate) -> MoveFate:
        """A move begins: how it will end."""
        return usual

    def on_abort(self, move: MoveId) -> bool:
        """A move is to be aborted: True if it still can be. Otherwise it ends as it would have."""
        return True

    def on_grant(self, call: SimCall, usual_s: float) -> ServeFate | None:
        """A request is granted: how its answer will end. None: well, in the usual time."""
        return None

    def on_recall(self, lease: LeaseId, within_s: float) -> float:
        """A lease is recalled: the seconds until its holder leaves."""
        return within_s / 2


class Watcher:
    """Sees everything that passes between the world and the scheduler. A subclass says what to do with it."""

    def told(self, event: ev.Event) -> None:
        """The scheduler is about to handle this."""

    def asked(self, effect: str, *details: object) -> None:
        """The scheduler asks for this."""

    def settled(self, event: ev.Event) -> None:
        """The scheduler has handled this."""


class TraceHash(Watcher):
    """Keeps nothing but a hash of all events and effects, with their reasons, in order."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def told(self, event: ev.Event) -> None:
        self._hash.update(repr(event).encode())

    def asked(self, effect: str, *details: object) -> None:
        self._hash.update(f"{effect} {details!r}\n".encode())

    def hex(self) -> str:
        return self._hash.hexdigest()
