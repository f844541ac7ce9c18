"""These tests run the gateway as in production, on uvloop; and fixtures of modules that have an `app`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop

from greenroom.app import App
from tests.harness import url
from tests.integration.facts import Journal
from tests.integration.sharing_rig import grown_up
from tests.later import Later
from tests.redis_server import RedisServer, redis_server
from tests.standins.standin_hub import StandinHub, standin_hub
from tests.waiting import PATIENCE_S

openai = Later("openai")


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield grown_up(server)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandinHub]:
    """A stand-in of the hub, which every gateway and program asks, without a token; and a folder for models."""
    with standin_hub() as hub:
        for name in [name for name in os.environ if name.startswith("HF_")] + ["TRANSFORMERS_CACHE"]:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
        (tmp_path / "models").mkdir()
        yield hub


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def journal(tmp_path_factory: pytest.TempPathFactory) -> Journal:
    return Journal(tmp_path_factory.mktemp("journal"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(app: App) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official package, which never asks twice."""
    address = url(app) + "/v1"
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client
