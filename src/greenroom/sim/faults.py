"""Where things can go wrong. The world asks at every turn; `NoFaults` says that all goes well.

Owns the questions, not the answers: a fault plan draws them from its own random numbers, so that one seed decides
everything. What comes at times of its own (foreign memory, changed configurations, operators, shutdown) a plan arranges
in `begin`.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from greenroom.core.model import Claim, LeaseId, Move, MoveId, Outcome, Tier
from greenroom.sim.records import Call

if TYPE_CHECKING:
    from greenroom.sim.world import World


class MoveFate(NamedTuple):
    """How a move ends. One that hangs takes as long as its time limit and then has failed."""

    outcome: Outcome
    took_s: float
    seen: Claim | None = None
    concurrency: int | None = None


class Ending(Enum):
    ANSWERED = "answered"
    CLIENT_GOES = "client_goes"
    LOST_EARLY = "lost_early"  # before its first byte; its engine lives on
    CRASH = "crash"  # the engine dies, with everything that runs there


class ServeFate(NamedTuple):
    """How an answer ends, and after how long. `left_in` is where a crash leaves the slot."""

    ending: Ending
    after_s: float
    left_in: Tier = Tier.COLD


class Faults(Protocol):
    def begin(self, world: World) -> None:
        """The world is configured and nothing has happened yet: arrange what comes at times of its own."""
        ...

    def on_move(self, move: Move, usual: MoveFate) -> MoveFate:
        """A move begins."""
        ...

    def on_abort(self, move: MoveId) -> bool:
        """A move is to be stopped: whether it still can be. Otherwise it ends as it would have."""
        ...

    def on_grant(self, call: Call, usual_s: float) -> ServeFate | None:
        """A request is granted. None: it is answered in the usual time."""
        ...

    def on_recall(self, lease: LeaseId, within_s: float) -> float:
        """A lease is recalled: after how long its holder leaves."""
        ...


class NoFaults:
    def begin(self, world: World) -> None:
        """Nothing comes."""

    def on_move(self, move: Move, usual: MoveFate) -> MoveFate:
        return usual

    def on_abort(self, move: MoveId) -> bool:
        return True

    def on_grant(self, call: Call, usual_s: float) -> ServeFate | None:
        return None

    def on_recall(self, lease: LeaseId, within_s: float) -> float:
        return within_s / 2
