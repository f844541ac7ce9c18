"""Bodies in memory and on disk, and the budget they are counted against."""

from __future__ import annotations

import os

import pytest

from greenroom.errors import BodiesFull, GatewayBug
from greenroom.proxy.body import Body, BodyBudget
from greenroom.proxy.limits import EdgeLimits


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
