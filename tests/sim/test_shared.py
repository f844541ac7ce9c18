"""Gateways that share GPUs, in virtual time: seeds without a violation, and planted faults that are found."""

from __future__ import annotations

import pytest

from greenroom.core.model import Claim, Move, SlotId
from greenroom.features.leases.shared_slots import SharedSlots
from greenroom.runtime.moves.admission import Grants
from tests.sim.shared.gateway import Gateway
from tests.sim.shared.gpus import Violation
from tests.sim.shared.many import Figures, outcome
from tests.sim.shared.play import Plant, play

pytestmark = pytest.mark.slow

SEEDS = 200
# Played in so many parts, which test processes share.
PARTS = 8
# A planted fault shows within so many seeds.
TRIES = 12
# Each once showed something that was wrong.
ONCE_FAILED = (0, 102, 2_110, 2_352)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_seeds_show_no_violation(part: int) -> None:
    figures = Figures()
    for seed in range(part, SEEDS, PARTS):
        figures.take(*outcome(seed))
    assert not figures.failures, figures.failures[0]
    assert sum(one.served for one in figures.played) > 10 * len(figures.played)
    assert sum(one.leases for one in figures.played) > 0
    assert {"crash", "kill", "outage", "forget", "impostor", "cut_off"} <= set().union(
        *(one.faults for one in figures.played)
    )


@pytest.mark.parametrize("seed", ONCE_FAILED)
def test_a_seed_that_once_failed_does_so_no_more(seed: int) -> None:
    play(seed)


def test_a_seed_is_the_same_at_every_play() -> None:
    assert play(3) == play(3)


class OfSlots(Grants):
    """As the slots of a gateway ask, but for what a test takes away."""

    def __init__(self, slots: SharedSlots) -> None:
        self.slots = slots

    async def enter(self, move: Move) -> None:
        await self.slots.enter(move)

    async def confirm(self, slot: SlotId) -> None:
        await self.slots.confirm(slot)

    async def make_way(self, move: Move) -> None:
        await self.slots.make_way(move)

    async def leave(self, slot: SlotId) -> None:
        await self.slots.leave(slot)

    def is_taken(self, slot: SlotId) -> bool:
        return self.slots.is_taken(slot)


class KeepsWhatIsOver(OfSlots):
    async def leave(self, slot: SlotId) -> None:
        return


def careless(gateway: Gateway) -> Grants:
    """Neither asks for a lease nor measures."""

    async def never(claim: Claim) -> bool:
        return False

    gateway.lacks = never  # type: ignore[method-assign]
    return Grants()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plant", "shows"),
    [(careless, "takes"), (lambda gateway: KeepsWhatIsOver(gateway.sharing.slots), "held|not served|left behind")],
    ids=["asks no store", "keeps what is over"],
)
def test_a_planted_fault_is_found(plant: Plant, shows: str) -> None:
    with pytest.raises(Violation, match=shows):
        for seed in range(TRIES):
            play(seed, plant)
