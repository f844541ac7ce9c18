"""A Redis of its own for each test that asks for one, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from greenroom.leases.shared.redis_store import RedisStore
from tests.leases.redis_rig import Opener
from tests.redis_server import RedisServer, redis_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[Opener]:
    opener = Opener(server)
    yield opener
    await opener.close()


@pytest.fixture
def store(client: Opener) -> RedisStore:
    return client()
