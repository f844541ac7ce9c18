"""Eight programs lease memory through Redis while everything fails: what they saw must add up. And the checker."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.leases.history.checker import check
from tests.leases.history.events import Event, Log, read
from tests.leases.history.run import run

pytestmark = pytest.mark.slow

CAPACITY = {"gpu0": 10}
TTL_S = 2.0
# With the gateways' history (tests/integration/leases), the slow tests spend five minutes on lease histories.
SECONDS = 60.0
SEEDS = (1, 2)
SOAK_SECONDS = float(os.environ.get("GREENROOM_HISTORY_S", "300"))
KINDS = {"kill", "stop", "busy", "stop_redis", "empty_redis", "slow", "cut", "stall", "jump"}


def line(at: float, who: str, op: str, phase: str, *, mib: int = 6, token: int | None = None, text: str = "") -> Event:
    """One lease per program, named after it; its token is its letter's, unless said otherwise."""
    number = ord(who) if token is None else token
    return Event(at, who, op, phase, f"lease-{who}", number, TTL_S, {"gpu0": mib}, text)


def held(who: str, from_s: float, *, mib: int = 6, token: int | None = None) -> list[Event]:
    return [
        line(from_s, who, "acquire", "invoke", mib=mib, token=token),
        line(from_s + 0.1, who, "acquire", "ok", mib=mib, token=token),
    ]


def released(who: str, at: float) -> list[Event]:
    return [line(at, who, "release", "invoke"), line(at + 0.1, who, "release", "ok")]


END = Event(100.0, "runner", "end", "ok")


def renewed(answer: str) -> list[Event]:
    return [*held("a", 0), line(1.5, "a", "renew", "invoke"), line(1.9, "a", "renew", answer)]


def seen(*who: str, since: str) -> list[Event]:
    """A look at all leases that began then."""
    return [line(1.5, one, "seen", "held", text=since) for one in who]


HISTORIES: dict[str, tuple[list[Event], str | None]] = {
    "one after the other": ([*held("a", 0), *released("a", 1.0), *held("b", 0.95), *released("b", 1.5), END], None),
    "two that fit together": ([*held("a", 0, mib=5), *held("b", 0.5, mib=5), END], None),
    "two on the same memory": ([*held("a", 0), *held("b", 1.0), END], "12 of 10 MiB .*lease-a .*lease-b "),
    "a TTL that has passed by its holder's clock": ([*held("a", 0), *held("b", TTL_S), END], None),
    "a renewal counts from when it was asked for": ([*renewed("ok"), *held("b", 3.3), END], "12 of 10 MiB"),
    "and no longer than a TTL": ([*renewed("ok"), *held("b", 3.5), END], None),
    "a renewal without an answer is worth nothing": ([*renewed("unknown"), *held("b", 2.0), END], None),
    "a lease that was reported lost": (
        [*held("a", 0), line(0.5, "a", "renew", "invoke"), line(0.6, "a", "renew", "refused"), *held("b", 0.7), END],
        None,
    ),
    "an unanswered acquire is no belief": (
        [line(0, "a", "acquire", "invoke"), line(1, "a", "acquire", "unknown"), *held("b", 0.5), END],
        None,
    ),
    "a release that did not happen": (
        [*held("a", 0), *released("a", 1.0), *seen("a", since="1.4"), END],
        r"was released at 1\.100",
    ),
    "a look that began before the release was answered": (
        [*held("a", 0), *released("a", 1.0), *seen("a", since="1.05"), END],
        None,
    ),
    "a token that went back": (
        [*held("a", 0, mib=1, token=9), *held("b", 1.0, mib=1, token=9), END],
        "token 9 after lease-a had 9",
    ),
    "tokens of grants asked for at the same time": (
        [*held("a", 0, mib=1, token=9), *held("b", 0.05, mib=1, token=8), END],
        None,
    ),
    "a book with more than there is": ([*seen("a", "b", since="0.9"), END], "in the book"),
    "something left at the end": (
        [Event(1.0, "runner", "end", "refused", text="left ['x']")],
        r"^at the end: left \['x'\]$",
    ),
    "no end": ([], "^the history has no end: it was not checked whether anything was left$"),
}


@pytest.mark.parametrize("history", HISTORIES)
def test_the_checker_finds_what_is_wrong_and_nothing_else(history: str) -> None:
    events, wrong = HISTORIES[history]
    found = check(events, CAPACITY)
    assert len(found) == (wrong is not None), found
    assert wrong is None or re.search(wrong, found[0]), found


def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    whole = line(1.0, "a", "acquire", "ok")
    Log(tmp_path / "a.jsonl").note(whole)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"at": 2.0, "cli')
    assert read(tmp_path) == [whole]


async def _holds_for(seconds: float, seed: int, folder: Path) -> None:
    result = await run(folder, seconds, seed)
    assert result.wrong == [], result.told()
    assert result.counts["acquire ok"] >= 10, result.told()
    assert set(result.faults) == KINDS, result.told()


@pytest.mark.parametrize("seed", SEEDS)
async def test_no_overlap_no_lost_release_and_no_stuck_lease_while_everything_fails(tmp_path: Path, seed: int) -> None:
    await _holds_for(SECONDS, seed, tmp_path)


@pytest.mark.soak
async def test_the_same_for_longer(tmp_path: Path) -> None:
    await _holds_for(SOAK_SECONDS, 3, tmp_path)
