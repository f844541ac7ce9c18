"""For some seconds a busy gateway gets no thread, process, descriptor, memory or disk. Afterwards nothing is missing.

The limits are the kernel's, set on the running process from outside. It runs as a user of its own if the tests run as
root, for whom the kernel limits no processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shlex
import shutil
import sqlite3
import subprocess
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.harness import GatewayProcess, fake, gateway, gateway_process
from tests.integration.faults import dial
from tests.integration.raw import CHAT, Answer, Raw, asking, request_bytes
from tests.models import tiny
from tests.waiting import until

pytestmark = pytest.mark.slow

# A user that nobody else is: the kernel counts the processes of each. It may read and write all files as root does.
ALONE: Final = 54_321
AS_ALONE: Final = (
    *("setpriv", "--reuid", str(ALONE), "--clear-groups", "--bounding-set", "-sys_resource,-sys_admin"),
    *("--inh-caps", "-all,+dac_override", "--ambient-caps", "-all,+dac_override"),
)

# Longer than every pause between two writes but those of learned times and of the library.
SHORT_S: Final = 6.0
LONG_S: Final = 40.0

# Every part may say once what it cannot do.
TOLD_MAX: Final = 12

# The end of a gateway with nothing to wait for, on a busy machine.
ENDS_WITHIN_S: Final = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that the user of the gateway can reach."""
    with tempfile.TemporaryDirectory() as made:
        if _inside():
            os.chown(made, ALONE, ALONE)
        yield Path(made)


@contextmanager
def alone(folder: Path, models: dict[str, Any], **options: Any) -> Iterator[GatewayProcess]:
    """A gateway that shares its count of processes with no program that is needed here."""
    with gateway_process(folder, models, inside=_inside(), **options) as gate:
        yield gate


def _inside() -> Sequence[str]:
    return AS_ALONE if os.geteuid() == 0 else ()


@contextmanager
def shortage(gate: GatewayProcess, kind: str) -> Iterator[None]:
    """Nothing new of this kind, for as long as the block lasts."""
    name, most = {
        "threads": ("nproc", 1),
        "descriptors": ("nofile", 3),
        # Nothing more is mapped than there is.
        "memory": ("as", 1),
        "disk": ("fsize", 0),
    }[kind]
    before = _limited(gate, name, "").split()[-1]
    _limited(gate, name, f"={most}:")
    try:
        yield
    finally:
        if gate.process.poll() is None:
            _limited(gate, name, f"={before}:")


def _limited(gate: GatewayProcess, name: str, to: str) -> str:
    """Set this limit of the process, or ask for it. Only its own user may."""
    command = [*_inside(), "prlimit", "--pid", str(gate.process.pid), "--noheadings", f"--{name}{to}"]
    asked = [] if to else ["--output=SOFT"]
    return subprocess.run([*command, *asked], text=True, check=True, stdout=subprocess.PIPE).stdout


# --- what is asked of it --------------------------------------------------------------------------------------------


