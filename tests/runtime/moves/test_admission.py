"""A load waits for what a crash left on its own GPUs, and for nothing else that is known to be elsewhere."""

from __future__ import annotations

import asyncio

import pytest

from greenroom.core.model import DeviceId
from greenroom.runtime.memory.devices import HOST
from greenroom.runtime.moves.admission import Cleanup

A, B = DeviceId("GPU-a"), DeviceId("GPU-b")


@pytest.mark.parametrize(
    ("left_on", "wanted", "waits"),
    [
        ((A,), (A,), True),
        ((A, B), (B,), True),
        ((A,), (B,), False),
        ((A, HOST), (B, HOST), False),
        ((A,), (HOST,), True),
        ((HOST,), (A,), True),
        ((), (A,), True),
        ((A,), (), True),
    ],
)
async def test_a_load_waits_for_remains_on_its_gpus(
    left_on: tuple[DeviceId, ...], wanted: tuple[DeviceId, ...], waits: bool
) -> None:
    cleanup, is_over = Cleanup(), asyncio.Event()

    async def clear_up() -> None:
        await is_over.wait()

    cleanup.start(clear_up(), left_on, "remains")
    waiting = asyncio.ensure_future(cleanup.finished(wanted))
    for _ in range(5):
        await asyncio.sleep(0)
    assert waiting.done() is not waits
    is_over.set()
    await asyncio.wait_for(waiting, 30)
    await asyncio.wait_for(cleanup.finished(), 30)
