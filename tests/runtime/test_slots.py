"""slots.py"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from greenroom.config.schema import Config
from greenroom.core.model import ModelId, SlotId
from greenroom.http.upstream import EngineAddress, Pool
from greenroom.process.spawn import Child
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.slots import LiveSlot, LiveSlots
from tests.http.test_upstream import Notes
from tests.waiting import PATIENCE_S, until

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


class Worker:
    """A process that is told to stop."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    async def wait(self) -> None:
        await self.stopped.wait()

    async def stop(self) -> None:
        self.stopped.set()


@pytest.mark.slow
async def test_a_process_of_several_slots_of_which_one_refuses_is_not_ended_while_another_answers(
    tmp_path: Path,
) -> None:
    slots, worker, answers = LiveSlots(), Worker(), asyncio.Event()
    child = cast(Child, worker)
    catalog = Catalog()
    catalog.fill(Config.model_validate({"models": {"m": {"cmd": ["true", "${PORT}"], "memory_mib": 1}}}))

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answers.wait()
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "there.sock")
    for name in ("there", "gone"):
        pool = Pool(EngineAddress(path=str(tmp_path / f"{name}.sock")))
        slots.live[SlotId(name)] = LiveSlot(
            SlotId(name),
            next(iter(catalog)),
            child,
            pool,
            None,
            0.0,
            stop=worker.stop,
            slots=slots,
        )
    there, gone = slots.live[SlotId("there")], slots.live[SlotId("gone")]
    await there.pool.send(b"POST / HTTP/1.1\r\nHost: e\r\n\r\n", b"", Notes())
    assert slots.answers(child) and not slots.answers(cast(Child, Worker()))
    check = gone.check()
    assert check is not None
    await asyncio.wait({check}, timeout=8.0)
    assert not worker.stopped.is_set() and not check.done()
    answers.set()
    await until(lambda: not slots.answers(child))
    await check
    assert worker.stopped.is_set()
    server.close()
