"""These tests run the gateway as in production, on uvloop; and fixtures of modules that have an `app`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import pytest_asyncio
import uvloop

from greenroom.app import App
from tests.harness import url
from tests.integration.facts import Journal
from tests.later import Later
from tests.waiting import PATIENCE_S

openai = Later("openai")


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def journal(tmp_path_factory: pytest.TempPathFactory) -> Journal:
    return Journal(tmp_path_factory.mktemp("journal"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(app: App) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official package, which never asks twice."""
    address = url(app) + "/v1"
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client
