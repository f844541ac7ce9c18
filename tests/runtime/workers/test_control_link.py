"""The control connection: questions, answers, progress, descriptors, and every way in which it can end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.runtime.workers.control_link import (
    LINE_BYTES_MAX,
    UNSENT_BYTES_MAX,
    ControlLink,
    OpFailed,
    WorkerLost,
    connect,
    count,
    seconds,
)


class Other:
    """The worker's end, spoken to by hand."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.ends = 0
        self.link = ControlLink(ours, self._count)
        self._rest = b""

    def _count(self) -> None:
        self.ends += 1

    async def asked(self) -> tuple[dict[str, Any], list[int]]:
        """The next question, and the descriptors that came with it."""

        def read() -> tuple[dict[str, Any], list[int]]:
            fds: list[int] = []
            while b"\n" not in self._rest:
                data, more, _, _ = socket.recv_fds(self.socket, 65536, 4)
                self._rest, fds = self._rest + data, fds + more
            line, _, self._rest = self._rest.partition(b"\n")
            return json.loads(line), fds

        return await asyncio.to_thread(read)

    def say(self, **said: Any) -> None:
        self.socket.sendall(json.dumps(said).encode() + b"\n")


@pytest.fixture
async def other() -> AsyncIterator[Other]:
    other = Other()
    yield other
    other.link.close()
    other.socket.close()


async def test_answers_find_their_questions_in_any_order(other: Other) -> None:
    first, second = (asyncio.create_task(other.link.ask("look", number=n)) for n in (1, 2))
    asked = [(await other.asked())[0] for _ in range(2)]
    assert [(one["op"], one["number"]) for one in asked] == [("look", 1), ("look", 2)]
    other.say(id=asked[1]["id"], ok=True, n=2)
    other.say(id=asked[0]["id"], ok=True, n=1)
    assert [(await first)["n"], (await second)["n"]] == [1, 2]


async def test_a_descriptor_reaches_the_other_side_and_ours_stays_open(other: Other) -> None:
    fd = os.memfd_create("arena")
    os.write(fd, b"weights")
    task = asyncio.create_task(other.link.ask("open", fds=(fd,)))
    said, (theirs,) = await other.asked()
    assert os.pread(theirs, 10, 0) == b"weights" and os.pread(fd, 10, 0) == b"weights"
    other.say(id=said["id"], ok=True)
    await task
    os.close(theirs)
    os.close(fd)


async def test_progress_is_told_until_the_answer_comes(other: Other) -> None:
    told: list[float] = []
    task = asyncio.create_task(other.link.ask("open", on_progress=told.append))
    said, _ = await other.asked()
    other.say(id=said["id"], progress=0.25)
    other.say(id=said["id"], progress="much")
    other.say(id=said["id"], progress=1)
    other.say(id=said["id"], ok=True)
    await task
    assert told == [0.25, 1]


async def test_a_refusal_is_raised_with_its_kind(other: Other) -> None:
    task = asyncio.create_task(other.link.ask("open"))
    said, _ = await other.asked()
    other.say(id=said["id"], ok=False, kind="bad_model", message="no config.json in /m.")
    with pytest.raises(OpFailed, match=r"no config\.json") as raised:
        await task
    assert raised.value.kind == "bad_model"


async def test_waiting_and_later_calls_fail_when_the_connection_ends(other: Other) -> None:
    tasks = [asyncio.create_task(other.link.ask("wake")) for _ in range(2)]
    await other.asked()
    other.socket.close()
    for task in tasks:
        with pytest.raises(WorkerLost):
            await task
    with pytest.raises(WorkerLost):
        await other.link.ask("wake")
    assert other.ends == 1 and not other.link.is_open


async def test_our_own_close_is_no_end_that_is_told(other: Other) -> None:
    task = asyncio.create_task(other.link.ask("wake"))
    await other.asked()
    other.link.close()
    other.link.close()
    with pytest.raises(WorkerLost):
        await task
    assert other.ends == 0


async def test_an_answer_to_a_cancelled_call_is_ignored(other: Other) -> None:
    task = asyncio.create_task(other.link.ask("wake"))
    said, _ = await other.asked()
    task.cancel()
    await asyncio.wait((task,))
    other.say(id=said["id"], ok=True)
    again = asyncio.create_task(other.link.ask("sleep"))
    said, _ = await other.asked()
    other.say(id=said["id"], ok=True)
    assert (await again)["ok"] is True


@pytest.mark.parametrize("garbage", [b"nonsense\n", b"[]\n", b"{}\n", b"7\n", b"[" * 200_000 + b"\n"])
async def test_garbage_ends_the_connection(other: Other, garbage: bytes) -> None:
    task = asyncio.create_task(other.link.ask("wake"))
    await other.asked()
    await asyncio.to_thread(other.socket.sendall, garbage)
    with pytest.raises(WorkerLost):
        await task
    assert other.ends == 1


async def test_a_line_without_end_ends_the_connection(other: Other) -> None:
    task = asyncio.create_task(other.link.ask("wake"))
    await other.asked()
    await asyncio.to_thread(other.socket.sendall, b"x" * (LINE_BYTES_MAX + 1))
    with pytest.raises(WorkerLost):
        await task


async def test_a_worker_that_reads_nothing_gets_all_when_it_reads_again(other: Other) -> None:
    tasks = [asyncio.create_task(other.link.ask("look", text="x" * 40_000)) for _ in range(20)]
    await asyncio.sleep(0)
    for _ in tasks:
        said, _ = await other.asked()
        other.say(id=said["id"], ok=True)
    assert all(answer["ok"] for answer in await asyncio.gather(*tasks))


async def test_a_worker_that_never_reads_is_given_up(other: Other) -> None:
    fd = os.memfd_create("arena")
    tasks = [
        asyncio.create_task(other.link.ask("look", fds=(fd,), text="x" * 40_000))
        for _ in range(2 * UNSENT_BYTES_MAX // 40_000)
    ]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, WorkerLost) for outcome in outcomes) and other.ends == 1
    os.close(fd)


async def test_connecting_where_nothing_listens_raises_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        await connect(str(tmp_path / "nobody.sock"), lambda: None)


@pytest.mark.parametrize("odd", ["Infinity", "-Infinity", "NaN", "1e400", "1" + 400 * "0", "-5", '"5"', "null", "[]"])
def test_a_figure_that_cannot_be_counts_as_none(odd: str) -> None:
    answer = json.loads(f'{{"bytes": {odd}}}')
    assert (count(answer, "bytes"), seconds(answer, "bytes")) == (0, 0.0)


def test_figures_of_an_answer_are_read() -> None:
    assert (count({"bytes": 5.0}, "bytes"), seconds({"took": 5}, "took"), count({}, "bytes")) == (5, 5.0, 0)
