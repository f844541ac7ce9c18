"""The simulation finds bugs: a sample of those that `planted.py` knows, which `python -m` tries in full."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.__main__ import main
from tests.chaos.checks.base import Check, Checkers
from tests.chaos.checks.waiting import WaitingBound
from tests.chaos.play import Failure, Play, Played, play
from tests.chaos.scenario import Scenario, draw_scenario
from tests.chaos.seeds.planted import BUGS, bug, found

pytestmark = pytest.mark.slow

# One for each way of finding them: the world, a table, a count, an order, a share, a bound, a claim, a stay.
SAMPLE = (
    "one_too_many_at_once",
    "forgotten_timer",
    "stranded_counter",
    "order_swapped",
    "service_not_charged",
    "green_room_without_bound",
    "lease_without_all_its_gpus",
    "keep_alive_ignored",
)
SEEDS = range(6)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_bug_is_found(name: str) -> None:
    failure = found(name, SEEDS)
    assert failure is not None


@pytest.mark.parametrize(
    ("name", "check", "seed"),
    [("bound_broken", WaitingBound, 4), ("own_queue_before_all", WaitingBound, 4)],
)
def test_each_promise_about_waiting_is_judged_by_its_own_checker(
    name: str, check: Callable[[Scenario], Check], seed: int
) -> None:
    """Other checkers may be quicker to find these bugs, so each is left alone with its own."""

    def alone() -> Played:
        one = Play(draw_scenario(seed))
        one.checkers = Checkers([check(one.scenario)])
        return one.to_the_end()

    assert alone().judged.total() > 0
    with bug(name), pytest.raises(Failure) as caught:
        alone()
    assert caught.value.checker == "tests.chaos.checks.waiting"


def test_there_are_enough_planted_bugs_and_each_replaces_something() -> None:
    assert len(BUGS) >= 39
    for name, one in BUGS.items():
        original = one.owner.__dict__[one.attribute]
        with bug(name):
            assert one.owner.__dict__[one.attribute] is not original
        assert one.owner.__dict__[one.attribute] is original


def test_a_failure_says_the_seed_the_event_and_what_was_said_last() -> None:
    with bug("stranded_counter"), pytest.raises(Failure) as caught:
        for seed in SEEDS:
            play(seed)
    failure = caught.value
    assert str(failure).startswith(f"seed {failure.seed}, event {failure.event}: {failure.checker}: {failure.what}")
    assert len(failure.recent) == 30
    assert "RequestGone" in failure.recent[-1] or "RequestGone" in "".join(failure.recent)


def test_replaying_a_seed_from_the_command_line_tells_good_from_bad(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["0"]) == 0
    assert "0 violations" in capsys.readouterr().out
    with bug("one_too_many_at_once"):
        assert main(["0"]) == 1
    assert "seed 0, event" in capsys.readouterr().out