class Callers:
    """Chats, jobs and loads, one after another of each, and what became of them."""

    def __init__(self, gate: GatewayProcess) -> None:
        self._gate = gate
        self.seen: Counter[str] = Counter()
        self.jobs: list[str] = []

    async def ask(self, method: str, path: str, body: Any = None) -> Answer:
        async with await dial(self._gate.port) as raw:
            raw.send(request_bytes(method, path, None if body is None else json.dumps(body).encode()))
            return await raw.answer()

    async def tried(self, method: str, path: str, body: Any = None) -> Answer | None:
        """None if there was no whole answer: what a shortage may cost, but only while it lasts."""
        try:
            async with asyncio.timeout(20.0):
                answer = await self.ask(method, path, body)
        except (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            return None
        return answer if answer.whole else None

    async def chat(self) -> None:
        answer = await self.tried("POST", CHAT, asking("a", tokens=2))
        self.seen["none" if answer is None else str(answer.status)] += 1

    async def job(self) -> None:
        answer = await self.tried("POST", "/v1/jobs", {"route": CHAT, "body": asking("a", tokens=2)})
        if answer is not None and answer.status == 202:
            self.jobs.append(str(answer.json()["id"]))

    async def move(self) -> None:
        for path in ("load", "unload"):
            await self.tried("POST", f"/api/v1/models/b/{path}", {})

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        async def repeat(what: Any, pause_s: float) -> None:
            while True:
                await what()
                await asyncio.sleep(pause_s)

        tasks = [
            asyncio.create_task(repeat(what, pause_s))
            for what, pause_s in ((self.chat, 0.02), (self.chat, 0.05), (self.job, 0.1), (self.move, 0.2))
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def status_of(self, job: str) -> str:
        return str((await self.ask("GET", f"/v1/jobs/{job}")).json()["status"])


def started_by_a_shell(name: str) -> dict[str, Any]:
    """A model whose program that other user is seen to be able to run: a shell."""
    model = fake(name)
    words = " ".join(word if word == "${PORT}" else shlex.quote(word) for word in model["cmd"])
    return {**model, "cmd": ["/bin/sh", "-c", f"exec {words}"]}


def models() -> dict[str, Any]:
    return {name: started_by_a_shell(name) for name in ("a", "b")} | {"far": {"remote": "acme"}}


def recorded(folder: Path) -> int:
    """Answers in the recording."""
    with (folder / "activity.csv").open() as file:
        return sum(1 for _ in file) - 1


def counted(folder: Path) -> int:
    """Answers in what keys and models used."""
    with contextlib.closing(sqlite3.connect(folder / "state" / "usage.db")) as db:
        (found,) = db.execute("SELECT COALESCE(SUM(requests - refused - failed - aborted), 0) FROM usage").fetchone()
    return int(found)


def told(gate: GatewayProcess) -> list[str]:
    """Warnings and errors that no caller has asked for: loads that were ordered in vain are told to those that did."""
    entries = [json.loads(line) for line in gate.lines() if line.startswith("{")]
    return [
        f"{entry['area']}: {entry['event']} {entry.get('id', '')} {entry.get('error')} {entry.get('traceback', '')}"
        for entry in entries
        if entry["level"] in ("warning", "error") and entry["area"] != "moves"
    ]


async def everything_works(gate: GatewayProcess, callers: Callers, folder: Path) -> None:
    answer = await callers.ask("POST", CHAT, asking("b", tokens=1))
    assert answer.status == 200, answer.body
    for id in callers.jobs:

        async def is_over(id: str = id) -> bool:
            return await callers.status_of(id) in ("done", "failed")

        await until(is_over, f"{id} is over")
    job, answers = len(callers.jobs), (recorded(folder), counted(folder))
    await callers.job()
    await callers.chat()
    await until(lambda: recorded(folder) >= answers[0] + 2, "recordings go on")
    await until(lambda: counted(folder) >= answers[1] + 2, "usage goes on")
    await until(partial(_is_done, callers, callers.jobs[job]), "a new job is done")

    async def is_found() -> bool:
        return "fresh" in (await callers.ask("GET", "/v1/models/inventory")).body.decode()

    shutil.copyfile(tiny("alpha"), folder / "library" / "fresh.gguf")
    await until(is_found, "the library finds what is new")


async def _is_done(callers: Callers, job: str) -> bool:
    return await callers.status_of(job) == "done"


def options(folder: Path) -> dict[str, Any]:
    (folder / "library").mkdir(mode=0o755)
    return {
        "server": {"record_activity": str(folder / "activity.csv")},
        "library": {"roots": [str(folder / "library")]},
        # Nothing answers there. Its name must be looked up.
        "remotes": {"acme": {"base_url": "http://localhost:9/v1", "retries_max": 0}},
    }


@pytest.mark.parametrize(
    ("kind", "for_s"),
    [("threads", 1.0), ("threads", LONG_S), ("descriptors", SHORT_S), ("memory", SHORT_S), ("disk", LONG_S / 2)],
)
async def test_a_shortage_costs_nothing_that_is_not_of_its_time(folder: Path, kind: str, for_s: float) -> None:
    with alone(folder, models(), **options(folder)) as gate:
        callers = Callers(gate)
        async with callers.at_work():
            await until(lambda: callers.seen["200"] > 20, "it serves")
            assert (await callers.ask("POST", "/api/v1/models/far/load", {})).status == 200
            with shortage(gate, kind):
                await callers.tried("POST", CHAT, asking("far"))
                await asyncio.sleep(for_s)
            assert gate.process.poll() is None, "it is alive"
            before = callers.seen["200"]
            await until(lambda: callers.seen["200"] > before + 20, "it serves on")
        await everything_works(gate, callers, folder)
        assert gate.stop(ENDS_WITHIN_S) == 0
        said = told(gate)
    assert counted(folder) == recorded(folder) >= callers.seen["200"]
    assert len(said) == len(set(said)) <= TOLD_MAX and "Traceback" not in "".join(said), said


@pytest.mark.parametrize("kinds", [("threads", "disk"), ("descriptors",)])
async def test_a_stop_ends_while_nothing_can_be_started_or_written(folder: Path, kinds: Sequence[str]) -> None:
    with alone(folder, models(), **options(folder)) as gate:
        callers = Callers(gate)
        async with callers.at_work():
            await until(lambda: callers.seen["200"] > 20, "it serves")
            with contextlib.ExitStack() as short:
                for kind in kinds:
                    short.enter_context(shortage(gate, kind))
                # As long as the writers of usage take to notice.
                await asyncio.sleep(SHORT_S)
                assert gate.stop(ENDS_WITHIN_S) == 0


REQUESTS = 100


async def test_answered_requests_leave_nothing_to_the_collector(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}) as app, await Raw.open(app) as raw:
        for stream in (False, True):
            body = json.dumps(asking("a", stream=stream)).encode()
            asked = request_bytes("POST", "/v1/chat/completions", body)
            for _ in range(5):
                raw.send(asked)
                assert (await raw.answer()).status == 200
            gc.collect()
            gc.disable()
            try:
                for _ in range(REQUESTS):
                    raw.send(asked)
                    await raw.answer()
                found = gc.collect()
            finally:
                gc.enable()
            # A cycle a request would be hundreds of objects; what tests and loop leave behind is a handful.
            assert found < REQUESTS / 2, f"{found} objects in cycles after {REQUESTS} requests, stream={stream}"
