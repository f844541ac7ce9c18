"""A gateway for the packages that users ask with: real models on llama.cpp, and engines that do as they are told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import fake, gateway, tiny
from tests.integration.facts import Journal
from tests.models import tiny as tiny_model
from tests.models import tiny_caller, tiny_embedding, tiny_projector

HELLO: Any = [{"role": "user", "content": "hi"}]
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
SCHEMA: Any = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
# What Codex is told to call, and llama calls by itself.
EDIT = {"cmd": "sed -i s/1/2/ a.py"}
LISTED = {"alpha", "org/bravo", "counts", "sees", "bag", "llama", "told", "dies", "stalls", "broken", "idle", "slow"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory, journal: Journal) -> AsyncIterator[App]:
    models = {
        "alpha": tiny(tiny_model("alpha"), aliases=["gpt-4o", "claude-sonnet-5", "llama3"]),
        "org/bravo": tiny(tiny_model("bravo"), description="the second"),
        "counts": tiny(tiny_model("counts", loop=True), ctx_size=4096),
        "sees": tiny(tiny_model("sees"), mmproj=str(tiny_projector()), ctx_size=2048),
        "bag": tiny(tiny_embedding(), embedding=True),
        "llama": tiny(tiny_caller("llama", json.dumps({"name": "exec_command", "arguments": EDIT}))),
        "told": fake("told", *journal.switches, "--record"),
        "dies": fake("dies", "--crash-at", "token:2"),
        "stalls": fake("stalls", "--hang", "serve"),
        "broken": fake("broken", "--exit-before-bind"),
        "idle": fake("idle"),
        "slow": fake("slow", "--load-s", "1.5"),
        "hidden": fake("hidden", unlisted=True),
    }
    server = {"heartbeat_after_s": 0.2, "heartbeat_every_s": 0.2}
    async with gateway(tmp_path_factory.mktemp("clients"), models, budget_mib=1000, server=server) as app:
        yield app
