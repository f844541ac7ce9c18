"""What is believed of a wall clock that is set while it runs, for a while or for good."""

from __future__ import annotations

import pytest

from greenroom.runtime.steady_clock import BELIEVED_AFTER_S, SteadyClock

DAY = 86_400.0
YEAR = 365 * DAY


class Clocks:
    """Both clocks of a machine. The wall clock is `ahead_s` ahead of what it should be."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self.ahead_s = 0.0
        self.steady = SteadyClock(self.wall, lambda: self.passed_s)

    def wall(self) -> float:
        return 20_000 * DAY + self.passed_s + self.ahead_s

    def run(self, seconds: float, look_every_s: float = 60.0) -> float | None:
        """Let time pass, and look from time to time. Returns by how much the believed time is wrong."""
        end = self.passed_s + seconds
        while self.passed_s < end:
            self.passed_s = min(end, self.passed_s + look_every_s)
            self.steady.now()
        now = self.steady.now()
        return None if now is None else now - (20_000 * DAY + self.passed_s)


def test_nothing_is_believed_at_first() -> None:
    clocks = Clocks()
    assert clocks.run(BELIEVED_AFTER_S - 1) is None
    assert clocks.run(1) == pytest.approx(0)


@pytest.mark.parametrize("jump_s", [3_600.0, -3_600.0, YEAR, -YEAR])
def test_a_jump_and_back_is_never_believed(jump_s: float) -> None:
    clocks = Clocks()
    clocks.run(2 * BELIEVED_AFTER_S)
    clocks.ahead_s = jump_s
    assert clocks.run(BELIEVED_AFTER_S / 2) == pytest.approx(0)
    clocks.ahead_s = 0.0
    assert clocks.run(3 * BELIEVED_AFTER_S) == pytest.approx(0)


@pytest.mark.parametrize("jump_s", [-YEAR, YEAR])
def test_a_clock_that_was_set_for_good_is_believed_later(jump_s: float) -> None:
    clocks = Clocks()
    clocks.run(2 * BELIEVED_AFTER_S)
    clocks.ahead_s = jump_s
    assert clocks.run(BELIEVED_AFTER_S - 1) == pytest.approx(0)
    assert clocks.run(61) == pytest.approx(jump_s)


def test_a_clock_that_is_corrected_bit_by_bit_is_believed() -> None:
    clocks = Clocks()
    clocks.run(BELIEVED_AFTER_S)
    for _ in range(100):
        clocks.ahead_s += 10.0
        assert clocks.run(60) == pytest.approx(clocks.ahead_s)
