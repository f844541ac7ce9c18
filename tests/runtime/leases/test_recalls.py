"""Holders in a shared store that were asked to leave: reported once when they are asked, and once when overdue."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from greenroom.leases.records import Lease
from greenroom.runtime.leases.holders import Recalls
from greenroom.runtime.observer import Hub
from greenroom.runtime.scheduler_loop import SchedulerLoop


@dataclass
class Rig:
    now: float = 100.0
    told: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recalls = Recalls(
            cast(SchedulerLoop, SimpleNamespace(clock=lambda: self.now)),
            cast(Hub, SimpleNamespace(publish=lambda what, facts: self.told.append((what, facts["lease"])))),
        )

    def seen(self, *leases: Lease) -> list[tuple[str, Any]]:
        """What is told when these are all there are."""
        self.told = []
        self.recalls.note(leases)
        self.recalls.look()
        return self.told


def lease(recall_in_s: float | None, token: int = 1, state: str = "held") -> Lease:
    return Lease("job", "train", token, {"gpu0": 1}, 2, True, state, 30.0, 30.0, recall_in_s, None, "program")


def test_a_recall_is_told_once_and_once_more_when_it_is_overdue() -> None:
    rig = Rig()
    assert rig.seen(lease(None)) == []
    assert rig.seen(lease(5.0)) == [("recall", "job")]
    rig.now += 4.0
    assert rig.seen(lease(1.0)) == []
    rig.now += 1.5
    assert rig.seen(lease(-0.5)) == [("lease_overdue", "job")]
    assert rig.seen(lease(-1.0)) == []


def test_overdue_is_told_also_where_nothing_else_has_changed() -> None:
    rig = Rig()
    rig.seen(lease(5.0))
    rig.now += 6.0
    rig.told = []
    rig.recalls.look()
    assert rig.told == [("lease_overdue", "job")]


def test_one_that_has_left_is_forgotten_and_may_be_recalled_again() -> None:
    rig = Rig()
    rig.seen(lease(5.0))
    rig.now += 6.0
    assert rig.seen() == []
    assert rig.seen(lease(5.0, token=2)) == [("recall", "job")]
    assert rig.seen(lease(5.0, token=3)) == [("recall", "job")]
    assert rig.seen(lease(5.0, token=4, state="waiting")) == []
