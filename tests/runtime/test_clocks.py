"""Clocks that jump are not believed at once, and a loop that stood still knows for how long."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from greenroom.runtime.clocks import BELIEVED_AFTER_S, TURN_MAX_S, Standstill, SteadyClock, running_timeout
from tests.harness import fake, gateway
from tests.integration.raw import chat

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


STILL_S = 2 * TURN_MAX_S


async def test_only_time_in_which_nothing_ran_counts() -> None:
    standstill = Standstill()
    standstill.watch()
    await asyncio.sleep(TURN_MAX_S / 10)
    before_s = standstill.total_s
    time.sleep(STILL_S)
    await asyncio.sleep(TURN_MAX_S)
    assert standstill.total_s - before_s >= STILL_S * 0.9
    standstill.close()
    assert standstill.total_s > 0, "what there was is still known"


async def test_an_answer_that_came_while_nothing_ran_is_in_time() -> None:
    here, there = socket.socketpair()
    with there:
        reader, writer = await asyncio.open_connection(sock=here)
        async with running_timeout(STILL_S / 2):
            asking = asyncio.ensure_future(reader.readline())
            await asyncio.sleep(0)
            there.sendall(b"here\n")
            time.sleep(STILL_S)
            assert await asking == b"here\n"
        writer.close()


async def test_an_answer_that_never_comes_is_given_up() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with running_timeout(0.05):
            await asyncio.Event().wait()
    assert time.monotonic() - began >= 0.05


@pytest.mark.slow
async def test_a_load_that_ended_while_the_gateway_stood_still_has_not_failed(tmp_path: Path) -> None:
    model = fake("a", "--load-s", "1.5", load_timeout_s=3)
    async with gateway(tmp_path, {"a": model}, gpus=[{"memory_mib": 10_000}]) as app:
        asks = asyncio.ensure_future(chat(app, "a"))
        await asyncio.sleep(0.5)
        time.sleep(4.0)
        answer = await asks
        assert answer.status == 200, answer.body
