"""Where things can go wrong: the world asks `Faults` how each move, answer and recall ends. `NoFaults`: all go well.

Owns the questions, not the answers. Whatever happens at times of its own (foreign memory, a changed configuration, a
crash) is arranged with `World.after`.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from greenroom.core.model import Claim, LeaseId, Move, MoveId, Outcome, Tier
from greenroom.sim.records import SimCall


class MoveFate(NamedTuple):
    """How a move ends. A move that hangs fails at its time limit."""

    outcome: Outcome
    took_s: float
    seen: Claim | None = None
    concurrency: int | None = None


class Ending(Enum):
    ANSWERED = "answered"
    CLIENT_GOES = "client_goes"
    LOST_EARLY = "lost_early"  # before its first byte; the engine goes on
    CRASH = "crash"  # the engine dies with all its requests


class ServeFate(NamedTuple):
    """How an answer ends, and after how long. `left_in` is the tier in which a crash leaves the slot."""

    ending: Ending
    after_s: float
    left_in: Tier = Tier.COLD


class Faults(Protocol):
    def on_move(self, move: Move, usual: MoveFate) -> MoveFate:
        """A move begins: how it will end."""
        ...

    def on_abort(self, move: MoveId) -> bool:
        """A move is to be aborted: True if it still can be. Otherwise it ends as it would have."""
        ...

    def on_grant(self, call: SimCall, usual_s: float) -> ServeFate | None:
        """A request is granted: how its answer will end. None: well, in the usual time."""
        ...

    def on_recall(self, lease: LeaseId, within_s: float) -> float:
        """A lease is recalled: the seconds until its holder leaves."""
        ...


class NoFaults:
    def on_move(self, move: Move, usual: MoveFate) -> MoveFate:
        return usual

    def on_abort(self, move: MoveId) -> bool:
        return True

    def on_grant(self, call: SimCall, usual_s: float) -> ServeFate | None:
        return None

    def on_recall(self, lease: LeaseId, within_s: float) -> float:
        return within_s / 2
