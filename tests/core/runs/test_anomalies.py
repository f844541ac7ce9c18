"""The anomaly loop: one thing goes wrong, at the first opportunity, the second, the third … until it no longer occurs.

Every run must end: each request served, rejected or gone, nothing left in the world or in the scheduler's tables.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from greenroom.core.effects import Reason, RejectCode
from greenroom.core.model import LeaseId, Move, Outcome, RequestId, SlotId, Tier
from tests.core.world import Fate, World

from .scenarios import finish, mixed_scenario

# The n-th occurrence; says whether the fault has fired.
Fault = Callable[[World, int], Callable[[], bool]]
RUNS_MAX = 200


def nth_move_ends(outcome: Outcome) -> Fault:
    def install(world: World, n: int) -> Callable[[], bool]:
        ended: list[Move] = []

        def outcome_of(move: Move) -> Outcome:
            ended.append(move)
            return outcome if len(ended) == n else Outcome.DONE

        world.outcome_of = outcome_of
        return lambda: len(ended) >= n

    return install


def nth_grantee(then: Callable[[World, str], None]) -> Fault:
    """Right after the n-th grant of a request, before anything else happens."""

    def install(world: World, n: int) -> Callable[[], bool]:
        granted: list[str] = []
        grant = world.grant

        def watch(request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
            grant(request, slot, reason)
            if not world.calls_by_id[request].is_lease:
                granted.append(request)
                if len(granted) == n:
                    world.later(0.0, lambda: then(world, request))

        world.grant = watch  # type: ignore[method-assign]
        return lambda: len(granted) >= n

    return install


def nth_slot_is_lost(left_in: Tier, after_s: float) -> Fault:
    """That long after its move has begun: while it moves, or when it is there."""

    def install(world: World, n: int) -> Callable[[], bool]:
        begun: list[SlotId] = []
        begin = world.move

        def watch(move: Move, reason: Reason) -> None:
            begin(move, reason)
            begun.append(move.slot)
            if len(begun) == n:
                world.later(
                    after_s, lambda: world.lose(move.slot, left_in=left_in) if move.slot in world.places else None
                )

        world.move = watch  # type: ignore[method-assign]
        return lambda: len(begun) >= n

    return install


def is_gone(world: World, name: str) -> None:
    if world.fate(name) is Fate.GRANTED:
        world.go(name)


def is_lost(world: World, name: str) -> None:
    if world.fate(name) is Fate.GRANTED:
        world.finish(name, lost=True)


FAULTS: dict[str, Fault] = {
    **{f"move {outcome.value}": nth_move_ends(outcome) for outcome in Outcome if outcome is not Outcome.DONE},
    "grantee gone": nth_grantee(is_gone),
    "grantee lost": nth_grantee(is_lost),
    "slot lost while moving": nth_slot_is_lost(Tier.COLD, 0.3),
    "slot lost when there": nth_slot_is_lost(Tier.COLD, 9.0),
    "slot lost left asleep": nth_slot_is_lost(Tier.ASLEEP, 9.0),
}


@pytest.mark.untraced
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_whatever_goes_wrong_whenever_it_does_everything_ends(fault: Fault, every: int) -> None:
    """At the first occasion and then at every so many; all of them where there is time."""
    for n in count(1, every):
        assert n <= RUNS_MAX, "the scenario does not end by itself"
        fired: list[Callable[[], bool]] = []
        world = mixed_scenario(lambda world, n=n, fired=fired: fired.append(fault(world, n)))  # type: ignore[misc]
        finish(world)
        assert world.is_at_rest(), (
            f"n={n}: {[call for call in world.calls_by_id.values() if call.fate is Fate.WAITING]}"
        )
        state = world.scheduler.state
        assert not (state.slots or state.moves or state.grants or state.leaving_ops), f"n={n}"
        assert not (state.kept or state.timers or state.ledger.holdings or state.slots_by_model), f"n={n}"
        served = sum(1 for call in world.calls_by_id.values() if call.fate is Fate.SERVED)
        assert served >= 15, f"n={n}: one fault costs at most a queue, but only {served} were served"
        if not fired[0]():
            assert n > 10, "the scenario should give the fault a chance"
            codes = {call.rejection.code for call in world.calls_by_id.values() if call.rejection}
            assert codes <= {RejectCode.UNLOADED}, "without anomalies only the operator's unloads reject requests"
            return
