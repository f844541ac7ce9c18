"""What was granted is known after a crash, however it came; a full disk costs nothing that is there already."""

from __future__ import annotations

import errno
import json
import math
import os
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from greenroom.leases.records import Holder
from greenroom.runtime.leases.journal import Change, Ended, Heard, Journal, Kept

HOLDER = Holder("box", 42, 1_234, 4_026_531_836)


def kept(name: str, token: int = 1, **said: object) -> Kept:
    facts = {"claim": {"gpu0": 100}, "priority": 1, "preemptible": False, "grace_s": 30.0, "ttl_s": 30.0, **said}
    return Kept(id=name, name="train", token=token, **facts)  # type: ignore[arg-type]


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


def test_when_a_holder_was_heard_of_is_known_again_also_when_the_file_was_written_anew(path: Path) -> None:
    journal = opened(path)
    journal.append([kept("a", 7, heard_at=100.0), kept("b", 8), Heard("a", 250.5), Heard("nobody", 1.0)])
    for _ in range(2):
        journal.close()
        journal = opened(path)
        assert {id: one.heard_at for id, one in journal.live.items()} == {"a": 250.5, "b": None}
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
        b'{"granted":{}}',
        b'{"granted":{"id":"x"}}',
        b"\x00\x00\x00",
        b'{"granted":null}',
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

    monkeypatch.setattr("greenroom.runtime.leases.journal.os.write", limited)


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
    {"ttl_s": "x"},
    {"ttl_s": 0},
    {"grace_s": math.nan},
    {"priority": None},
    {"id": 5},
    {"preemptible": "no"},
    {"heard_at": "noon"},
    {"heard_at": math.nan},
    {"token": 1e300},
    {"token": 2**70},
    {"holder": {"host": 1, "pid": "x", "start_ticks": 1, "pid_ns": 2}},
)
SPOILED = ['{"last_token":1e999}', '{"heard":"a"}', '{"heard":"a","at":-1}', '{"last_token":true}', "[" * 100_000] + [
    json.dumps({"granted": {**asdict(kept("a")), **wrong}}) for wrong in WRONG
]


@pytest.mark.parametrize("line", SPOILED, ids=range(len(SPOILED)))
def test_a_line_that_cannot_be_ours_is_counted_and_left_out(path: Path, line: str) -> None:
    path.write_text(line + "\n")
    journal = opened(path)
    assert (journal.live, journal.last_token, journal.spoiled) == ({}, 0, 1)
