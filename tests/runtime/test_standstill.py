"""Deadlines for answers of other processes do not count time in which this process stood still."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from greenroom.runtime.standstill import TURN_MAX_S, Standstill, running_timeout
from tests.harness import fake, gateway
from tests.integration.raw import chat

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
