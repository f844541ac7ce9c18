"""The source files that a request runs through, found by watching the interpreter.

    python -m tests.integration.requests.request_way      writes the lists in docs/design/request.md

Only calls that the request's bytes cause count: what the gateway does by itself meanwhile is left out.
"""

from __future__ import annotations

import _thread
import asyncio
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import uvloop

from greenroom.app import App
from greenroom.http.client import ClientConnection
from greenroom.http.engine_connection import Connection as EngineConnection
from tests.harness import fake, gateway
from tests.integration.raw import Raw, asking, request_bytes
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SOURCE = f"{ROOT / 'src' / 'greenroom'}/"
PAGE = ROOT / "docs" / "design" / "request.md"
# No heartbeat on a slow machine: it would add files to the way.
PATIENT = {"heartbeat_after_s": 600}

Ways = dict[str, list[str]]


# Where bytes come in. What such a call causes belongs to the trace: calls, callbacks and tasks inherit its context.
ENTRIES = (ClientConnection.data_received, EngineConnection.data_received)
_cause: ContextVar[int] = ContextVar("cause", default=0)


class Tracer:
    """Notes files below src/greenroom in order of their first call, in all threads."""

    def __init__(self) -> None:
        self._files: dict[str, None] | None = None
        self._entries = {entry.__code__ for entry in ENTRIES}
        self._number = 0

    @contextmanager
    def watching(self) -> Iterator[dict[str, None]]:
        """Note what the bytes that come in from now on cause."""
        self._number += 1
        self._files = files = {}
        try:
            yield files
        finally:
            self._files = None

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if self._files is None or event != "call":
            return
        code = frame.f_code
        if code in self._entries:
            _cause.set(self._number)
        if _cause.get() != self._number:
            return
        if code.co_filename.startswith(SOURCE):
            self._files.setdefault(code.co_filename[len(SOURCE) :])


async def ways(folder: Path) -> Ways:
    """The files of a cold streaming request, of ready requests, and of a lease. Each in order of first call."""
    tracer = Tracer()
    # Before the gateway starts its threads.
    sys.setprofile(tracer)
    begin = _thread.start_new_thread

    def begin_traced(run: Callable[[], None], args: tuple[()]) -> int:
        cause = _cause.get()

        def traced() -> None:
            _cause.set(cause)
            sys.setprofile(tracer)
            run()

        return begin(traced, args)

    try:
        _thread.start_new_thread = begin_traced
        async with gateway(folder, {"alpha": fake("alpha")}, server=PATIENT) as app:
            return {
                "cold": await _streamed(tracer, app),
                "ready": await _ready(tracer, app),
                "lease": await _leased(tracer, app),
            }
    finally:
        sys.setprofile(None)
        _thread.start_new_thread = begin


async def _streamed(tracer: Tracer, app: App) -> list[str]:
    async with await _connected(app) as raw:
        with tracer.watching() as files:
            raw.ask(asking("alpha", stream=True))
            status, headers = await raw.head()
            answer = await raw.rest(status, headers)
            await until(lambda: not app.inference.running, "the request was written down")
        assert answer.data[-1] == "[DONE]"
        return list(files)


async def _ready(tracer: Tracer, app: App) -> list[str]:
    """One streamed and one whole answer."""
    streamed = await _streamed(tracer, app)
    async with await _connected(app) as raw:
        with tracer.watching() as files:
            raw.ask(asking("alpha"))
            status, headers = await raw.head()
            await raw.rest(status, headers)
    assert status == 200
    return list(dict.fromkeys([*streamed, *files]))


async def _connected(app: App) -> Raw:
    """A connection that the gateway has accepted: the way begins with the first byte."""
    before = app.edge.stats.accepted
    raw = await Raw.open(app)
    await until(lambda: app.edge.stats.accepted > before, "the connection is accepted")
    return raw


async def _leased(tracer: Tracer, app: App) -> list[str]:
    wanted = b'{"name": "training", "mib": 100, "ttl_s": 3600}'
    async with await _connected(app) as raw:
        with tracer.watching() as files:
            raw.send(request_bytes("POST", "/api/v1/leases", wanted, {"Content-Type": "application/json"}))
            status, headers = await raw.head()
            answer = await raw.rest(status, headers)
    assert status in (200, 201), answer.body
    return list(files)


# --- the page -------------------------------------------------------------------------------------------------------


def listed(page: str) -> dict[str, set[str]]:
    """The files that the page lists, by the name of the list."""
    lists = re.findall(r"<!-- files: (\w+) -->\n(.*?)<!-- end -->", page, re.DOTALL)
    return {name: set(re.findall(r"`([\w/]+\.py)`", text)) for name, text in lists}


def rewritten(page: str, seen: Ways) -> str:
    """The page with these lists."""
    for name, files in seen.items():
        text = _rendered(files)
        pattern = rf"(<!-- files: {name} -->\n).*?(<!-- end -->)"
        page = re.sub(pattern, lambda found, text=text: found[1] + text + found[2], page, flags=re.DOTALL)  # type: ignore[misc]
    return page


def _rendered(files: list[str]) -> str:
    """Their number, then all of them as one paragraph."""
    arrows = " → ".join(f"`{file}`" for file in files)
    return (
        f"{len(files)} files:\n\n" + textwrap.fill(arrows, 120, break_long_words=False, break_on_hyphens=False) + "\n\n"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen: Any = runner.run(ways(Path(folder)))
    PAGE.write_text(rewritten(PAGE.read_text(), {name: seen[name] for name in ("cold", "lease")}))
    for name, files in seen.items():
        sys.stdout.write(f"--- {name}: {len(files)}\n" + "\n".join(files) + "\n")


if __name__ == "__main__":
    main()
