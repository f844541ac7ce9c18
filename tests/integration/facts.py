"""What tests look at besides answers: the gateway's own counters, and what fake engines wrote down."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from greenroom.app import App
from greenroom.core.model import ModelId
from tests.integration.raw import Answer, http
from tests.waiting import until

# How loads, jobs, downloads and updates end.
OVER = ("completed", "done", "failed", "cancelled")


def counters(app: App) -> dict[str, int]:
    """Everything that must be zero when no request is there."""
    state = app.loop.scheduler.state
    return {
        "grants": len(state.grants),
        "in flight": sum(len(slot.in_flight) for slot in state.slots.values()),
        "waiting": len(list(state.waitlist)),
        "tickets": len(app.tickets.open),
        "watched": len(app.inference.sweep),
        "running": app.inference.running,
        "live": len(app.activity),
        "body bytes": app.edge.bodies.memory_bytes,
        "spool bytes": app.edge.bodies.spool_bytes,
    }


async def at_rest(app: App, within_s: float = 60.0) -> None:
    await until(lambda: not any(counters(app).values()), f"counters at zero: {counters(app)}", within_s)


async def over(app: App, path: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What is shown at this path of a load, job, download or update, once it has ended."""
    seen: dict[str, Any] = {}

    async def has_ended() -> bool:
        answer = await http(app, "GET", path, headers=headers)
        assert answer.status == 200, answer.body
        seen.update(answer.json())
        return seen["status"] in OVER

    await until(has_ended, lambda: f"{path} has ended: {seen}")
    return seen


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the configuration file of a gateway."""
    path = folder / "greenroom.yaml"
    said = yaml.safe_load(path.read_text())
    change(said)
    path.write_text(yaml.safe_dump(said))


def pids(app: App, model: str) -> list[int]:
    """The engines of a model that live now."""
    return [live.child.pid for live in app.slots.live.values() if live.entry.id == model]


def is_ready(app: App, model: str) -> bool:
    return any(slot.is_serving for slot in app.loop.scheduler.state.slots_of(ModelId(model)))


def is_loading(app: App, model: str) -> bool:
    slots = app.loop.scheduler.state.slots_of(ModelId(model))
    return any(slot.is_arriving and slot.move is not None for slot in slots)


class Journal:
    """What fake engines wrote down, as a list of lines."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal"

    @property
    def switches(self) -> tuple[str, str]:
        return "--journal", str(self.path)

    def lines(self, *events: str, **facts: Any) -> list[dict[str, Any]]:
        """The lines of these events (all when none is named) in which these facts hold."""
        if not self.path.exists():
            return []
        # The last line may be half written.
        whole = self.path.read_text().rpartition("\n")[0]
        lines = [json.loads(line) for line in whole.splitlines()]
        return [
            line
            for line in lines
            if (not events or line["event"] in events) and all(line.get(name) == value for name, value in facts.items())
        ]

    def count(self, *events: str, **facts: Any) -> int:
        return len(self.lines(*events, **facts))


# --- what its operator sees and orders --------------------------------------------------------------------------------


async def view(app: App, model: str) -> dict[str, Any]:
    answer = await http(app, "GET", f"/api/v1/models/{model}")
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


async def pid_of(app: App, model: str) -> int:
    pid = (await view(app, model))["pid"]
    assert isinstance(pid, int), f"{model} has no process"
    return pid


async def order(app: App, move: str, model: str, **more: Any) -> Answer:
    """load, unload, sleep or prepare a model."""
    return await http(app, "POST", f"/api/v1/models/{model}/{move}", more)
