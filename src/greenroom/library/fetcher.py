"""The program that fetches, seen from the process that starts it: an order in, reports out.

Owns one child process. It gets our environment, because HF_TOKEN, HF_ENDPOINT and proxies are there, and holds a pipe
from us: when that closes, even because we were killed, it ends. What it has fetched is resumed by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

import msgspec

from greenroom.library.orders import DownloadOrder, FetchPlace
from greenroom.library.records import Source

_LAUNCH: Final = Path(__file__).parent.parent / "workers" / "launch.py"
# Of one report: a plan names every file.
LINE_BYTES_MAX: Final = 16 * 1024 * 1024
# Of what it prints besides reports.
TAIL_BYTES: Final = 4096


class PlannedFile(msgspec.Struct, frozen=True):
    path: str
    bytes: int | None = None
    sha256: str | None = None


class FetchPlan(msgspec.Struct, frozen=True, tag="plan", tag_field="event"):
    """What will be fetched. Without a repository it is one file of unknown size."""

    files: list[PlannedFile]
    repo: str | None = None
    commit: str | None = None


class FetchProgress(msgspec.Struct, frozen=True, tag="progress", tag_field="event"):
    """Bytes of files that have changed since the last report. `waiting`: another process fetches the same."""

    files: dict[str, int]
    waiting: bool = False


class Done(msgspec.Struct, frozen=True, tag="done", tag_field="event"):
    path: str


class Failed(msgspec.Struct, frozen=True, tag="error", tag_field="event"):
    code: str
    message: str


class Trouble(msgspec.Struct, frozen=True, tag="trouble", tag_field="event"):
    """Something failed, and is tried again after so long."""

    message: str
    wait_s: float


Report = FetchPlan | FetchProgress | Trouble | Done | Failed
_report: Final = msgspec.json.Decoder(Report)


def fetched_files(
    order: DownloadOrder, plan: FetchPlan | None, done: Done
) -> tuple[dict[str, tuple[int | None, str | None]], Source]:
    """Size and sha256 of the files of a download by their paths, as far as they were told, and where they came from."""
    folder = _folder_of(plan, done)
    told = {os.path.join(folder, file.path): (file.bytes, file.sha256) for file in (plan.files if plan else ())}
    if plan is not None and plan.repo is not None:
        return told, Source(plan.repo, plan.commit)
    # What follows a question mark may be a secret.
    return told, Source(url=None if order.url is None else order.url.partition("?")[0])


def fetched_paths(plan: FetchPlan | None, done: Done) -> set[str]:
    """The files of a download and their folders: the path of each model in it is among them."""
    folder = _folder_of(plan, done)
    files = {os.path.join(folder, file.path) for file in (plan.files if plan else ())}
    return {done.path, *files, *map(os.path.dirname, files)}


def _folder_of(plan: FetchPlan | None, done: Done) -> str:
    """Of a single file the path is that of the file itself."""
    return done.path.removesuffix(f"/{plan.files[0].path}") if plan and len(plan.files) == 1 else done.path


def encode(order: DownloadOrder, place: FetchPlace, rate_bytes_s: float | None) -> bytes:
    """The order as the program reads it."""
    said = {**asdict(order), **asdict(place), "rate_bytes_s": rate_bytes_s}
    # As the caller wrote it; the place is what it has become.
    del said["destination"]
    return json.dumps(said).encode() + b"\n"


class FetchProcess:
    """A running fetch. Made by `start_fetch`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._errors = asyncio.get_running_loop().create_task(_tail(process.stderr))

    async def reports(self) -> AsyncIterator[Report]:
        """Until it ends. `Done` or `Failed` is the last; if neither comes, the process was lost."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            with contextlib.suppress(msgspec.MsgspecError):
                yield _report.decode(line)

    def set_rate(self, bytes_s: float | None) -> None:
        """From now on, if it still runs."""
        self.say(json.dumps(bytes_s).encode() + b"\n")

    def say(self, line: bytes) -> None:
        """A line of its input. Does nothing if it has ended, which its reports tell."""
        assert self._process.stdin is not None
        # A transport whose process is gone raises this.
        with contextlib.suppress(RuntimeError, OSError):
            self._process.stdin.write(line)

    def stop(self) -> None:
        """At once: parts can be resumed at any point. May be called again."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> str:
        """End it, wait for its end, and return the last of what it printed."""
        self.stop()
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        return await self._errors


async def start_fetch(order: DownloadOrder, place: FetchPlace, rate_bytes_s: float | None) -> FetchProcess:
    """Raises OSError."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(_LAUNCH),
        "fetching.main",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
    )
    fetch = FetchProcess(process)
    fetch.say(encode(order, place, rate_bytes_s))
    return fetch


async def _tail(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    last = b""
    while piece := await stream.read(TAIL_BYTES):
        last = (last + piece)[-TAIL_BYTES:]
    return last.decode("utf-8", "replace")
