"""One gateway per engine, which the tests of that engine share: starting an engine is what takes time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import pytest_asyncio
import uvloop

from tests.contract.engines.engine_gateway import EngineGateway
from tests.contract.engines.kinds import KINDS
from tests.harness import gateway


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(loop_scope="session", scope="session", params=sorted(KINDS))
async def gate(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineGateway]:
    kind = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    models = {"alpha": kind.named("alpha"), "bravo": kind.named("bravo"), "endless": kind.endless("endless")}
    async with gateway(folder, models) as app:
        yield EngineGateway(app, kind, folder)
