"""slots.py"""

from __future__ import annotations

import asyncio

from greenroom.core.model import ModelId
from greenroom.runtime.slots import LiveSlots
from tests.waiting import PATIENCE_S

GONE, KEPT = ModelId("gone"), ModelId("kept")


async def test_log_of_a_model_that_is_no_longer_configured_ends_for_its_followers() -> None:
    slots = LiveSlots()
    slots.log(GONE).write(b"before\n")
    following, kept = slots.log(GONE).subscribe(), slots.log(KEPT).subscribe()
    slots.log(GONE).write(b"last\n")
    slots.forget_logs(frozenset({KEPT}))
    assert [line async for line in following] == ["last"]
    slots.log(KEPT).write(b"goes on\n")
    async with asyncio.timeout(PATIENCE_S):
        assert await anext(kept) == "goes on"
    # Should it come back, it begins anew.
    assert slots.log(GONE).tail(10) == []
