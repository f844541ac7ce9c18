"""Eight programs lease memory through Redis while everything fails: what they saw must add up. And the checker."""

from __future__ import annotations

import os
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


def test_leases_one_after_the_other_are_well() -> None:
    assert check([*held("a", 0), *released("a", 1.0), *held("b", 0.95), *released("b", 1.5), END], CAPACITY) == []


def test_leases_that_fit_together_are_well() -> None:
    assert check([*held("a", 0, mib=5), *held("b", 0.5, mib=5), END], CAPACITY) == []


def test_two_leases_on_the_same_memory_are_found() -> None:
    (found,) = check([*held("a", 0), *held("b", 1.0), END], CAPACITY)
    assert "12 of 10 MiB" in found
    assert "lease-a" in found
    assert "lease-b" in found


def test_a_holder_whose_ttl_has_passed_by_its_own_clock_believes_no_more() -> None:
    assert check([*held("a", 0), *held("b", TTL_S), END], CAPACITY) == []


def test_a_renewal_is_worth_a_ttl_from_when_it_was_asked_for() -> None:
    renewed = [*held("a", 0), line(1.5, "a", "renew", "invoke"), line(1.9, "a", "renew", "ok")]
    assert check([*renewed, *held("b", 3.3), END], CAPACITY)
    assert check([*renewed, *held("b", 3.5), END], CAPACITY) == []


def test_a_renewal_without_an_answer_is_worth_nothing() -> None:
    asked = [*held("a", 0), line(1.5, "a", "renew", "invoke"), line(1.9, "a", "renew", "unknown")]
    assert check([*asked, *held("b", 2.0), END], CAPACITY) == []


def test_a_lease_that_was_reported_lost_is_no_longer_counted() -> None:
    told = [*held("a", 0), line(0.5, "a", "renew", "invoke"), line(0.6, "a", "renew", "refused")]
    assert check([*told, *held("b", 0.7), END], CAPACITY) == []


def test_an_unanswered_acquire_is_no_belief() -> None:
    asked = [line(0, "a", "acquire", "invoke"), line(1, "a", "acquire", "unknown")]
    assert check([*asked, *held("b", 0.5), END], CAPACITY) == []


def test_a_release_that_was_answered_and_did_not_happen_is_found() -> None:
    seen = line(1.5, "a", "seen", "held", text="1.4")
    (found,) = check([*held("a", 0), *released("a", 1.0), seen, END], CAPACITY)
    assert "was released at 1.100" in found


def test_a_look_that_began_before_the_release_was_answered_proves_nothing() -> None:
    seen = line(1.5, "a", "seen", "held", text="1.05")
    assert check([*held("a", 0), *released("a", 1.0), seen, END], CAPACITY) == []


def test_a_token_that_went_back_is_found() -> None:
    (found,) = check([*held("a", 0, mib=1, token=9), *held("b", 1.0, mib=1, token=9), END], CAPACITY)
    assert "token 9 after lease-a had 9" in found


def test_tokens_of_grants_asked_for_at_the_same_time_may_be_in_any_order() -> None:
    first, second = held("a", 0, mib=1, token=9), held("b", 0.05, mib=1, token=8)
    assert check([*first, *second, END], CAPACITY) == []


def test_a_book_with_more_than_there_is_is_found() -> None:
    seen = [line(1.0, who, "seen", "held", text="0.9") for who in "ab"]
    (found,) = check([*seen, END], CAPACITY)
    assert "in the book" in found


def test_what_is_left_at_the_end_is_found() -> None:
    assert check([Event(1.0, "runner", "end", "refused", text="left ['x']")], CAPACITY) == ["at the end: left ['x']"]
    assert check([], CAPACITY) == ["the history has no end: it was not checked whether anything was left"]


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
