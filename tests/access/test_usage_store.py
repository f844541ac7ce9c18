"""Usage on disk: kept over restarts and kill -9, by the hour and then by the day, whatever the disk does."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from greenroom.access.usage_store import FILE_NAME, HOURS_KEPT_S, By, UsageQuestion, UsageStore
from greenroom.errors import UsageUnavailable
from greenroom.runtime.clocks import BELIEVED_AFTER_S
from greenroom.telemetry.activity import DAY_S, FIGURES, HOUR_S, Record, UsageCounts
from tests.full_disk import full_disk
from tests.waiting import until

NOW = 20_000 * DAY_S + 5 * HOUR_S
PROMPT, REQUESTS = FIGURES.index("prompt_tokens"), FIGURES.index("requests")


class Run:
    """One run of a gateway, as far as usage goes, at a time that a test can change."""

    def __init__(self, folder: Path, *, now: float = NOW, days: int = 400, write_every_s: float = 3600.0) -> None:
        self.now = now
        # How far the wall clock is set ahead of its time.
        self.ahead_s = 0.0
        self.counts = UsageCounts(lambda tenant: False, self.wall)
        self.store = UsageStore(
            folder, self.counts, days, write_every_s=write_every_s, wall=self.wall, clock=lambda: self.now
        )

    def wall(self) -> float:
        return self.now + self.ahead_s

    def used(self, key: str = "k", tenant: str = "t", model: str = "m", prompt: int | None = 10) -> None:
        record = Record(id="r", model=model, asked_as=model, tenant=tenant, route="chat", arrived_at=self.now)
        record.status, record.prompt_tokens, record.completion_tokens = 200, prompt, prompt
        self.counts.ended(key, tenant, model, record, False)

    async def asked(self, *by: By, since: float = 0, until: float = 2**40, **own: str) -> dict[object, int | None]:
        """Prompt tokens by group."""
        rows = await self.store.ask(UsageQuestion(int(since), int(until), by or ("model",), **own))
        width = len(by) or 1
        found = {}
        for row in rows:
            name, tokens = row[:width], row[width + PROMPT]
            assert tokens is None or isinstance(tokens, int)
            found[name[0] if width == 1 else name] = tokens
        return found


async def opened(folder: Path, **settings: Any) -> Run:
    run = Run(folder, **settings)
    await run.store.open()
    return run


async def test_usage_is_there_at_once_and_after_a_restart(tmp_path: Path) -> None:
    run = await opened(tmp_path)
    run.used()
    run.used(model="n", prompt=None)
    assert await run.asked() == {"m": 10, "n": None}, "what is not written yet counts, too"
    await run.store.write()
    run.used()
    assert await run.asked() == {"m": 20, "n": None}
    await run.store.close()
    again = await opened(tmp_path)
    again.used()
    assert await again.asked() == {"m": 30, "n": None}
    assert await again.asked("model", "key", "tenant") == {("m", "k", "t"): 30, ("n", "k", "t"): None}
    await again.store.close()
    assert os.listdir(tmp_path) == [FILE_NAME]
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


async def test_it_is_written_from_time_to_time(tmp_path: Path) -> None:
    run, reader = Run(tmp_path, write_every_s=0.01), Run(tmp_path)
    await run.store.open()
    run.used()
    await until(lambda: not run.counts.waiting, "it was taken to be written")
    await until(lambda: _of(reader, {"m": 10}), "it is in the file")
    await run.store.close()


async def _of(reader: Run, expected: dict[object, int | None]) -> bool:
    return await reader.asked() == expected


async def test_a_key_is_answered_with_its_own_rows_only(tmp_path: Path) -> None:
    run = await opened(tmp_path)
    run.used("a", "x", prompt=1)
    run.used("a", "former", prompt=2)
    run.used("b", "y", prompt=4)
    await run.store.write()
    run.used("b", "y", prompt=8)
    assert await run.asked("key", key="a", tenant="x") == {"a": 1}
    assert await run.asked("tenant", key="b", tenant="y") == {"y": 12}
    assert await run.asked("key", key="c", tenant="y") == {}


async def test_hours_become_days_with_the_same_sums_and_days_are_dropped(tmp_path: Path) -> None:
    run, sums = Run(tmp_path, days=20), Counter[str]()
    chosen = random.Random(7)
    await run.store.open()
    first = NOW
    for _ in range(12 * 24):
        for _ in range(chosen.randrange(3)):
            model, prompt = chosen.choice("abc"), chosen.randrange(100)
            run.used(model=model, prompt=prompt)
            sums[model] += prompt
        if chosen.random() < 0.2:
            await run.store.write()
        run.now += HOUR_S
    assert await run.asked() == dict(sums)
    by_day = await run.asked("day")
    await run.store.write()
    assert (await run.asked(), await run.asked("day")) == (dict(sums), by_day)
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        oldest_hour = db.execute("SELECT MIN(start) FROM usage WHERE hours = 1").fetchone()[0]
        assert oldest_hour >= run.now - run.now % DAY_S - HOURS_KEPT_S
        assert db.execute("SELECT COUNT(*) FROM usage WHERE hours = 24").fetchone()[0] > 3
    # Exactly by the hour where hours are kept.
    since = run.now - run.now % HOUR_S - 3 * HOUR_S
    late = sum((await run.asked(since=since)).values() or [0])  # type: ignore[arg-type]
    assert late == sum((await run.asked()).values()) - sum((await run.asked(until=since)).values())  # type: ignore[arg-type]
    run.now = first + 25 * DAY_S
    await run.store.write()
    dropped = [day for day in by_day if int(str(day)) < run.now - run.now % DAY_S - 20 * DAY_S]
    assert dropped and set(await run.asked("day")) == set(by_day) - set(dropped)


@pytest.mark.parametrize("jump_s", [400 * DAY_S, -400 * DAY_S])
async def test_a_clock_that_jumps_and_comes_back_drops_and_merges_nothing(tmp_path: Path, jump_s: float) -> None:
    run = await opened(tmp_path, days=20)
    for _ in range(10):
        run.used()
        await run.store.write()
        run.now += DAY_S
    before = await run.asked("day")
    for ahead_s in (jump_s, 0.0, 0.0):
        run.ahead_s = ahead_s
        for _ in range(5):
            await run.store.write()
            run.now += 60
    assert await run.asked("day") == before and len(before) == 10
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        assert db.execute("SELECT COUNT(*) FROM usage WHERE hours = 1").fetchone()[0] == 8


@pytest.mark.parametrize("jump_s", [400 * DAY_S, -400 * DAY_S])
async def test_a_start_with_a_wrong_clock_that_is_soon_set_drops_nothing(tmp_path: Path, jump_s: float) -> None:
    run = await opened(tmp_path, days=20)
    run.used()
    await run.store.close()
    again = Run(tmp_path, days=20)
    again.ahead_s = jump_s
    await again.store.open()
    for ahead_s in (jump_s, 0.0, 0.0):
        again.ahead_s = ahead_s
        again.now += BELIEVED_AFTER_S - 1
        await again.store.write()
    assert await again.asked() == {"m": 10}
    again.now += 30 * DAY_S
    await again.store.write()
    assert await again.asked() == {}, "what is old goes"


async def test_a_full_disk_loses_nothing_and_harms_nothing(tmp_path: Path) -> None:
    run = await opened(tmp_path)
    run.used()
    await run.store.write()
    with full_disk(4096):
        for number in range(300):
            run.used(model=f"model-{number}")
        await run.store.write()
        assert len(run.counts.waiting) == 300
        assert len(await run.asked()) == 301, "it can still be asked"
        run.used()
        await run.store.write()
    await run.store.write()
    assert not run.counts.waiting
    again = await opened(tmp_path)
    asked = await again.asked()
    assert asked.pop("m") == 20 and set(asked.values()) == {10} and len(asked) == 300


async def test_a_disk_that_was_full_from_the_start_takes_it_later(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with full_disk():
        await run.store.open()
        run.used()
        await run.store.write()
    await run.store.close()
    assert await Run(tmp_path).asked() == {"m": 10}


@pytest.mark.parametrize("content", [b"not a database, but long enough to be taken for the beginning of one" * 9, None])
async def test_a_file_that_is_none_of_ours_is_set_aside(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / FILE_NAME
    if content is None:
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 99")
    else:
        path.write_bytes(content)
    kept = path.read_bytes()
    run = await opened(tmp_path)
    run.used()
    await run.store.close()
    assert path.with_suffix(".broken").read_bytes() == kept
    assert await Run(tmp_path).asked() == {"m": 10}


async def test_no_link_is_followed_and_the_gateway_counts_on(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.touch()
    (tmp_path / FILE_NAME).symlink_to(foreign)
    run = await opened(tmp_path)
    run.used()
    await run.store.close()
    assert foreign.read_bytes() == b"" and run.counts.waiting
    with pytest.raises(UsageUnavailable):
        await run.asked()


async def test_names_that_are_no_text_do_not_keep_others_from_being_written(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.used(model="bad\udcff")
    run.used()
    await run.store.write()
    assert await run.asked() == {"bad\\udcff": 10, "m": 10}


async def test_questions_while_it_is_written_miss_and_repeat_nothing(tmp_path: Path) -> None:
    run = await opened(tmp_path)
    for count in range(1, 40):
        run.used(prompt=1)
        answers = await asyncio.gather(run.store.write(), run.asked(), run.asked(), run.store.write(), run.asked())
        assert [answer for answer in answers if answer is not None] == [{"m": count}] * 3


WRITER = """
import sys
from pathlib import Path
from greenroom.access.usage_store import UsageFile
from greenroom.telemetry.activity import Counts
file, one = UsageFile(Path(sys.argv[1]), 400), Counts()
one.requests = one.prompt_tokens = 1
while True:
    file.add({(7200, "", "", "a"): one, (7200, "", "", "b"): one})
    print("written", flush=True)
"""


@pytest.mark.slow
async def test_kill_9_in_the_middle_of_a_write_leaves_whole_transactions(tmp_path: Path) -> None:
    path, written, chosen = tmp_path / FILE_NAME, 0, random.Random(3)
    for _ in range(8):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        written += writer.stdout.readline() == "written\n"
        time.sleep(chosen.random() / 10)
        writer.kill()
        written += writer.stdout.read().count("written\n")
        writer.wait()
        run = Run(tmp_path)
        await run.store.open()
        asked = await run.asked()
        assert asked["a"] == asked["b"] and asked["a"] is not None
        # One more may have been written than was told.
        assert written <= asked["a"] <= written + 1
        written = asked["a"]
