"""What was granted is known after a crash: the journal, what writes it beside the loop, and how long a lease lasts."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenroom.features.leases.entry import GRACE_MIN_S, ask_again, lasts_s, must_journal_renewal, restart_grace_s
from greenroom.features.leases.journal import FILE_NAME, Change, Ended, Heard, Journal, JournalWriter, Kept
from greenroom.leases.records import Holder, LeaseAsk

HOLDER = Holder("box", 42, 1_234, 4_026_531_836)


def kept(
    name: str, token: int = 1, claim: dict[str, int] | None = None, heard_at: float = 50.0, **said: object
) -> Kept:
    ask = LeaseAsk(id=name, name="train", mib=100, **said)  # type: ignore[arg-type]
    return Kept(ask, token, claim or {"gpu0": 100}, heard_at)


def opened(path: Path, **options: int) -> Journal:
    journal = Journal(path, **options)
    journal.open()
    return journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "leases.jsonl"


def test_a_new_journal_is_empty(path: Path) -> None:
    journal = opened(path)
    assert (journal.live, journal.last_token, journal.spoiled) == ({}, 0, 0)
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_was_granted_and_did_not_end_is_known_again(path: Path) -> None:
    journal = opened(path)
    wide = kept("b", 8, claim={"GPU-a": 5, "GPU-b": 5}, holder=HOLDER, preemptible=True)
    journal.append([kept("a", 7), wide])
    journal.append([Ended("a"), Ended("nobody")])
    journal.close()
    again = opened(path)
    assert again.live == {"b": wide} and again.spoiled == 0


async def test_a_lease_is_asked_for_again_by_what_it_holds() -> None:
    ask = LeaseAsk(id="a", name="train", mib=-8_000)
    damaged = Kept(ask, 1, {"GPU-b": 18_000, "GPU-a": 18_000}, 50.0)
    ask = ask_again(damaged, asyncio.get_running_loop().create_future(), 1.0).ask
    assert (ask.mib, ask.gpus, ask.devices) == (18_000, 2, ("GPU-a", "GPU-b"))


def test_when_a_holder_was_heard_of_is_known_again_also_when_the_file_was_written_anew(path: Path) -> None:
    journal = opened(path)
    journal.append([kept("a", 7, heard_at=100.0), kept("b", 8), Heard("a", 250.5), Heard("nobody", 1.0)])
    for _ in range(2):
        journal.close()
        journal = opened(path)
        assert {id: one.heard_at for id, one in journal.live.items()} == {"a": 250.5, "b": 50.0}
        assert journal.spoiled == 0


def test_the_last_token_is_kept_when_all_have_ended_and_the_file_was_written_anew(path: Path) -> None:
    journal = opened(path)
    journal.append([kept("a", 7), Ended("a")])
    for _ in range(3):
        journal.close()
        journal = opened(path)
    assert (journal.live, journal.last_token) == ({}, 7)
    assert len(path.read_bytes().splitlines()) == 1


def test_a_crash_at_any_byte_loses_at_most_what_was_being_written(path: Path) -> None:
    journal = opened(path)
    journal.append([kept("first", 1)])
    before = path.stat().st_size
    journal.append([kept("second", 2, holder=HOLDER)])
    journal.close()
    whole = path.read_bytes()
    for end in range(before, len(whole) + 1):
        path.write_bytes(whole[:end])
        torn = opened(path)
        assert list(torn.live) == (["first", "second"] if end == len(whole) else ["first"]), end
        torn.append([kept("third", 3)])
        torn.close()
        assert "third" in opened(path).live and opened(path).spoiled == 0


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"[]",
        b"7",
        b"{}",
        b'{"type":"granted"}',
        b'{"type":"granted","ask":{"id":"x"}}',
        b"\x00\x00\x00",
        b'{"type":"granted","ask":null}',
        b'{"type":"another"}',
    ],
)
def test_a_line_that_makes_no_sense_is_counted_and_the_others_are_kept(path: Path, line: bytes) -> None:
    journal = opened(path)
    journal.append([kept("a")])
    journal.close()
    path.write_bytes(path.read_bytes() + line + b"\n")
    journal = opened(path)
    assert list(journal.live) == ["a"] and journal.spoiled == 1


def test_it_is_written_anew_when_it_has_grown_and_stays_small(path: Path) -> None:
    journal = opened(path, bytes_max=2_000)
    journal.append([kept("stays", 1)])
    for number in range(500):
        journal.append([kept("comes", number), Ended("comes")])
    assert path.stat().st_size < 3_000
    journal.close()
    again = opened(path)
    assert list(again.live) == ["stays"] and again.last_token == 499


def full(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """A disk that takes so many bytes more."""
    left = [after]
    write = os.write

    def limited(fd: int, content: bytes) -> int:
        taken = min(left[0], len(content))
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= taken
        return write(fd, content[:taken])

    monkeypatch.setattr("greenroom.features.leases.journal.os.write", limited)


@pytest.mark.parametrize("after", [0, 1, 50, 150])
def test_a_full_disk_is_told_and_leaves_the_journal_as_it_was(
    path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(path)
    journal.append([kept("held")])
    before = path.read_bytes()
    with monkeypatch.context() as limited:
        full(limited, after)
        with pytest.raises(OSError, match="No space left"):
            journal.append([kept("refused"), kept("refused too")])
    assert path.read_bytes() == before and list(journal.live) == ["held"]
    journal.append([kept("later")])
    journal.close()
    assert list(opened(path).live) == ["held", "later"]


def test_a_disk_that_is_full_at_start_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(path)
    journal.append([kept("held")])
    journal.close()
    with monkeypatch.context() as limited:
        full(limited, 0)
        assert list(opened(path).live) == ["held"]
    assert list(opened(path).live) == ["held"]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_it_goes_on_growing_where_it_cannot_be_written_anew(path: Path) -> None:
    journal = opened(path, bytes_max=500)
    # Nothing can be created under this name.
    path.with_suffix(".new").mkdir()
    for number in range(50):
        journal.append([kept("comes", number), Ended("comes")])
    journal.append([kept("last", 99)])
    journal.close()
    assert path.stat().st_size > 2_000
    assert list(opened(path).live) == ["last"]


def test_a_link_in_its_place_is_not_followed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        opened(path)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("seed", range(5))
def test_any_run_of_grants_and_ends_reads_back_as_it_was(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    journal, expected = opened(path, bytes_max=1_500), dict[str, Kept]()
    for token in range(1, 200):
        changes: list[Change] = []
        for _ in range(chance.randint(1, 3)):
            name = f"l{chance.randrange(10)}"
            if chance.random() < 0.5:
                changes.append(kept(name, token, holder=chance.choice([None, HOLDER])))
                expected[name] = changes[-1]  # type: ignore[assignment]
            else:
                changes.append(Ended(name))
                expected.pop(name, None)
        journal.append(changes)
        if chance.random() < 0.1:
            journal.close()
            journal = opened(path, bytes_max=1_500)
            assert journal.live == expected


WRONG: tuple[dict[str, object], ...] = (
    {"claim": {"gpu0": math.inf}},
    {"claim": {"gpu0": -5}},
    {"claim": {}},
    {"heard_at": "noon"},
    {"heard_at": math.nan},
    {"heard_at": -1},
    {"token": 1e300},
    {"token": 2**70},
)
WRONG_ASKS: tuple[dict[str, object], ...] = (
    {"ttl_s": "x"},
    {"ttl_s": 0},
    {"grace_s": math.nan},
    {"grace_s": -1},
    {"priority": None},
    {"id": 5},
    {"preemptible": "no"},
    {"holder": {"host": 1, "pid": "x", "start_ticks": 1, "pid_ns": 2}},
)
WHOLE: dict[str, Any] = msgspec.to_builtins(kept("a"))
SPOILED = [
    '{"type":"last_token","token":1e999}',
    '{"type":"last_token","token":true}',
    '{"type":"heard","id":"a"}',
    '{"type":"heard","id":"a","at":-1}',
    '{"type":"ended"}',
    "[" * 100_000,
    '{"type":"ended","id":"a","more":' + "[" * 100_000,
    *(json.dumps({**WHOLE, **wrong}) for wrong in WRONG),
    *(json.dumps({**WHOLE, "ask": {**WHOLE["ask"], **wrong}}) for wrong in WRONG_ASKS),
]


def test_what_the_lines_below_spoil_is_whole_before(path: Path) -> None:
    path.write_text(json.dumps(WHOLE) + "\n")
    assert opened(path).live == {"a": kept("a")}


@pytest.mark.parametrize("line", SPOILED, ids=range(len(SPOILED)))
def test_a_line_that_cannot_be_ours_is_counted_and_left_out(path: Path, line: str) -> None:
    path.write_text(line + "\n")
    journal = opened(path)
    assert (journal.live, journal.last_token, journal.spoiled) == ({}, 0, 1)


def small(name: str, token: int = 1) -> Kept:
    return kept(name, token, {"gpu0": 1})


async def test_what_was_granted_is_on_the_disk_and_what_ended_is_soon(tmp_path: Path) -> None:
    log = JournalWriter(tmp_path)
    assert log.open() == []
    await asyncio.gather(*(log.granted(small(f"l{number}", number)) for number in range(20)))
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
    await log.granted(small("a"))
    await log.close()
    (tmp_path / FILE_NAME).rename(tmp_path / "away")
    (tmp_path / FILE_NAME).mkdir()
    log.ended("a")
    with pytest.raises(IsADirectoryError):
        await log.granted(small("b"))
    (tmp_path / FILE_NAME).rmdir()
    (tmp_path / "away").rename(tmp_path / FILE_NAME)
    await log.granted(small("c"))
    await log.close()
    assert [lease.id for lease in JournalWriter(tmp_path).open()] == ["c"]


async def test_tokens_grow_whatever_the_clock_does(tmp_path: Path) -> None:
    log = JournalWriter(tmp_path)
    log.open()
    tokens = [log.next_token(wall_s) for wall_s in (1_000.0, 1_000.0, 5.0, 1_000.000_01, -7.0)]
    assert tokens == sorted(set(tokens)) and tokens[0] == 1_000_000_000
    await log.granted(small("a", tokens[-1]))
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
        await log.granted(small("a"))
    await log.close()


async def test_leases_that_were_never_written_down_leave_nothing_behind_while_the_disk_is_full(tmp_path: Path) -> None:
    log = JournalWriter(tmp_path)
    log.open()
    await log.granted(small("held"))
    await log.close()
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    for number in range(20):
        with pytest.raises(IsADirectoryError):
            await log.granted(small(f"l{number}"))
        log.ended(f"l{number}")
        log.ended("held")
    await log.close()
    # There is room again: only what had been written down is taken back.
    (tmp_path / FILE_NAME).rmdir()
    await log.granted(small("new"))
    await log.close()
    written = (tmp_path / FILE_NAME).read_text()
    assert [written.count(f'"{id}"') for id in ("held", "new", "l0", "l19")] == [1, 1, 0, 0]


HEARD_AT = 5_000.0


def aged(ttl_s: float) -> Kept:
    return kept("a", heard_at=HEARD_AT, ttl_s=ttl_s)


@pytest.mark.parametrize(
    ("away_s", "lasts"),
    [
        (0, 600),  # Nothing was lost of its time.
        (100, 600),  # What is left and the grace are more than a whole TTL.
        (400, 500),
        (700, 300),  # Its time was over while no renewal could be received: only the grace is left.
        (10_000_000, 300),
        (-3_000, 600),  # A clock that was set back gives no more than a TTL.
    ],
)
def test_a_lease_has_what_was_left_of_its_time_and_a_grace(away_s: float, lasts: float) -> None:
    assert lasts_s(aged(600), HEARD_AT + away_s) == lasts


def test_a_short_lease_has_its_whole_time() -> None:
    assert lasts_s(aged(GRACE_MIN_S), HEARD_AT + 1_000) == GRACE_MIN_S


@pytest.mark.parametrize("ttl_s", [1, 10, 12, 19, 30, 3_600])
def test_no_lease_loses_time_by_renewals_that_were_not_written(ttl_s: float) -> None:
    # The oldest that the last written sign of life can be, when there was a newer one that is not written.
    stale_s = restart_grace_s(ttl_s)
    assert not must_journal_renewal(ttl_s, stale_s * 0.999)
    for away_s in (0.0, ttl_s / 3, ttl_s):
        really_left_s = ttl_s - away_s
        assert lasts_s(aged(ttl_s), HEARD_AT + stale_s + away_s) >= really_left_s - 1e-9


def test_renewals_are_written_as_rarely_as_the_grace_allows() -> None:
    assert must_journal_renewal(600, 300) and not must_journal_renewal(600, 299)
    assert not must_journal_renewal(GRACE_MIN_S, 1_000_000), "it has its whole time after a restart anyway"
