"""The blocks of known prefixes; and letters from the thread that computes to the loop."""

from __future__ import annotations

import asyncio
import random
import threading

from greenroom.workers.torch_host.engine.block_manager import PrefixCache
from greenroom.workers.torch_host.engine.requests import CallbackQueue
from greenroom.workers.torch_host.engine.sequence import CachedBlock
from tests.waiting import until

A, B = ("a", ""), ("b", "")
BLOCK_BYTES = 1000


def made(blocks: int) -> PrefixCache:
    return PrefixCache(blocks * 16, BLOCK_BYTES)


def kept(cache: PrefixCache, owner: tuple[str, str], tokens: list[int]) -> list[CachedBlock]:
    """Compute these tokens and keep them, as a sequence does; still in use."""
    held = cache.match(owner, tokens)
    whole = len(tokens) // 16
    own = cache.take(whole - len(held))
    added = cache.keep(owner, tokens, held, own)
    assert len(added) == len(own)
    return [*held, *added]


def run(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_the_longest_known_beginning_is_found_but_never_the_last_token() -> None:
    cache = made(8)
    cache.release(kept(cache, A, run(0, 48)))
    assert len(cache.match(A, run(0, 100))) == 3
    assert len(cache.match(A, run(0, 48))) == 2
    assert len(cache.match(A, [*run(0, 20), 7, *run(21, 40)])) == 1
    assert cache.match(A, [1, *run(0, 48)]) == []
    assert cache.match(B, run(0, 48)) == []


def test_the_same_block_of_tokens_after_another_beginning_is_another_entry() -> None:
    cache = made(8)
    cache.release(kept(cache, A, [*run(0, 16), *run(500, 16)]))
    assert len(cache.match(A, [*run(100, 16), *run(500, 17)])) == 0


def test_unused_blocks_go_when_room_is_needed_oldest_first_and_leaves_first() -> None:
    cache = made(4)
    cache.release(kept(cache, A, run(0, 32)))
    cache.release(kept(cache, A, run(100, 32)))
    cache.release(cache.match(A, run(0, 33)))
    assert cache.available == 4
    cache.take(2)
    assert len(cache.match(A, run(0, 33))) == 2
    assert cache.match(A, run(100, 33)) == []


def test_blocks_in_use_never_go() -> None:
    cache = made(4)
    held = kept(cache, A, run(0, 32))
    assert cache.available == 2
    cache.take(2)
    assert [node.block for node in cache.match(A, run(0, 33))] == [node.block for node in held]


def test_blocks_that_were_kept_before_are_not_kept_twice() -> None:
    cache = made(8)
    first = kept(cache, A, run(0, 32))
    again = cache.take(2)
    assert cache.keep(A, run(0, 32), [], again) == []
    cache.release(first)


def test_a_flushed_block_in_use_is_not_found_and_freed_by_its_last_user() -> None:
    cache = made(4)
    held = kept(cache, A, run(0, 32))
    assert cache.flush("a", None) == (32, 2 * BLOCK_BYTES)
    assert cache.match(A, run(0, 33)) == []
    assert cache.available == 2
    own = cache.take(1)
    # What follows a flushed block is not kept: it could not be found.
    assert cache.keep(A, run(0, 48), held, own) == []
    cache.release(held)
    assert cache.available == 3
    assert cache.flush(None, None) == (0, 0)


def test_blocks_are_never_lost_and_never_in_two_places_whatever_happens() -> None:
    chance = random.Random(7)
    cache = made(24)
    sequences: list[tuple[list[CachedBlock], list[int]]] = []
    for _ in range(3000):
        what = chance.random()
        if what < 0.5:
            owner = (chance.choice("ab"), chance.choice("xy"))
            tokens = [chance.randrange(2) for _ in range(0, 16 * chance.randint(1, 5), 16) for _ in range(1)]
            text = [token for token in tokens for _ in range(16)]
            held = cache.match(owner, [*text, 9])
            needed = len(tokens) - len(held)
            if needed <= cache.available:
                own = cache.take(needed)
                added = cache.keep(owner, text, held, own)
                sequences.append(([*held, *added], own[len(added) :]))
            else:
                cache.release(held)
        elif sequences and what < 0.95:
            nodes, own = sequences.pop(chance.randrange(len(sequences)))
            cache.give(own)
            cache.release(nodes)
        else:
            cache.flush(chance.choice(["a", None]), chance.choice(["x", None]))
        used = {node.block for nodes, _ in sequences for node in nodes}
        private = [block for _, own in sequences for block in own]
        assert len(private) == len(set(private))
        assert not used & set(private)
        assert cache.available == 24 - len(used) - len(private)


async def test_letters_of_many_threads_arrive_each_in_its_order() -> None:
    mailbox = CallbackQueue(asyncio.get_running_loop())
    received: list[tuple[int, int]] = []
    threads = [
        threading.Thread(target=lambda who=who: [mailbox.post(received.append, (who, n)) for n in range(2_000)])
        for who in range(4)
    ]
    for thread in threads:
        thread.start()
    await until(lambda: len(received) == 8_000)
    for who in range(4):
        assert [number for sender, number in received if sender == who] == list(range(2_000))


async def test_many_letters_wake_the_loop_once() -> None:
    loop = asyncio.get_running_loop()
    mailbox, received, calls = CallbackQueue(loop), list[int](), list[object]()
    original = loop.call_soon_threadsafe

    def counted(callback: object, *rest: object) -> object:
        calls.append(callback)
        return original(callback, *rest)  # type: ignore[arg-type]

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
    for number in range(10):
        mailbox.post(received.append, number)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (received, len(calls)) == (list(range(10)), 1)


async def test_a_callback_that_fails_does_not_stop_the_others() -> None:
    mailbox, received = CallbackQueue(asyncio.get_running_loop()), list[int]()
    mailbox.post(lambda number: 1 / number, 0)
    mailbox.post(received.append, 2)
    await until(lambda: received == [2])


def test_letters_to_a_closed_loop_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    received: list[int] = []
    CallbackQueue(loop).post(received.append, 1)
    assert received == []
