from __future__ import annotations

import asyncio
import threading

from greenroom.workers.torch_host.engine.requests import CallbackQueue
from tests.waiting import until


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
