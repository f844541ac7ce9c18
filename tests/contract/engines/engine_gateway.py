"""A gateway with models of one engine, seen only as its callers and its operator see it: over HTTP.

Besides that the tests look at processes, whose ids the management API tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greenroom.app import App
from tests.contract.engines.kinds import Kind
from tests.integration import facts
from tests.integration.raw import CHAT, Answer, Raw, asking, chat, http
from tests.waiting import PATIENCE_S

MORE_TOKENS_THAN_FIT = 100_000
BUSY_TICKS = 10
QUIET_WINDOW_S = 0.5
QUIET_TICKS = 3


@dataclass(frozen=True, slots=True)
class EngineGateway:
    app: App
    kind: Kind
    folder: Path

    async def view(self, model: str) -> dict[str, Any]:
        return await facts.view(self.app, model)

    async def order(self, move: str, model: str, **order: Any) -> Answer:
        return await facts.order(self.app, move, model, **order)

    async def done(self, move: str, model: str, **order: Any) -> dict[str, Any]:
        """The move was carried out; what was answered."""
        answer = await self.order(move, model, **order)
        assert answer.status == 200, answer.body
        moved: dict[str, Any] = answer.json()
        return moved

    async def cold(self, model: str) -> None:
        await self.done("unload", model, grace_s=0)

    async def ready(self, model: str) -> int:
        """The model is ready; the id of the process it runs in."""
        await self.done("load", model)
        return await facts.pid_of(self.app, model)

    async def says(self, model: str) -> str:
        """What it says, which must have its name."""
        answer = await chat(self.app, model, temperature=0)
        assert answer.status == 200, answer.body
        assert model in answer.text
        return answer.text

    async def begins(self, model: str) -> str:
        """The first words of a model that does not end, which must have its name."""
        answer = await http(self.app, "POST", CHAT, asking(model, temperature=0, **at_most(4)))
        assert answer.status == 200, answer.body
        assert model in answer.text
        return answer.text

    @contextlib.asynccontextmanager
    async def listening(self, model: str, tokens: int = MORE_TOKENS_THAN_FIT) -> AsyncIterator[Raw]:
        """A stream of the model that does not end, or ends after so many tokens, past its first event."""
        async with await Raw.open(self.app) as raw:
            raw.ask(asking(model, stream=True, temperature=0, **at_most(tokens)))
            status, _ = await raw.head()
            assert status == 200
            assert await raw.chunk()
            yield raw


def at_most(tokens: int) -> dict[str, int]:
    """So many tokens and no more: for real engines, and for the fake one, which knows no other end."""
    return {"max_tokens": tokens, "tokens": tokens}


async def until_busy(raw: Raw, pid: int) -> None:
    """Take what comes until the process has computed for a while."""
    begun = cpu_ticks(pid)
    while cpu_ticks(pid) - begun < BUSY_TICKS:
        assert await raw.chunk(), "the stream ended early"


async def until_quiet(pid: int) -> int:
    """Wait until it computes next to nothing for a moment; hundredths of a second it has computed until then."""
    begun = before = cpu_ticks(pid)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        await asyncio.sleep(QUIET_WINDOW_S)
        if (now := cpu_ticks(pid)) - before <= QUIET_TICKS:
            return before - begun
        before = now
    raise AssertionError(f"it still computes after {PATIENCE_S} s")


def cpu_ticks(pid: int) -> int:
    """Hundredths of a second this process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
