"""Bodies in memory and on disk, and the budget they are counted against."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.errors import BodiesFull, GatewayBug
from greenroom.http.body import Body, BodyBudget, lies_in_memory
from greenroom.http.limits import MIB, EdgeLimits
from tests.waiting import until_now


def budget(spool_dir: str | None = None, **limits: int) -> BodyBudget:
    return BodyBudget(EdgeLimits(**{"body_in_memory_max": 100, **limits}), spool_dir)


def test_small_body_is_held_in_memory_and_counted() -> None:
    bodies = budget()
    body = Body(bodies)
    body.append(b"abc")
    body.append(b"def")
    assert (len(body), body.is_spooled, body.read(), list(body.chunks())) == (6, False, b"abcdef", [b"abcdef"])
    assert bodies.memory_bytes == 6
    body.close()
    assert bodies.memory_bytes == 0


def test_body_moves_to_disk_when_it_grows() -> None:
    bodies = budget()
    body = Body(bodies)
    body.append(b"a" * 100)
    assert not body.is_spooled
    body.append(b"b" * 200_000)
    body.append(b"c")
    assert body.is_spooled
    assert (bodies.memory_bytes, bodies.spool_bytes) == (0, 200_101)
    expected = b"a" * 100 + b"b" * 200_000 + b"c"
    assert body.read() == expected
    # A retry reads it again from the start.
    assert b"".join(body.chunks()) == b"".join(body.chunks()) == expected
    body.close()
    assert bodies.spool_bytes == 0


def test_budget_comes_back_exactly_once() -> None:
    bodies = budget()
    first, second = Body(bodies), Body(bodies)
    first.append(b"abc")
    second.append(b"d" * 200)
    for _ in range(3):
        first.close()
        second.close()
    assert (bodies.memory_bytes, bodies.spool_bytes) == (0, 0)


def test_closed_body_cannot_be_read() -> None:
    for length in (10, 1000):
        body = Body(budget())
        body.append(b"x" * length)
        reading = body.chunks()
        next(reading)
        body.close()
        with pytest.raises(GatewayBug):
            body.read()
        with pytest.raises(GatewayBug):
            list(body.chunks())


def test_memory_of_all_bodies_is_limited() -> None:
    bodies = budget(bodies_total_max=150)
    first, second = Body(bodies), Body(bodies)
    first.append(b"a" * 100)
    with pytest.raises(BodiesFull):
        second.append(b"b" * 51)
    second.append(b"b" * 50)
    first.close()
    second.close()
    assert bodies.memory_bytes == 0


def test_spool_of_all_bodies_is_limited() -> None:
    bodies = budget(spool_total_max=500)
    first, second = Body(bodies), Body(bodies)
    first.append(b"a" * 400)
    with pytest.raises(BodiesFull):
        second.append(b"b" * 101)
    first.close()
    second.close()
    assert (bodies.memory_bytes, bodies.spool_bytes) == (0, 0)


def test_spool_directory_that_cannot_be_used_is_an_overload(tmp_path: os.PathLike[str]) -> None:
    body = Body(budget(spool_dir=os.path.join(tmp_path, "absent")))
    with pytest.raises(BodiesFull, match="No such file"):
        body.append(b"a" * 101)
    body.close()


def test_spooled_body_leaves_no_file_and_no_descriptor(tmp_path: os.PathLike[str]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    body = Body(budget(spool_dir=str(tmp_path)))
    body.append(b"a" * 1000)
    assert os.listdir(tmp_path) == []
    body.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_nothing_waits_while_the_pages_of_a_large_body_are_freed(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    body = Body(budget(str(tmp_path)))
    for _ in range(256):
        body.append(bytes(MIB))
    begun = time.thread_time()
    body.close()
    # To free them takes the kernel several times as long.
    assert time.thread_time() - begun < 0.004
    until_now(lambda: set(os.listdir("/proc/self/fd")) <= before, "the file is closed")


def test_full_disk_is_an_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = budget()
    body = Body(bodies)
    body.append(b"a" * 101)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(BodiesFull, match="No space left"):
        body.append(b"b")
    body.close()
    assert bodies.spool_bytes == 0


MOUNTS = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
23 22 0:21 / /tmp rw,nosuid - tmpfs tmpfs rw,size=1g
24 22 0:22 / /run rw shared:2 master:3 - ramfs none rw
25 22 0:23 / /srv rw - nfs4 server:/a rw
garbage
"""


@pytest.mark.parametrize(
    ("device", "is_memory"), [((254, 1), False), ((0, 21), True), ((0, 22), True), ((0, 23), False), ((9, 9), False)]
)
def test_a_folder_in_memory_is_known_by_its_file_system(device: tuple[int, int], is_memory: bool) -> None:
    assert lies_in_memory(os.makedev(*device), MOUNTS) is is_memory


def test_bodies_spooled_to_memory_count_as_memory(ram: str) -> None:
    bodies = budget(spool_dir=ram, bodies_total_max=1_000, spool_total_max=100_000)
    assert bodies.spools_to_memory
    first, second, small = Body(bodies), Body(bodies), Body(bodies)
    first.append(b"a" * 600)
    assert (bodies.memory_bytes, bodies.spool_bytes) == (600, 600)
    with pytest.raises(BodiesFull, match="Too many request bodies are being held"):
        second.append(b"b" * 401)
    second.close()
    small.append(b"c" * 100)
    with pytest.raises(BodiesFull):
        first.append(b"a" * 301)
    for body in (first, small, small):
        body.close()
    assert (bodies.memory_bytes, bodies.spool_bytes) == (0, 0)


def test_bodies_on_a_disk_do_not_count_as_memory(tmp_path: Path) -> None:
    bodies = budget(spool_dir=str(tmp_path), bodies_total_max=1_000)
    if bodies.spools_to_memory:
        pytest.skip("temporary files lie in memory here")
    body = Body(bodies)
    body.append(b"a" * 5_000)
    assert (bodies.memory_bytes, bodies.spool_bytes) == (0, 5_000)
    body.close()


def test_bodies_leave_room_on_the_disk_for_what_else_is_written_there(tmp_path: Path) -> None:
    seen = os.statvfs(tmp_path)
    bodies = budget(spool_dir=str(tmp_path), spool_leaves_bytes=2 * seen.f_frsize * seen.f_bavail)
    body = Body(bodies)
    body.append(b"a" * 100)
    with pytest.raises(BodiesFull, match="disk is nearly full"):
        body.append(b"b")
    body.close()
    assert (bodies.memory_bytes, bodies.spool_bytes) == (0, 0)


@pytest.fixture
def ram() -> Iterator[str]:
    """A folder in memory."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("there is no shared memory here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder
