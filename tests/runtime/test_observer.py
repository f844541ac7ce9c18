"""Decisions are kept with their reasons, their number and their time; the oldest go first."""

from __future__ import annotations

from greenroom.core.effects import because
from greenroom.core.model import ModelId, Move, MoveId, MoveKind, Outcome, SlotId
from greenroom.runtime.observer import DECISIONS_MAX, Observer
from greenroom.telemetry.hub import Hub
from greenroom.telemetry.metrics import Metrics


def unload(number: int) -> Move:
    return Move(MoveId(f"m-{number}"), MoveKind.UNLOAD, SlotId("s-1"), ModelId("a"), 1, {}, 0.0)


def test_decision_is_kept_with_number_time_and_reason() -> None:
    observer = Observer(Hub(), Metrics(), wall=lambda: 1_700_000_000.12345)
    observer.moving(unload(1), because("evicted", model="a", for_model="b", for_request="r-7"))
    observer.cut("r-8", "a", because("budget"))
    assert list(observer.decisions) == [
        {
            "seq": 1,
            "at": 1_700_000_000.123,
            "what": "unload",
            "model": "a",
            "slot": "s-1",
            "move": "m-1",
            "why": "evicted",
            "for_model": "b",
            "for_request": "r-7",
        },
        {"seq": 2, "at": 1_700_000_000.123, "what": "cut", "request": "r-8", "model": "a", "why": "budget"},
    ]


def test_only_the_last_decisions_are_kept() -> None:
    observer = Observer(Hub(), Metrics())
    for number in range(DECISIONS_MAX + 5):
        observer.moving(unload(number), because("evicted"))
    assert [decision["seq"] for decision in observer.decisions] == list(range(6, DECISIONS_MAX + 6))


def test_abort_says_whose_move_it_ends() -> None:
    observer = Observer(Hub(), Metrics())
    observer.moving(unload(1), because("ttl"))
    observer.aborting(MoveId("m-1"), because("shutdown"))
    observer.moved(unload(1), Outcome.ABORTED, 0.5)
    observer.aborting(MoveId("m-1"), because("late"))
    assert [decision["model"] for decision in observer.decisions if decision["what"] == "abort"] == ["a", None]
