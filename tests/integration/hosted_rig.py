"""Models that fake workers host, for tests of what goes well and wrong with them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind, Tier
from greenroom.runtime.timeouts import Timeouts, WorkerTimeouts
from tests.waiting import until

FAKE_WORKER = Path(__file__).parent.parent / "standins" / "fake_worker.py"


# In place of the Python of a model: runs the fake worker instead of the program that it is given.
PYTHON = f"""#!/bin/sh
shift
exec {sys.executable} -I -S {FAKE_WORKER} "$@"
"""


@pytest.fixture
def nothing_left() -> Iterator[None]:
    yield
    assert not arenas(), "memory of arenas was left behind"


def worker_timeouts(**seconds: float) -> Timeouts:
    """These, and a spare that comes at once where there is to be one."""
    return Timeouts(workers=WorkerTimeouts(**{"spare_after_s": 0.0, **seconds}))


def arenas() -> list[str]:
    """Arenas that this process holds."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return [link for link in links if "memfd:greenroom-s" in link]


class Folder:
    """A model's folder: how its worker behaves, and what it did."""

    def __init__(self, base: Path, name: str, **conduct: Any) -> None:
        self.path = base / f"{name}.model"
        self.path.mkdir()
        self._python = base / "fake-python"
        self._python.write_text(PYTHON)
        self._python.chmod(0o755)
        self.behave(**conduct)

    def behave(self, **conduct: Any) -> None:
        draft = self.path / ".fake"
        draft.write_text(json.dumps(conduct))
        draft.replace(self.path / "fake.json")

    def model(self, **keys: Any) -> dict[str, Any]:
        python = str(self._python)
        return {"path": str(self.path), "engine": "transformers", "python": python, "memory_mib": 100, **keys}

    def lines(self, *events: str) -> list[dict[str, Any]]:
        journal = self.path / "journal"
        if not journal.exists():
            return []
        lines = [json.loads(line) for line in journal.read_text().rpartition("\n")[0].splitlines()]
        return [line for line in lines if not events or line["event"] in events]

    def events(self) -> list[str]:
        return [line["event"] for line in self.lines()]


def tier(app: App, model: str) -> Tier:
    slots = app.loop.scheduler.state.slots_of(ModelId(model))
    return slots[0].tier if slots else Tier.COLD


async def until_in(app: App, model: str, wanted: Tier) -> None:
    await until(lambda: tier(app, model) is wanted and not app.mover.moving, f"{model} is {wanted.value}")


async def move(app: App, kind: MoveKind, model: str) -> None:
    await app.operations.move(kind, ModelId(model))


def worker_of(app: App, model: str) -> int:
    """The pid of the process in which this model lives."""
    (slot,) = [slot for slot in app.hosted_slots.there.values() if slot.entry.id == model]
    assert slot.worker is not None
    return slot.worker.pid
