"""The source files that a request runs through, found by watching the interpreter.

    python -m tests.integration.request_way      writes the lists in docs/design/request.md

Only calls that the request causes count: tasks that ran before it, and the edge's periodic sweep, are left out.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import uvloop

from greenroom.app import App
from greenroom.http.edge import Edge
from tests.harness import fake, gateway, until
from tests.integration.raw import Raw, asking, http

ROOT = Path(__file__).resolve().parents[2]
SOURCE = f"{ROOT / 'src' / 'greenroom'}/"
PAGE = ROOT / "docs" / "design" / "request.md"
# No heartbeat on a slow machine: it would add files to the way.
PATIENT = {"heartbeat_after_s": 600}

Ways = dict[str, list[str]]


class Tracer:
    """Notes the files below src/greenroom in order of their first call, in all threads, while `files` is a list."""

    def __init__(self) -> None:
        self.files: dict[str, None] | None = None
        self._background: set[CodeType] = set()

    @contextmanager
    def watching(self) -> Iterator[dict[str, None]]:
        """Begin with the next call. What runs already is background."""
        tasks = asyncio.all_tasks()
        coroutines = [task.get_coro() for task in tasks if task is not asyncio.current_task()]
        self._background = {found.cr_code for found in coroutines if hasattr(found, "cr_code")}
        self._background.add(Edge._sweep.__code__)
        self.files = files = {}
        try:
            yield files
        finally:
            self.files = None

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        files = self.files
        if files is None or event != "call":
            return
        name = frame.f_code.co_filename
        if name.startswith(SOURCE) and name[len(SOURCE) :] not in files and not self._is_background(frame):
            files[name[len(SOURCE) :]] = None

    def _is_background(self, frame: FrameType) -> bool:
        found: FrameType | None = frame
        while found is not None:
            if found.f_code in self._background:
                return True
            found = found.f_back
        return False


async def ways(folder: Path) -> Ways:
    """The files of a cold streaming request, of ready requests, and of a lease. Each in order of first call."""
    tracer = Tracer()
    # Before the gateway starts its threads.
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        async with gateway(folder, {"alpha": fake("alpha")}, server=PATIENT) as app:
            return {
                "cold": await _streamed(tracer, app),
                "ready": await _ready(tracer, app),
                "lease": await _leased(tracer, app),
            }
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


async def _streamed(tracer: Tracer, app: App) -> list[str]:
    async with await Raw.open(app) as raw:
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
    async with await Raw.open(app) as raw:
        with tracer.watching() as files:
            raw.ask(asking("alpha"))
            status, headers = await raw.head()
            await raw.rest(status, headers)
    assert status == 200
    return list(dict.fromkeys([*streamed, *files]))


async def _leased(tracer: Tracer, app: App) -> list[str]:
    wanted = b'{"name": "training", "mib": 100, "ttl_s": 3600}'
    with tracer.watching() as files:
        answer = await http(app, "POST", "/api/v1/leases", body=wanted, headers={"Content-Type": "application/json"})
    assert answer.status in (200, 201), answer.body
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
    lines = [f"{len(files)} files:", ""]
    lines += [f"{number}. `{file}`" for number, file in enumerate(files, 1)]
    return "\n".join(lines) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen: Any = runner.run(ways(Path(folder)))
    PAGE.write_text(rewritten(PAGE.read_text(), {name: seen[name] for name in ("cold", "lease")}))
    for name, files in seen.items():
        sys.stdout.write(f"--- {name}: {len(files)}\n" + "\n".join(files) + "\n")


if __name__ == "__main__":
    main()
