"""A key file that is followed: each whole change counts, and nothing else does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import pytest_asyncio

from greenroom.access.key_file import FileKey, add_key, rendered, revoke_key
from greenroom.access.key_ring import KeyRing, Look
from greenroom.access.keys import new_key
from greenroom.config.schema import Server
from greenroom.errors import InvalidKey, KeyRevoked
from tests.waiting import until

NOW = datetime(2026, 11, 17, tzinfo=UTC)


class Followed:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.json"
        self.changes = self.looks = 0
        self.ring = KeyRing(self._count, run=self._threaded, look_every_s=0.01)
        self.secrets: dict[str, bytes] = {}

    async def _threaded(self, work: Callable[[], Look], name: str) -> Look:
        self.looks += 1
        return await asyncio.to_thread(work)

    def _count(self) -> None:
        self.changes += 1

    async def begin(self) -> None:
        server = Server(key_file=str(self.file))
        self.ring.use(server, await self.ring.look(server.key_file))
        self.ring.begin()

    def add(self, name: str) -> None:
        secret, sha256 = new_key()
        self.secrets[name] = secret.encode()
        add_key(self.file, FileKey(name=name, sha256=sha256))

    def opens(self, name: str) -> bool:
        try:
            return self.ring.keys.check(self.secrets[name]).name == name
        except InvalidKey:
            return False

    async def until_looked(self) -> None:
        """Several looks later."""
        before = self.looks
        await until(lambda: self.looks > before + 3)


@pytest_asyncio.fixture
async def followed(tmp_path: Path) -> AsyncIterator[Followed]:
    found = Followed(tmp_path)
    found.add("a")
    await found.begin()
    yield found
    await found.ring.close()


async def test_a_missing_or_empty_file_lets_in_no_one(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    await followed.begin()
    assert "is missing; `greenroom key new` makes it" in followed.ring.problems[0]
    with pytest.raises(InvalidKey):
        followed.ring.keys.check(None)
    followed.file.touch(0o600)
    await until(lambda: "is empty" in followed.ring.problems[0])
    with pytest.raises(InvalidKey):
        followed.ring.keys.check(b"")
    followed.file.write_bytes(rendered(()))
    await until(lambda: not followed.ring.problems)
    with pytest.raises(InvalidKey):
        followed.ring.keys.check(b"any")
    followed.add("a")
    await until(lambda: followed.opens("a"))
    await followed.ring.close()


async def test_new_keys_come_and_revoked_ones_go(followed: Followed) -> None:
    assert followed.opens("a")
    followed.add("b")
    await until(lambda: followed.opens("b"))
    revoke_key(followed.file, "a", NOW)
    await until(lambda: not followed.opens("a"))
    with pytest.raises(KeyRevoked, match="The API key a was revoked"):
        followed.ring.keys.check(followed.secrets["a"])
    assert followed.ring.keys.named("a") is None and followed.opens("b")


@pytest.mark.parametrize("fault", ["missing", "half", "empty", "open", "folder", "nonsense"])
async def test_a_file_that_cannot_be_used_changes_nothing_and_is_told(followed: Followed, fault: str) -> None:
    file, whole = followed.file, followed.file.read_bytes()
    if fault == "open":
        file.chmod(0o644)
    elif fault in ("missing", "folder"):
        file.unlink()
        if fault == "folder":
            file.mkdir()
    else:
        file.write_bytes({"half": whole[: len(whole) // 2], "empty": b"", "nonsense": b"\0" * 99}[fault])
    await until(lambda: followed.ring.problems)
    assert followed.opens("a") and str(file) in followed.ring.problems[0]
    told = followed.changes
    await followed.until_looked()
    # It is told once.
    assert followed.changes == told and followed.opens("a")
    if fault == "folder":
        file.rmdir()
    file.write_bytes(whole)
    file.chmod(0o600)
    await until(lambda: not followed.ring.problems)
    assert followed.opens("a")


async def test_a_file_that_stays_is_told_no_more(followed: Followed) -> None:
    assert followed.changes == 1, "what was read first"
    await followed.until_looked()
    assert followed.changes == 1


async def test_changes_in_quick_succession_are_all_seen(followed: Followed) -> None:
    """Written in place, with the same size, within one tick of the clock of a file system."""
    versions = [[FileKey(name="a", sha256=digit * 64)] for digit in "0123456789abcdef"]
    for _ in range(3):
        for version in versions:
            followed.file.write_bytes(rendered(version))
        await until(lambda: [key.sha256 for key in followed.ring.of_file] == ["f" * 64])
        followed.file.write_bytes(rendered(versions[0]))
        await until(lambda: [key.sha256 for key in followed.ring.of_file] == ["0" * 64])


async def test_a_key_that_the_configuration_has_does_not_count_twice(followed: Followed) -> None:
    server = Server.model_validate({"key_file": str(followed.file), "api_keys": [{"name": "a", "key": "ours"}]})
    followed.ring.use(server)
    assert not followed.opens("a") and followed.ring.keys.check(b"ours").name == "a"
    assert "server.api_keys has one of this name" in followed.ring.problems[0]


async def test_another_file_brings_its_own_keys_only(followed: Followed, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    other = Followed(folder)
    other.add("b")
    server = Server(key_file=str(other.file))
    followed.ring.use(server, await followed.ring.look(server.key_file))
    assert followed.ring.keys.check(other.secrets["b"]).name == "b" and not followed.opens("a")
    followed.add("c")
    other.add("d")
    await until(lambda: followed.ring.keys.named("d"))
    assert followed.ring.keys.named("c") is None
    followed.ring.use(Server())
    assert not followed.ring.keys.enabled


async def test_a_disk_that_hangs_is_told_and_the_keys_go_on(tmp_path: Path) -> None:
    followed, hangs, looks = Followed(tmp_path), threading.Event(), 0
    followed.add("a")

    async def slow(work: Callable[[], Look], name: str) -> Look:
        nonlocal looks
        looks += 1
        if looks > 1:
            await asyncio.to_thread(hangs.wait)
        # At once: where the machine is busy, a thread may take longer than a look may.
        return work()

    followed.ring = KeyRing(lambda: None, run=slow, look_every_s=0.01, answer_max_s=0.05)
    await followed.begin()
    await until(lambda: followed.ring.problems)
    assert "does not answer" in followed.ring.problems[0] and followed.opens("a")
    await asyncio.sleep(0.1)
    assert looks == 2, "no second thread hangs beside the first"
    followed.add("b")
    hangs.set()
    await until(lambda: followed.opens("b"))
    assert not followed.ring.problems
    await followed.ring.close()


class Pause(float):
    """One that fails as a pause without memory does."""

    fails = False

    def __le__(self, other: object) -> bool:
        if self.fails:
            raise MemoryError
        return False


async def test_a_pause_that_fails_is_not_the_last(tmp_path: Path) -> None:
    followed, pause = Followed(tmp_path), Pause(0.01)
    followed.add("a")
    followed.ring = KeyRing(lambda: None, look_every_s=pause)
    await followed.begin()
    pause.fails = True
    await asyncio.sleep(0.05)
    pause.fails = False
    followed.add("b")
    await until(lambda: followed.opens("b"), within_s=10)
    await followed.ring.close()


@pytest.mark.parametrize("part", ["the look", "what hears of it"])
async def test_a_look_that_breaks_is_told_and_not_the_last(tmp_path: Path, part: str) -> None:
    followed, breaks = Followed(tmp_path), False
    followed.add("a")

    async def looked(work: Callable[[], Look], name: str) -> Look:
        if breaks and part == "the look":
            raise RuntimeError("can't start new thread")
        return await asyncio.to_thread(work)

    def changed() -> None:
        if breaks and part == "what hears of it":
            raise RuntimeError("it breaks")

    followed.ring = KeyRing(changed, run=looked, look_every_s=0.01)
    await followed.begin()
    breaks = True
    followed.add("b")
    await until(lambda: followed.ring.problems)
    assert "RuntimeError" in followed.ring.problems[0] and followed.opens("a")
    breaks = False
    followed.add("c")
    await until(lambda: followed.opens("b") and followed.opens("c") and not followed.ring.problems)
    await followed.ring.close()
