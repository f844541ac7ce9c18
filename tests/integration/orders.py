"""A gateway as its operator sees it: what it says of a model, orders, and waiting for what it will say."""

from __future__ import annotations

from typing import Any

from greenroom.app import App
from tests.integration.raw import Answer, http


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
