"""A model is pinned while the gateway runs: nothing evicts it until it is let go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from greenroom.app import App
from tests.harness import fake, gateway
from tests.integration.raw import Answer, chat, http

ONE_AT_A_TIME: dict[str, Any] = {"gpus": [{"memory_mib": 1_000, "margin_mib": 0}]}
MODELS: dict[str, Any] = {"a": fake("a", memory_mib=900), "b": fake("b", memory_mib=900)}


async def _pin(app: App, model: str, body: dict[str, Any] | None = None) -> Answer:
    return await http(app, "POST", f"/api/v1/models/{model}/pin", body)


async def _shown(app: App, model: str) -> tuple[bool, str]:
    seen = (await http(app, "GET", f"/api/v1/models/{model}")).json()
    return seen["pinned"], seen["tier"]


async def test_nothing_evicts_a_model_that_was_pinned(tmp_path: Path) -> None:
    async with gateway(tmp_path, MODELS, **ONE_AT_A_TIME) as app:
        assert (await chat(app, "a")).status == 200
        said = await _pin(app, "a")
        assert (said.status, said.json()) == (200, {"model": "a", "pinned": True})
        assert await _shown(app, "a") == (True, "ready")
        refused = await chat(app, "b")
        assert (refused.status, refused.error["code"]) == (503, "model_too_large")
        # A reload that changes nothing about it keeps it pinned.
        await app.reload()
        assert await _shown(app, "a") == (True, "ready")
        assert (await _pin(app, "a", {"pinned": False})).json()["pinned"] is False
        assert (await chat(app, "b")).status == 200
        assert await _shown(app, "a") == (False, "cold")


async def test_only_models_that_there_are_can_be_pinned(tmp_path: Path) -> None:
    async with gateway(tmp_path, MODELS, **ONE_AT_A_TIME) as app:
        assert (await _pin(app, "none")).status == 404
        assert (await _pin(app, "a", {"pinned": "perhaps"})).status == 400
        assert await _shown(app, "a") == (False, "cold")
