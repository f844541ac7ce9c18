"""Writes that are made together at the end of a turn of the event loop."""

from __future__ import annotations

import asyncio
import logging

import pytest

from greenroom.http.exchange import HELD_BYTES_MAX, LONE_TURNS, WRITERS_MAX, WriteBatch, Writer


class Far(asyncio.Transport):
    """The other end: what it was sent, write by write."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.got: list[bytes] = []
        self.closing = False
        self.breaks = breaks

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.breaks or self.closing:
            # As uvloop does.
            raise RuntimeError("the handle is closed")
        self.got.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closing


async def turn() -> None:
    await asyncio.sleep(0)


async def busy() -> WriteBatch:
    """A batch of a loop that had much to write in its last turn."""
    batch = WriteBatch()
    for _ in range(2):
        Writer(batch, Far()).write(b"-")
    await turn()
    return batch


async def test_a_lone_write_goes_out_at_once() -> None:
    far = Far()
    writer = Writer(WriteBatch(), far)
    for piece in (b"a", b"b"):
        writer.write(piece)
        assert far.got[-1] == piece
        await turn()


async def test_the_second_write_of_a_turn_waits_for_its_end() -> None:
    batch, one, two = WriteBatch(), Far(), Far()
    Writer(batch, one).write(b"a")
    Writer(batch, two).write(b"b")
    assert (one.got, two.got) == ([b"a"], [])
    await turn()
    assert two.got == [b"b"]


async def test_what_is_written_in_one_turn_goes_out_as_one_write_at_its_end() -> None:
    batch, one, two = await busy(), Far(), Far()
    writers = Writer(batch, one), Writer(batch, two)
    writers[0].write(b"a")
    writers[1].write(b"b")
    writers[0].write(b"c")
    assert (one.got, two.got) == ([], [])
    await turn()
    assert (one.got, two.got) == ([b"ac"], [b"b"])


async def test_a_turn_with_one_write_ends_the_waiting_of_the_next() -> None:
    batch, far = await busy(), Far()
    writer = Writer(batch, far)
    writer.write(b"a")
    assert far.got == []
    await turn()
    writer.write(b"b")
    assert far.got == [b"a", b"b"]


async def test_after_many_lone_writes_some_are_made_at_once_and_then_it_looks_again() -> None:
    batch, lone = WriteBatch(), Far()
    # Before the first turn there was nothing to do, either.
    for _ in range(LONE_TURNS - 1):
        Writer(batch, lone).write(b"-")
        await turn()
    fars = [Far() for _ in range(LONE_TURNS + 2)]
    for far in fars:
        Writer(batch, far).write(b"a")
    # The first that it looks at again goes out at once, as a lone one does; the second shows that it is not alone.
    assert [len(far.got) for far in fars] == [1] * (LONE_TURNS + 1) + [0]
    await turn()
    assert fars[-1].got == [b"a"]
    later = Far()
    Writer(batch, later).write(b"b")
    assert later.got == []
    await turn()
    assert later.got == [b"b"]


async def test_flush_keeps_the_order_and_writes_nothing_twice() -> None:
    far = Far()
    writer = Writer(await busy(), far)
    writer.write(b"a")
    writer.flush()
    assert far.got == [b"a"]
    writer.write(b"b")
    await turn()
    assert far.got == [b"a", b"b"]


async def test_much_of_one_connection_goes_out_at_once() -> None:
    far = Far()
    writer = Writer(await busy(), far)
    writer.write(b"a")
    writer.write(b"b" * HELD_BYTES_MAX)
    assert far.got == [b"a" + b"b" * HELD_BYTES_MAX]


async def test_the_first_of_many_connections_does_not_wait_for_the_last() -> None:
    batch = await busy()
    fars = [Far() for _ in range(WRITERS_MAX + 3)]
    for far in fars:
        Writer(batch, far).write(b"a")
    assert [len(far.got) for far in fars] == [1] * WRITERS_MAX + [0] * 3
    await turn()
    assert all(far.got == [b"a"] for far in fars)


async def test_a_closed_connection_is_not_written_to(caplog: pytest.LogCaptureFixture) -> None:
    far = Far()
    writer = Writer(await busy(), far)
    writer.write(b"a")
    far.closing = True
    with caplog.at_level(logging.ERROR, "greenroom.http"):
        await turn()
    assert far.got == [] and not caplog.text


async def test_one_that_breaks_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    batch, broken, sound = await busy(), Far(breaks=True), Far()
    Writer(batch, broken).write(b"a")
    Writer(batch, sound).write(b"b")
    with caplog.at_level(logging.ERROR, "greenroom.http"):
        await turn()
    assert sound.got == [b"b"]
    assert "writing to a connection failed" in caplog.text
