"""Bodies and headers that are too large, too slow or too many: refused in time, and nothing of them is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.http.limits import KIB, MIB
from tests.harness import fake, gateway
from tests.integration.facts import at_rest
from tests.integration.faults import loaded
from tests.integration.raw import CHAT, Answer, Raw, asking, chat, http, request_bytes
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow


def head(length: int | None) -> bytes:
    """The head of a chat request with a body of this length, or a chunked one."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing}\r\n\r\n".encode()


def padded(size: int) -> bytes:
    """A chat request's body of about this many bytes."""
    return json.dumps(asking("alpha", padding="x" * size)).encode()


def assert_refused(answer: Answer, status: int, code: str) -> None:
    assert (answer.status, answer.error["code"]) == (status, code)


async def still_serves(app: App) -> None:
    assert (await chat(app, "alpha")).status == 200
    await at_rest(app)


# --- too large ------------------------------------------------------------------------------------------------------


async def test_ten_gigabytes_are_refused_when_they_are_announced(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha")}) as app:
        async with await Raw.open(app) as raw:
            raw.send(head(10 * 1024 * MIB))
            assert_refused(await raw.answer(), 413, "body_too_large")
            assert app.edge.bodies.memory_bytes == app.edge.bodies.spool_bytes == 0
        await still_serves(app)


async def test_endless_chunked_body_is_refused_at_the_limit(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha")}, server={"body_max_mib": 2}) as app:
        async with await Raw.open(app) as raw:
            raw.send(head(None))
            piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
            answering = asyncio.create_task(raw.answer())
            sent = most = 0
            while not answering.done() and sent < 1024 * MIB:
                raw.send(piece)
                sent += len(piece)
                await raw.writer.drain()
                await asyncio.sleep(0)
                most = max(most, app.edge.bodies.memory_bytes + app.edge.bodies.spool_bytes)
            assert_refused(await answering, 413, "body_too_large")
            # What it had sent by then was held, and not a byte more than allowed.
            assert MIB < most <= 2 * MIB + 2 * len(piece)
        await still_serves(app)


# --- too slow -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1000, None], ids=["announced", "chunked"])
async def test_slow_body_is_refused_at_its_deadline(tmp_path: Path, length: int | None) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha")}, server={"body_timeout_s": 1}) as app:
        async with await Raw.open(app) as raw:
            began = time.monotonic()
            raw.send(head(length))
            answering = asyncio.create_task(raw.answer())
            while not answering.done():
                raw.send(b" " if length else b"1\r\n \r\n")
                await asyncio.sleep(0.05)
            assert_refused(await answering, 408, "request_timeout")
            # The deadline is looked at twice a second.
            assert time.monotonic() - began > 0.9
        assert app.edge.stats.body_timeouts == 1
        await still_serves(app)


async def test_body_within_the_lowest_rate_may_take_longer_than_the_timeout(tmp_path: Path) -> None:
    body = padded(40 * KIB)
    async with (
        gateway(tmp_path, {"alpha": fake("alpha")}, server={"body_timeout_s": 0.5, "body_rate_min_kib_s": 1}) as app,
        await Raw.open(app) as raw,
    ):
        raw.send(head(len(body)) + body[: 30 * KIB])
        await asyncio.sleep(1.5)
        raw.send(body[30 * KIB :])
        assert (await raw.answer()).status == 200


async def test_two_hundred_slow_headers_delay_no_request_and_end_at_their_deadline(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha")}, server={"header_timeout_s": 2}) as app:
        await loaded(app, "alpha")
        slow = [await Raw.open(app) for _ in range(200)]
        for raw in slow:
            raw.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: local")
        await until(lambda: app.edge.connections >= 200, "all of them are here")
        began = time.monotonic()
        for _ in range(20):
            assert (await chat(app, "alpha")).status == 200
        assert time.monotonic() - began < PATIENCE_S / 2
        answers = await asyncio.gather(*(raw.answer() for raw in slow))
        assert {answer.status for answer in answers} == {408}
        for raw in slow:
            raw.leave()
        assert app.edge.stats.header_timeouts == 200
        await until(lambda: app.edge.connections == 0, "their connections are gone")
        await still_serves(app)


# --- too many -------------------------------------------------------------------------------------------------------


async def test_bodies_that_together_pass_the_budget_are_refused_until_it_is_free_again(tmp_path: Path) -> None:
    part = padded(250 * KIB)[: 200 * KIB]
    async with gateway(tmp_path, {"alpha": fake("alpha")}, server={"bodies_memory_mib": 1}) as app:
        await loaded(app, "alpha")
        holders = [await Raw.open(app) for _ in range(5)]
        for raw in holders:
            raw.send(head(250 * KIB) + part)
        await until(lambda: app.edge.bodies.memory_bytes == 5 * len(part), "five bodies are held")
        refused = await http(app, "POST", CHAT, body=padded(100 * KIB))
        assert_refused(refused, 503, "bodies_full")
        assert int(refused.headers["retry-after"]) >= 1
        # Small ones still fit; and when the others leave, so do large ones.
        assert (await chat(app, "alpha")).status == 200
        for raw in holders:
            raw.leave("RST")
        await until(lambda: app.edge.bodies.memory_bytes == 0, "their budget is back")
        assert (await http(app, "POST", CHAT, body=padded(100 * KIB))).status == 200


async def test_spooled_bodies_that_together_pass_their_budget_are_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha")}, server={"bodies_spool_mib": 1}) as app:
        assert (await http(app, "POST", CHAT, body=padded(900 * KIB))).status == 200
        refused = await http(app, "POST", CHAT, body=padded(1200 * KIB))
        assert_refused(refused, 503, "bodies_full")
        await still_serves(app)


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """As on a disk with so much left: a write beyond it fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("fault", ["full", "not there"])
async def test_spool_that_cannot_be_written_refuses_large_bodies_and_leaks_nothing(tmp_path: Path, fault: str) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha")}) as app:
        await loaded(app, "alpha")
        fds = len(os.listdir("/proc/self/fd"))
        if fault == "not there":
            app.edge.bodies.spool_dir = str(tmp_path / "gone")
        with files_up_to(600 * KIB if fault == "full" else resource.RLIM_INFINITY):
            for _ in range(5):
                refused = await http(app, "POST", CHAT, body=padded(900 * KIB))
                assert_refused(refused, 503, "bodies_full")
                assert int(refused.headers["retry-after"]) >= 1
            # Small bodies need no spool.
            assert (await chat(app, "alpha")).status == 200
        await at_rest(app)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= fds, "every spool file is closed")
        app.edge.bodies.spool_dir = str(tmp_path)
        assert (await http(app, "POST", CHAT, body=padded(900 * KIB))).status == 200


async def test_many_large_bodies_at_once_stay_within_their_budgets(tmp_path: Path) -> None:
    """Every one is either served whole or refused, and the memory held never passes what was allowed."""
    limits: dict[str, Any] = {"bodies_memory_mib": 1, "bodies_spool_mib": 4}
    async with gateway(tmp_path, {"alpha": fake("alpha", "--token-s", "0.02", concurrency=2)}, server=limits) as app:
        await loaded(app, "alpha")
        bodies = app.edge.bodies
        asked = [asyncio.create_task(http(app, "POST", CHAT, body=padded(size * KIB))) for size in (50, 150, 700) * 10]
        while not all(task.done() for task in asked):
            assert bodies.memory_bytes <= MIB and bodies.spool_bytes <= 4 * MIB
            await asyncio.sleep(0.005)
        answers = [task.result() for task in asked]
        assert {answer.status for answer in answers} <= {200, 503}
        assert any(answer.status == 200 for answer in answers)
        assert all(answer.error["code"] == "bodies_full" for answer in answers if answer.status == 503)
        await still_serves(app)


async def test_request_cut_within_its_body_leaves_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha")}) as app:
        whole = request_bytes("POST", CHAT, padded(900 * KIB))
        for size in (len(whole) // 100, len(whole) // 2, len(whole) - 1):
            for how in ("FIN", "RST"):
                async with await Raw.open(app) as raw:
                    raw.send(whole[:size])
                    await raw.writer.drain()
                    await until(lambda: app.edge.bodies.memory_bytes + app.edge.bodies.spool_bytes, "it is held")
                    raw.leave(how)
                await until(lambda: not app.edge.bodies.memory_bytes + app.edge.bodies.spool_bytes, "and given back")
        assert app.edge.stats.requests == 0
        await still_serves(app)


async def test_large_bodies_are_kept_in_the_state_directory_and_have_no_name(tmp_path: Path) -> None:
    """Temporary folders often lie in memory, which would not have been counted."""
    async with gateway(tmp_path, {"m": fake("m")}) as app:
        reader, writer = await asyncio.open_connection(*app.edge.addresses[0].split(":"))
        body = b'{"model": "m", "prompt": "' + b"x" * 1_000_000
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body) + 2}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: app.edge.bodies.spool_bytes >= len(body), "all but its end has come")
        (spooled,) = [link for link in open_files() if link.startswith(f"{tmp_path}/state/") and "deleted" in link]
        assert os.path.dirname(spooled) == f"{tmp_path}/state"
        assert not [name for name in os.listdir(tmp_path / "state") if "body" in name]
        writer.write(b'"}')
        assert b" 200 " in await reader.readline()
        writer.close()
        await until(lambda: not app.edge.bodies.spool_bytes, "it is given back")


def open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found
