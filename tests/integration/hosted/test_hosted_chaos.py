"""Everything at once: callers, operators, workers that are killed, and workers that misbehave at every step."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from greenroom.app import App
from greenroom.core.model import MoveKind, Tier
from greenroom.errors import GreenroomError
from tests.harness import gateway
from tests.integration.facts import at_rest
from tests.integration.hosted_rig import Folder, arenas, move, nothing_left, worker_timeouts
from tests.integration.raw import chat
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]
__all__ = ["nothing_left"]

NAMES = ("alpha", "beta", "gamma", "delta")
CALLERS = 5
LASTS_S = 6.0
STEPS = ("open", "wake", "sleep", "close")
WAYS = ("crash", "mute", "hang", "fail failed", "fail path", "fail out_of_memory", "slow 0.2", "deaf 0.7")
# All that a caller may hear while workers die: the model failed, was unloaded, or its worker was lost in the middle.
CODES = {"model_load_failed", "model_out_of_memory", "unloaded", "engine_lost"}


class Chaos:
    def __init__(self, app: App, folders: dict[str, Folder], seed: int) -> None:
        self.app = app
        self.folders = folders
        self.heard: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._ends_at = time.monotonic() + LASTS_S
        self._operators: list[asyncio.Task[None]] = []

    async def play(self) -> None:
        await asyncio.gather(*(self._call() for _ in range(CALLERS)), self._trouble())
        await asyncio.gather(*self._operators)

    @property
    def _goes_on(self) -> bool:
        return time.monotonic() < self._ends_at

    async def _call(self) -> None:
        while self._goes_on:
            answer = await chat(self.app, self._random.choice(NAMES))
            assert str(self.app.state_dir.path).encode() not in answer.body
            self.heard["answered" if answer.status == 200 else answer.error["code"]] += 1
            await asyncio.sleep(self._random.random() * 0.05)

    async def _trouble(self) -> None:
        draw = self._random
        while self._goes_on:
            await asyncio.sleep(draw.random() * 0.8)
            if (workers := list(self.app.hosted_slots.workers.values())) and draw.random() < 0.5:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(workers).pid, signal.SIGKILL)
            how = {draw.choice(STEPS): f"once {draw.choice(WAYS)}"} if draw.random() < 0.6 else {}
            self.folders[draw.choice(NAMES)].behave(at=how)
            if draw.random() < 0.4:
                kind = draw.choice((MoveKind.UNLOAD, MoveKind.SLEEP, MoveKind.PREPARE, MoveKind.LOAD))
                self._operators.append(asyncio.create_task(self._operate(kind, draw.choice(NAMES))))

    async def _operate(self, kind: MoveKind, name: str) -> None:
        with contextlib.suppress(GreenroomError):
            await move(self.app, kind, name)


async def answered(app: App, name: str) -> bool:
    """A model whose loads failed a moment ago backs off first."""

    async def is_served() -> bool:
        return (await chat(app, name)).status == 200

    await until(is_served, f"{name} is served", every_s=0.2)
    return True


@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_happens_to_workers_nothing_is_lost_or_left(tmp_path: Path, seed: int) -> None:
    times = dict.fromkeys(("wake_s", "sleep_s", "sleep_shared_s", "close_s", "close_shared_s"), 0.5)
    folders = {name: Folder(tmp_path, name) for name in NAMES}
    models = {name: folder.model(load_timeout_s=10) for name, folder in folders.items()}
    scheduler = {"backoff_s": 0.2, "backoff_max_s": 1}
    async with gateway(tmp_path, models, budget_mib=250, scheduler=scheduler, timeouts=worker_timeouts(**times)) as app:
        chaos = Chaos(app, folders, seed)
        await chaos.play()
        for folder in folders.values():
            folder.behave()
        await at_rest(app)
        await until(lambda: not app.mover.moving, "every move has ended")
        assert chaos.heard["answered"] and not set(chaos.heard) - CODES - {"answered"}
        slots = app.loop.scheduler.state.slots
        assert set(slots) == set(app.hosted_slots.there) and len(arenas()) == len(slots)
        assert {slot.id for slot in slots.values() if slot.tier is Tier.READY} == set(app.slots.live)
        for name in NAMES:
            assert await answered(app, name), f"{name} is answered again"
