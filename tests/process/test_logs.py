"""logs.py"""

from __future__ import annotations

import asyncio

import pytest

from greenroom.process.logs import (
    BYTES_MAX,
    LINE_BYTES_MAX,
    LINES_MAX,
    UNREAD_LINES_MAX,
    LogRing,
    SharedLog,
    StartLog,
    Subscription,
    last_line,
    telling_line,
)
from tests.waiting import PATIENCE_S


def ring_of(*pieces: bytes) -> LogRing:
    ring = LogRing()
    for piece in pieces:
        ring.write(piece)
    return ring


def in_single_bytes(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


CASES = [
    (b"one\ntwo\n", ["one", "two"]),
    (b"one\r\ntwo\r\n", ["one", "two"]),
    (b"\n\n", ["", ""]),
    (b"unfinished", ["unfinished"]),
    (b" 10%\r 50%\r100%\ndone\n", ["100%", "done"]),
    (b"\r 10%\r 50%\r100%\n", ["100%"]),
    (b" 10%\r 50%", [" 50%"]),
    (b" 50%\r", [" 50%"]),
    (b"100%\r\r\n", ["100%"]),
    ("grüße\n".encode(), ["grüße"]),
    (b"\xff\xfe\n", ["\ufffd\ufffd"]),
]


@pytest.mark.parametrize(("data", "lines"), CASES)
def test_lines_are_the_same_however_the_bytes_arrive(data: bytes, lines: list[str]) -> None:
    assert ring_of(data).tail(10) == lines
    assert ring_of(*in_single_bytes(data)).tail(10) == lines


def test_tail_gives_the_last_lines_oldest_first() -> None:
    ring = ring_of(b"a\nb\nc\nd")
    assert ring.tail(2) == ["c", "d"]
    assert ring.tail(0) == []
    assert ring.tail(-1) == []
    assert ring.tail(100) == ["a", "b", "c", "d"]


def test_line_of_100_kb_is_cut_and_the_next_one_is_whole() -> None:
    for pieces in ([b"x" * 100_000 + b"\nnext\n"], [b"x" * 1000] * 100 + [b"\nnext\n"]):
        cut, following = ring_of(*pieces).tail(2)
        assert cut == "x" * LINE_BYTES_MAX + " [line cut]"
        assert following == "next"


def test_line_of_exactly_the_limit_is_not_cut() -> None:
    assert ring_of(b"x" * LINE_BYTES_MAX + b"\n").tail(1) == ["x" * LINE_BYTES_MAX]


def test_progress_after_a_long_state_is_shown_again() -> None:
    assert ring_of(b"x" * 100_000, b"\rdone\n").tail(1) == ["done"]


def test_oldest_lines_make_room_by_count_and_by_bytes() -> None:
    ring = LogRing()
    for number in range(LINES_MAX + 5):
        ring.write(f"{number}\n".encode())
    assert len(ring.tail(LINES_MAX * 2)) == LINES_MAX
    assert ring.tail(LINES_MAX * 2)[0] == "5"
    assert ring.lines_seen == LINES_MAX + 5
    for _ in range(BYTES_MAX // 4096 + 10):
        ring.write(b"y" * 4095 + b"\n")
    assert sum(map(len, ring.tail(LINES_MAX * 2))) <= BYTES_MAX
    assert BYTES_MAX // 4096 <= len(ring.tail(LINES_MAX * 2)) <= BYTES_MAX // 4095


def test_flush_ends_an_unfinished_line() -> None:
    ring = ring_of(b"fatal: out of memory")
    assert ring.lines_seen == 0
    ring.flush()
    ring.flush()
    ring.write(b"restarted\n")
    assert ring.tail(5) == ["fatal: out of memory", "restarted"]
    assert ring.lines_seen == 2


async def next_lines(subscription: Subscription, count: int) -> list[str]:
    return [await asyncio.wait_for(anext(subscription), timeout=PATIENCE_S) for _ in range(count)]


async def test_subscription_gets_the_lines_from_now_on() -> None:
    ring = ring_of(b"before\n")
    subscription = ring.subscribe()
    ring.write(b"a\nb\npart")
    assert await next_lines(subscription, 2) == ["a", "b"]
    waiting = asyncio.create_task(next_lines(subscription, 1))
    await asyncio.sleep(0)
    ring.write(b"ial\n")
    assert await waiting == ["partial"]


async def test_slow_reader_is_told_how_many_lines_it_missed() -> None:
    ring = LogRing()
    slow, quick = ring.subscribe(), ring.subscribe()
    for number in range(UNREAD_LINES_MAX + 7):
        ring.write(f"{number}\n".encode())
        assert await anext(quick) == str(number)
    assert await next_lines(slow, 2) == ["[7 lines dropped: the reader was too slow]", "7"]
    assert (slow.dropped, quick.dropped) == (7, 0)
    assert (await next_lines(slow, UNREAD_LINES_MAX - 1))[-1] == str(UNREAD_LINES_MAX + 6)


async def test_closed_subscription_ends_for_the_task_that_waits() -> None:
    ring = LogRing()
    subscription = ring.subscribe()
    reading = asyncio.create_task(next_lines(subscription, 1))
    await asyncio.sleep(0)
    subscription.close()
    subscription.close()
    with pytest.raises(StopAsyncIteration):
        await reading
    ring.write(b"later\n")
    assert [line async for line in subscription] == []


async def test_closed_ring_ends_its_subscriptions_after_their_last_lines() -> None:
    ring = LogRing()
    subscription = ring.subscribe()
    ring.write(b"a\nlast words")
    ring.close()
    assert [line async for line in subscription] == ["a", "last words"]
    assert ring.tail(5) == ["a", "last words"]


async def test_cancelled_reader_loses_no_line() -> None:
    ring = LogRing()
    subscription = ring.subscribe()
    reading = asyncio.create_task(next_lines(subscription, 1))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    ring.write(b"kept\n")
    assert await next_lines(subscription, 1) == ["kept"]


def test_a_start_has_its_own_lines_and_its_model_those_of_all() -> None:
    model = LogRing()
    first, second = StartLog(model), StartLog(model)
    first.write(b"prompt of a\nhalf")
    first.flush()
    second.write(b"no such file\nand ha")
    assert first.tail(10) == ["prompt of a", "half"]
    assert second.tail(10) == ["no such file", "and ha"]
    assert model.tail(10) == ["prompt of a", "half", "no such file", "and ha"]


def test_lines_of_a_shared_log_go_to_every_listener_whole() -> None:
    shared, one, two = SharedLog(), LogRing(), LogRing()
    shared.write(b"before\n")
    shared.listeners = [one, two]
    one.write(b"own\n")
    shared.write(b"half a ")
    assert one.tail(5) == ["own"]
    shared.write(b"line\nlast")
    shared.flush()
    assert one.tail(5) == ["own", "half a line", "last"] and two.tail(5) == ["half a line", "last"]
    assert shared.tail(5) == ["before", "half a line", "last"]


# --- the line that tells why ----------------------------------------------------------------------------------------

CORE = "(EngineCore_DP0 pid=71) ERROR 11-02 10:00:01 [core.py:842] "
SERVER = "(APIServer pid=70) "


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        pytest.param(
            [
                "0.00.004.818 I srv    load_model: loading model 'm.gguf'",
                "0.00.004.930 E gguf_init_from_reader: invalid magic characters: 'hell', expected 'GGUF'",
                "0.00.005.019 E llama_model_load: error loading model: llama_model_loader: failed to load model from m",
                "0.00.005.351 E srv          init: exiting due to model loading error",
            ],
            "gguf_init_from_reader: invalid magic characters: 'hell', expected 'GGUF'",
            id="llama.cpp, no GGUF",
        ),
        pytest.param(
            [
                "llama_model_load: error loading model: unknown model architecture: 'zlama'",
                "llama_model_load_from_file_impl: failed to load model",
                "main: exiting due to model loading error",
            ],
            "error loading model: unknown model architecture: 'zlama'",
            id="llama.cpp, an architecture",
        ),
        pytest.param(
            ["0.1 W warns of much", "0.2 E clip_init: no vision in mmproj.gguf", "0.3 E srv load_model: failed"],
            "clip_init: no vision in mmproj.gguf",
            id="llama.cpp, any error",
        ),
        pytest.param(
            [
                f"{CORE}EngineCore failed to start.",
                f"{CORE}Traceback (most recent call last):",
                f'{CORE}    raise ValueError("No memory for {{blocks}}")',
                f"{CORE}ValueError: No memory for 7 blocks.",
                f"{SERVER}Traceback (most recent call last):",
                f"{SERVER}RuntimeError: Engine core initialization failed. See root cause above.",
            ],
            "ValueError: No memory for 7 blocks.",
            id="vLLM, the core",
        ),
        pytest.param(
            [
                f"{SERVER}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
                f"{SERVER}  Value error, Architectures ['X'] are not supported. [type=value_error, input_value=1]",
            ],
            "Architectures ['X'] are not supported.",
            id="vLLM, the configuration",
        ),
        pytest.param(
            ["api_server.py: error: unrecognized arguments: --bogus"], "unrecognized arguments: --bogus", id="argparse"
        ),
        pytest.param(
            ["Traceback", "\x1b[31mtorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\x1b[0m", "OSError: later"],
            "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB",
            id="colours",
        ),
        pytest.param(["loading", "GET /health 503", "an Error of nobody"], None, id="nothing"),
        pytest.param(["error: " + "x" * 1000], "x" * 299 + "…", id="long"),
    ],
)
def test_the_line_that_tells_why_an_engine_failed_is_its_cause(lines: list[str], told: str | None) -> None:
    assert telling_line(lines) == told


def test_the_last_line_is_the_last_with_anything_in_it() -> None:
    assert last_line(["loading", "it is not here", " ", "\x1b[0m"]) == "it is not here"
    assert last_line([]) is None
