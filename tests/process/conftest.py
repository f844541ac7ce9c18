"""Every asynchronous test of this directory runs on both event loops: descriptors behave differently on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from greenroom.process import orphans
from greenroom.process.logs import LogRing
from greenroom.process.spawn import Child, spawn

from .trees import engine_command, new_identity


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class Start:
    """Starts small engines and remembers their identities, so that a failed test leaves nothing behind."""

    def __init__(self) -> None:
        self.identities: list[str] = []

    async def __call__(
        self, *mode: str, identity: str | None = None, log: LogRing | None = None, **bounds: float
    ) -> Child:
        command = engine_command(*mode)
        return await spawn(command, identity=identity or self.identity(), log=log or LogRing(), **bounds)

    def identity(self) -> str:
        self.identities.append(new_identity())
        return self.identities[-1]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    starter = Start()
    yield starter
    for identity in starter.identities:
        await orphans.sweep(identity, spare=frozenset())
