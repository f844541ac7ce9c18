"""The store of pictures: kept for a while, bounded, all of an answer or nothing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from greenroom.errors import PictureStoreFull, ResultTooLarge
from greenroom.features.pictures.store import Picture, PictureStore
from greenroom.runtime.operations.files import OperationFiles
from greenroom.runtime.operations.table import KeepLimits
from tests.full_disk import full_disk
from tests.waiting import until


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "pictures"
        self.limits = KeepLimits(keep_s=100, count_max=5, bytes_max=1000)
        self.now = 0.0
        self.store = PictureStore(OperationFiles(self.folder), lambda: self.limits, lambda: self.now)

    async def keep(self, tenant: str, *sizes: int) -> list[str]:
        return await self.store.keep(tenant, [Picture("image/png", bytes([size % 256]) * size) for size in sizes])

    def content(self, id: str) -> bytes | None:
        pieces = self.store.read(id)
        return None if pieces is None else b"".join(pieces)

    @property
    def files(self) -> int:
        return len(os.listdir(self.folder))


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    await rig.store.open()
    yield rig
    await rig.store.close()
    assert rig.files == 0


async def test_picture_is_found_and_read_until_its_time_is_over(rig: Rig) -> None:
    [id] = await rig.keep("ann", 7)
    kept = rig.store.find(id)
    assert kept is not None
    assert (kept.media_type, kept.size, rig.content(id)) == ("image/png", 7, b"\x07" * 7)
    rig.now = 99.9
    assert rig.store.find(id) is not None
    rig.now = 100
    assert rig.store.find(id) is None
    # The next one makes the disk free.
    await rig.keep("ann", 8)
    assert (len(rig.store), rig.store.used_bytes, rig.files) == (1, 8, 1)


async def test_names_cannot_be_guessed(rig: Rig) -> None:
    ids = await rig.keep("ann", 1, 1, 1)
    assert len({*ids}) == 3
    assert all(len(id.removeprefix("img-")) == 32 for id in ids)
    assert [rig.store.find(name) for name in ("", "img-", "../x", ids[0] + "x")] == [None] * 4


async def test_oldest_of_the_tenant_that_keeps_most_makes_room(rig: Rig) -> None:
    [quiet] = await rig.keep("bob", 100)
    first, second = await rig.keep("ann", 400, 400)
    [third] = await rig.keep("ann", 300)
    assert [rig.store.find(id) is not None for id in (quiet, first, second, third)] == [True, False, True, True]
    # And by count.
    await rig.keep("ann", 1, 1, 1)
    assert rig.store.find(quiet) is not None
    assert (len(rig.store), rig.files) == (5, 5)


async def test_thousands_make_room_for_one_without_holding_others_up(rig: Rig) -> None:
    rig.limits = KeepLimits(keep_s=100, count_max=3_000, bytes_max=300_000)
    for tenant in range(30):
        await rig.keep(f"t{tenant}", *[100] * 100)
    began = time.thread_time()
    task = asyncio.create_task(rig.keep("t0", 300_000))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(rig.store) == 0, "all have made room"
    # A look at each for each of them would take seconds.
    assert time.thread_time() - began < 0.2
    await task
    assert (len(rig.store), rig.files) == (1, 1)


async def test_what_the_store_can_never_hold_is_refused_and_pushes_nothing_out(rig: Rig) -> None:
    [kept] = await rig.keep("ann", 10)
    with pytest.raises(ResultTooLarge, match="1,001 bytes"):
        await rig.keep("bob", 500, 501)
    with pytest.raises(ResultTooLarge, match="6 pictures"):
        await rig.keep("bob", *[1] * 6)
    assert rig.store.find(kept) is not None
    assert (rig.store.used_bytes, rig.files) == (10, 1)


async def test_full_disk_is_told_and_leaves_nothing(rig: Rig) -> None:
    with full_disk(120), pytest.raises(PictureStoreFull) as told:
        await rig.keep("ann", 10, 300)
    assert (told.value.status, told.value.code) == (507, "picture_store_full")
    assert (len(rig.store), rig.store.used_bytes, rig.files) == (0, 0, 0)
    assert len(await rig.keep("ann", 10, 300)) == 2


async def test_what_was_being_written_when_the_caller_left_is_known(rig: Rig) -> None:
    task = asyncio.create_task(rig.keep("ann", 10))
    await asyncio.sleep(0)
    task.cancel()
    await until(lambda: len(rig.store) == rig.files == 1)


async def test_files_go_by_themselves(tmp_path: Path) -> None:
    store = PictureStore(
        OperationFiles(tmp_path / "pictures"), lambda: KeepLimits(0.05, 5, 100), asyncio.get_running_loop().time
    )
    await store.open()
    await store.keep("ann", [Picture("image/png", b"x")])
    await until(lambda: not os.listdir(tmp_path / "pictures"))
    await store.keep("ann", [Picture("image/png", b"x")])
    await until(lambda: not os.listdir(tmp_path / "pictures"))


async def test_nothing_survives_a_restart(rig: Rig, tmp_path: Path) -> None:
    [id] = await rig.keep("ann", 10)
    again = Rig(tmp_path)
    await again.store.open()
    assert (again.store.find(id), again.files) == (None, 0)
