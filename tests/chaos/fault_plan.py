"""What goes wrong when something begins: moves fail, hang or run out of memory, answers are lost or crash.

Owns the answers to the world's questions (`hooks.py`). What happens at times of its own is `disturbances.py`'s.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from greenroom.core.model import Claim, LeaseId, Move, MoveId, MoveKind, Outcome, SlotId, Tier
from greenroom.sim.hooks import Ending, Faults, MoveFate, ServeFate
from greenroom.sim.records import SimCall
from greenroom.sim.world import World
from tests.chaos.scenario import HOST, REMOTE, Scenario

# A hang ends at the time limit of the move.
HANG_MAX_S = 40.0

COMING = (
    "load_fails",
    "out_of_memory_at_load",
    "lease_lost",
    "store_down",
    "load_hangs",
    "load_is_slow",
    "takes_more_than_claimed",
    "crashes_while_loading",
)
GOING = ("leaving_fails", "leaving_hangs")
MAKING_ROOM = (*GOING, "room_refused", "room_refused")
ANSWERS = ("client_goes", "lost_early", "crash", "out_of_memory_at_run", "answer_hangs", "crash_leaves_copy")


class FaultCounts:
    """How many faults of each kind there were."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()

    def count(self, kind: str) -> None:
        self.faults[kind] += 1


class FaultPlan(Faults):
    def __init__(self, scenario: Scenario, counts: FaultCounts) -> None:
        self._odds = scenario.odds
        self._random = Random(f"{scenario.seed}:mischief")
        # Of its own, so that nothing else is drawn differently where copies are folded.
        self._folding = Random(f"{scenario.seed}:folded")
        self._folded = scenario.folded
        self._busy = Random(f"{scenario.seed}:busy")
        # What the copy of each slot takes of the host, told whenever it has gone to sleep.
        self._copies: dict[SlotId, int] = {}
        self._counts = counts
        self._world: World | None = None
        self._is_over = False
        # While the store is down every load ends that way.
        self.store_down_until = 0.0
        # A process that dies may leave its host copy only while devices are as they were when it was loaded.
        self.copies_survive = True

    def stop(self) -> None:
        """No more faults. What hangs already still has to end."""
        self._is_over, self.store_down_until = True, 0.0

    def attach(self, world: World) -> None:
        self._world = world

    # --- moves --------------------------------------------------------------------------------------------------------

    def on_move(self, move: Move, usual: MoveFate) -> MoveFate:
        return self._with_copy(move, self._drawn(move, usual))

    def _with_copy(self, move: Move, fate: MoveFate) -> MoveFate:
        """Not a fault: a folded copy takes less host memory than planned."""
        sleeps = move.kind in (MoveKind.SLEEP, MoveKind.PREPARE) and HOST in move.claim
        if not (sleeps and self._folded) or fate.outcome is not Outcome.DONE or fate.seen is not None:
            return fate
        if move.slot not in self._copies:
            self._counts.count("sleeps_in_less")
            self._copies[move.slot] = int(move.claim[HOST] * self._folding.choice(self._folded))
        return fate._replace(seen={HOST: self._copies[move.slot]})

    def _drawn(self, move: Move, usual: MoveFate) -> MoveFate:
        comes = move.kind not in (MoveKind.SLEEP, MoveKind.UNLOAD)
        if comes and self._world is not None and self._world.now < self.store_down_until:
            self._counts.count("store_down")
            return usual._replace(outcome=Outcome.STORE_DOWN, took_s=0.05)
        if self._is_over or self._random.random() >= self._odds.move:
            return usual
        leaving = GOING if move.makes_room_for is None else MAKING_ROOM
        kind = self._random.choice(COMING if comes else leaving)
        self._counts.count(kind)
        return self._fate(kind, move, usual)

    def _fate(self, kind: str, move: Move, usual: MoveFate) -> MoveFate:
        part_s, hang_s = usual.took_s * self._random.random(), HANG_MAX_S * self._random.random()
        match kind:
            case "load_fails" | "leaving_fails":
                return usual._replace(outcome=Outcome.FAILED, took_s=part_s)
            case "out_of_memory_at_load":
                return usual._replace(outcome=Outcome.NO_MEMORY, took_s=part_s)
            case "lease_lost" | "room_refused":
                return usual._replace(outcome=Outcome.NO_LEASE, took_s=part_s)
            case "store_down":
                return usual._replace(outcome=Outcome.STORE_DOWN, took_s=part_s)
            case "load_hangs" | "leaving_hangs":
                return usual._replace(outcome=Outcome.FAILED, took_s=hang_s)
            case "load_is_slow":
                return usual._replace(took_s=usual.took_s * 5)
            case "takes_more_than_claimed":
                return usual._replace(seen=_more(move.claim, 1.1))
            case _:
                self._crash_during(move, part_s)
                return usual

    def _crash_during(self, move: Move, after_s: float) -> None:
        if self._world is not None:
            self._world.after(after_s, lambda world: world.crash((move.slot,), cause="fell"))

    def on_abort(self, move: MoveId) -> bool:
        if self._is_over or self._random.random() >= self._odds.move:
            return True
        self._counts.count("cannot_be_stopped")
        return False

    # --- answers ------------------------------------------------------------------------------------------------------

    def on_grant(self, call: SimCall, usual_s: float) -> ServeFate | None:
        could_fall = REMOTE in call.candidates and call.model != REMOTE and not self._is_over
        if could_fall and self._busy.random() < self._odds.busy:
            self._counts.count("engine_is_busy")
            return ServeFate(Ending.BUSY, 0.0)
        if self._is_over or self._random.random() >= self._odds.answer:
            return None
        kind = self._random.choice(ANSWERS)
        self._counts.count(kind)
        part_s = usual_s * self._random.choice((0.0, self._random.random()))
        match kind:
            case "client_goes":
                return ServeFate(Ending.CLIENT_GOES, part_s)
            case "lost_early":
                return ServeFate(Ending.LOST_EARLY, part_s)
            case "answer_hangs":
                return ServeFate(Ending.ANSWERED, HANG_MAX_S * self._random.random())
            case "crash_leaves_copy" if self.copies_survive:
                return ServeFate(Ending.CRASH, part_s, Tier.ASLEEP)
            case _:
                return ServeFate(Ending.CRASH, part_s)

    # --- leases -------------------------------------------------------------------------------------------------------

    def on_recall(self, lease: LeaseId, within_s: float) -> float:
        """Some holders leave at once, some use all of their time, some overstay."""
        if self._is_over:
            return within_s / 2
        factor = self._random.choice((0.0, 0.5, 1.0, 2.0))
        if factor > 1.0:
            self._counts.count("lease_overstays")
        return within_s * factor


def _more(claim: Claim, factor: float) -> Claim:
    return {device: int(mib * factor) for device, mib in claim.items()}
