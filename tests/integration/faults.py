"""What the fault tests share: a model made ready, a process made to stand still, a stream read up to the fault."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

from greenroom.app import App
from greenroom.process import proc
from tests.integration.facts import pids
from tests.integration.raw import LIMIT_BYTES, Answer, Raw, chat
from tests.waiting import PATIENCE_S

ENDLESS = 10**9


async def loaded(app: App, model: str) -> int:
    """Have the model ready; its engine's pid."""
    answer = await chat(app, model, tokens=1, max_tokens=1)
    assert answer.status == 200, answer.body
    return pids(app, model)[0]


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it stands still."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline


async def first_events(raw: Raw, count: int) -> bytes:
    """Read a stream until it has brought this many events."""
    status, _ = await raw.head()
    assert status == 200
    seen = b""
    while seen.count(b"\n\n") < count:
        chunk = await raw.chunk()
        assert chunk, f"the stream ended early: {seen!r}"
        seen += chunk
    return seen


async def rest_of(raw: Raw) -> Answer:
    """What comes after, to the end of the answer."""
    body = b""
    while chunk := await raw.chunk():
        body += chunk
    return Answer(200, {"content-type": "text/event-stream"}, body, whole=chunk is not None)


def assert_ended_by(rest: Answer, code: str, status: int) -> None:
    """One error event at the end of a stream, which is otherwise in order, and no [DONE]."""
    assert rest.whole
    error = rest.data[-1]["error"]
    assert (error["code"], error["status"]) == (code, status)
    assert "[DONE]" not in rest.data
    assert all("error" not in event for event in rest.data[:-1])


def is_alive(pid: int) -> bool:
    seen = proc.stat(pid)
    return seen is not None and not seen.is_dead


def keeper_of(pid: int) -> int:
    seen = proc.stat(pid)
    assert seen is not None
    return seen.parent


async def dial(port: int) -> Raw:
    """A connection to a gateway in another process."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setblocking(False)
    return Raw(sock, *await asyncio.open_connection(sock=sock, limit=LIMIT_BYTES))
