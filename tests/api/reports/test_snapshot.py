from __future__ import annotations

from typing import Any

import pytest

from greenroom.api.reports.snapshot import is_failing, status_word, tier_of
from greenroom.api.views import StatusWord
from greenroom.core.model import ModelId, Move, MoveId, MoveKind, Outcome, Slot, SlotId, Tier
from tests.api.management_rig import GPU, NOW, FakeGateway, model

A = ModelId("a")


def _move(kind: MoveKind) -> Move:
    return Move(MoveId("m1"), kind, SlotId("s-a"), A, 1, {GPU: 100}, NOW - 2)


@pytest.mark.parametrize(
    ("tier", "facts", "word"),
    [
        (Tier.READY, {}, StatusWord.LOADED),
        (Tier.READY, {"leaving_to": Tier.COLD}, StatusWord.LOADED),
        (Tier.READY, {"move": _move(MoveKind.UNLOAD)}, StatusWord.LOADED),
        (Tier.READY, {"move": _move(MoveKind.SLEEP)}, StatusWord.LOADED),
        (Tier.READY, {"lost": True}, StatusWord.UNLOADED),
        (Tier.COLD, {"move": _move(MoveKind.LOAD)}, StatusWord.LOADING),
        (Tier.COLD, {"planned": MoveKind.LOAD}, StatusWord.LOADING),
        (Tier.COLD, {"move": _move(MoveKind.PREPARE)}, StatusWord.LOADING),
        (Tier.COLD, {"planned": MoveKind.PREPARE}, StatusWord.LOADING),
        (Tier.COLD, {"move": _move(MoveKind.LOAD), "leaving_to": Tier.COLD}, StatusWord.UNLOADED),
        (Tier.COLD, {"move": _move(MoveKind.PREPARE), "leaving_to": Tier.COLD}, StatusWord.UNLOADED),
        (Tier.ASLEEP, {}, StatusWord.SLEEPING),
        (Tier.ASLEEP, {"move": _move(MoveKind.WAKE)}, StatusWord.LOADING),
        (Tier.ASLEEP, {"move": _move(MoveKind.UNLOAD)}, StatusWord.SLEEPING),
    ],
)
def test_a_slot_gives_its_model_the_word(tier: Tier, facts: dict[str, Any], word: StatusWord) -> None:
    gateway = FakeGateway({"a": model()})
    gateway.add_slot("a", tier, **facts)
    assert status_word(gateway.state, A, NOW) is word


def test_a_model_without_slots_is_unloaded() -> None:
    gateway = FakeGateway({"a": model()})
    assert status_word(gateway.state, A, NOW) is StatusWord.UNLOADED
    assert status_word(gateway.state, ModelId("stranger"), NOW) is StatusWord.UNLOADED


def test_a_model_is_failed_until_its_back_off_ends() -> None:
    gateway = FakeGateway({"a": model()})
    record = gateway.state.models[A]
    record.failures, record.retry_at = 1, NOW + 5
    assert status_word(gateway.state, A, NOW) is StatusWord.FAILED
    assert status_word(gateway.state, A, NOW + 5) is StatusWord.UNLOADED


def test_a_pause_for_want_of_a_lease_is_no_failure() -> None:
    gateway = FakeGateway({"a": model()})
    record = gateway.state.models[A]
    record.failures, record.retry_at, record.pausing = 1, NOW + 5, Outcome.NO_LEASE
    assert not is_failing(record, NOW)


def test_a_new_revision_that_loads_counts_before_an_old_one_that_leaves() -> None:
    gateway = FakeGateway({"a": model()})
    gateway.add_slot("a", Tier.READY, slot_id="old", leaving_to=Tier.COLD)
    gateway.add_slot("a", Tier.COLD, slot_id="new", move=_move(MoveKind.LOAD))
    assert status_word(gateway.state, A, NOW) is StatusWord.LOADING


@pytest.mark.parametrize(
    ("tiers", "nearest"),
    [
        ([], Tier.COLD),
        ([Tier.COLD], Tier.COLD),
        ([Tier.COLD, Tier.ASLEEP], Tier.ASLEEP),
        ([Tier.ASLEEP, Tier.READY], Tier.READY),
    ],
)
def test_a_model_is_where_its_nearest_slot_is(tiers: list[Tier], nearest: Tier) -> None:
    spec = FakeGateway({"a": model()}).state.models[A].spec
    slots = [Slot(SlotId(f"s{number}"), spec, {}, tier=tier) for number, tier in enumerate(tiers)]
    assert tier_of(slots) is nearest


def test_a_lost_slot_is_nowhere() -> None:
    spec = FakeGateway({"a": model()}).state.models[A].spec
    assert tier_of([Slot(SlotId("s1"), spec, {}, tier=Tier.READY, lost=True)]) is Tier.COLD
