"""Leases are written down in order, beside the loop; a disk that fails is told to the waiting caller."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from greenroom.runtime.leases.journal import FILE_NAME, JournalWriter, Kept


def kept(name: str, token: int = 1) -> Kept:
    return Kept(name, "train", token, {"gpu0": 1}, 1, False, 30.0, 30.0)


async def test_what_was_granted_is_on_the_disk_and_what_ended_is_soon(tmp_path: Path) -> None:
    log = JournalWriter(tmp_path)
    assert log.open() == []
    await asyncio.gather(*(log.granted(kept(f"l{number}", number)) for number in range(20)))
    assert len((tmp_path / FILE_NAME).read_text().splitlines()) == 21
    for number in range(19):
        log.ended(f"l{number}")
    await log.close()
    again = JournalWriter(tmp_path)
    assert [lease.id for lease in again.open()] == ["l19"]
    await again.close()


async def test_an_end_that_could_not_be_written_is_written_with_the_next_grant(tmp_path: Path) -> None:
    log = JournalWriter(tmp_path)
    log.open()
    await log.granted(kept("a"))
    await log.close()
    (tmp_path / FILE_NAME).rename(tmp_path / "away")
    (tmp_path / FILE_NAME).mkdir()
    log.ended("a")
    with pytest.raises(IsADirectoryError):
        await log.granted(kept("b"))
    (tmp_path / FILE_NAME).rmdir()
    (tmp_path / "away").rename(tmp_path / FILE_NAME)
    await log.granted(kept("c"))
    await log.close()
    assert [lease.id for lease in JournalWriter(tmp_path).open()] == ["c"]


async def test_tokens_grow_whatever_the_clock_does(tmp_path: Path) -> None:
    log = JournalWriter(tmp_path)
    log.open()
    tokens = [log.next_token(wall_s) for wall_s in (1_000.0, 1_000.0, 5.0, 1_000.000_01, -7.0)]
    assert tokens == sorted(set(tokens)) and tokens[0] == 1_000_000_000
    await log.granted(kept("a", tokens[-1]))
    await log.close()
    later = JournalWriter(tmp_path)
    later.open()
    assert later.next_token(0.0) > tokens[-1]
    await later.close()


async def test_a_file_that_cannot_be_read_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    log = JournalWriter(tmp_path)
    assert log.open() == []
    with pytest.raises(IsADirectoryError):
        await log.granted(kept("a"))
    await log.close()


async def test_leases_that_were_never_written_down_leave_nothing_behind_while_the_disk_is_full(tmp_path: Path) -> None:
    log = JournalWriter(tmp_path)
    log.open()
    await log.granted(kept("held"))
    await log.close()
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    for number in range(20):
        with pytest.raises(IsADirectoryError):
            await log.granted(kept(f"l{number}"))
        log.ended(f"l{number}")
        log.ended("held")
    await log.close()
    # There is room again: only what had been written down is taken back.
    (tmp_path / FILE_NAME).rmdir()
    await log.granted(kept("new"))
    await log.close()
    written = (tmp_path / FILE_NAME).read_text()
    assert [written.count(f'"{id}"') for id in ("held", "new", "l0", "l19")] == [1, 1, 0, 0]
