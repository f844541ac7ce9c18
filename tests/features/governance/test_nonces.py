"""Used tokens stay used: whatever the clock does, over restarts, while many come at once, and when there is no room."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from greenroom.errors import GreenroomError, NoncesUnavailable, TokenReplayed
from greenroom.features.governance.nonces import KEEP_S, NONCES_MAX, SLACK, NonceJournal, key_of
from tests.features.governance.token_rig import NOW, SKEW_S, call, in_place, key_file, opened, shared_token
from tests.full_disk import full_disk

HOUR, YEAR = 3_600, 365 * 86_400


def journal_of(folder: Path, count: int, issued_at: int) -> None:
    """A journal with so many used nonces."""
    lines = [f"{issued_at} {key_of(str(number))}" for number in range(count)]
    (folder / "nonces").write_text("\n".join(["greenroom nonces 1 after 0", *lines, ""]))


async def journal(folder: Path, now: float = NOW, run: Callable[..., object] = in_place) -> NonceJournal:
    found = NonceJournal(folder / "nonces", SKEW_S, run)  # type: ignore[arg-type]
    await found.open(now)
    return found


@pytest.mark.parametrize("seed", range(6))
async def test_no_jump_of_the_clock_lets_a_token_be_used_again(tmp_path: Path, seed: int) -> None:
    """By an hour and a year to and fro, with restarts between; tokens that were issued by the clock of the moment."""
    chance, now = random.Random(seed), [NOW]
    keys = {"key_path": key_file(tmp_path)}
    gate = await opened(tmp_path, clock=lambda: now[0], **keys)
    used = []
    for _ in range(40):
        now[0] += chance.choice((1, 5, HOUR, -HOUR, YEAR, -YEAR)) if chance.random() < 0.5 else 1
        token = shared_token(issuedAt=now[0])
        try:
            await gate.permit(call(token))
            used.append(token)
        except GreenroomError as error:
            assert error.code == "token_issued_before_start"
        if chance.random() < 0.1:
            await gate.close()
            gate = await opened(tmp_path, clock=lambda: now[0], **keys)
        for old in chance.sample(used, min(3, len(used))):
            # Wherever the clock is: also where this token is neither old nor from the future.
            now_was, now[0] = now[0], old["opToken"]["issuedAt"]
            with pytest.raises(GreenroomError, match="used"):
                await gate.permit(call(old))
            now[0] = now_was
    assert len(used) > 5
    await gate.close()


async def test_a_token_used_while_the_journal_is_written_anew_stays_used(tmp_path: Path) -> None:
    """The new file is begun first and written last: what came meanwhile must be in it."""
    journal_of(tmp_path, SLACK + 2, NOW)
    held: list[Callable[[], None]] = []

    async def run(work: Callable[[], None], name: str) -> None:
        if name == "write nonce" and not held:
            held.append(work)
            await asyncio.Event().wait()
        work()

    nonces = await journal(tmp_path, run=run)
    later = NOW + KEEP_S + 5
    first = asyncio.ensure_future(nonces.consume("first", later, later))
    await asyncio.sleep(0)
    await nonces.consume("meanwhile", later, later)
    held[0]()
    first.cancel()
    await nonces.close()
    again = await journal(tmp_path, later)
    for nonce in ("first", "meanwhile"):
        with pytest.raises(TokenReplayed):
            await again.consume(nonce, later, later)
    assert len((tmp_path / "nonces").read_text().splitlines()) < 10, "those that are forgotten left the file"
    await again.close()


async def test_a_full_journal_permits_nothing_until_nonces_are_old(tmp_path: Path) -> None:
    journal_of(tmp_path, NONCES_MAX, NOW)
    nonces = await journal(tmp_path)
    with pytest.raises(NoncesUnavailable, match="100,000"):
        await nonces.consume("one more", NOW, NOW)
    later = NOW + KEEP_S + 1
    await nonces.consume("one more", later, later)
    await nonces.close()


async def test_a_journal_that_cannot_be_written_permits_nothing(tmp_path: Path) -> None:
    nonces = await journal(tmp_path, NOW - 60)
    size = (tmp_path / "nonces").stat().st_size
    with full_disk(size + 20), pytest.raises(NoncesUnavailable):
        await nonces.consume("a", NOW, NOW)
    # It might be on disk. Others go on, and the file can be read again.
    with pytest.raises(TokenReplayed):
        await nonces.consume("a", NOW, NOW)
    await nonces.consume("b", NOW, NOW)
    await nonces.close()
    with pytest.raises(NoncesUnavailable):
        await nonces.consume("c", NOW, NOW)
    again = await journal(tmp_path)
    with pytest.raises(TokenReplayed):
        await again.consume("b", NOW, NOW)
    await again.close()
