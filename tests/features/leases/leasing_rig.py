"""The store of leases with a real scheduler and no engines: every move is done a moment after it was asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from greenroom.core.effects import OpOutcome, Reason, Rejection
from greenroom.core.events import (
    ConfigChanged,
    Event,
    MoveDone,
    RequestArrived,
    ServeDone,
    ShutdownAsked,
    Timer,
    TimerFired,
)
from greenroom.core.model import (
    Claim,
    Device,
    DeviceId,
    DeviceKind,
    LeaseId,
    ModelId,
    ModelSpec,
    Move,
    MoveId,
    Need,
    OpId,
    Outcome,
    RequestId,
    SlotId,
)
from greenroom.core.scheduler import DefaultScheduler
from greenroom.features.leases.entry import LeasableMemory
from greenroom.features.leases.journal import JournalWriter
from greenroom.features.leases.local import LocalLeasing
from greenroom.leases.records import LeaseAsk
from greenroom.runtime.memory.devices import DeviceNames
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.observer import Hub
from greenroom.runtime.scheduler_loop import SchedulerLoop
from tests.waiting import until

# Generous: a loaded machine with two cores.
SOON_S = 30.0
GPU_MIB = 10_000


def ask(name: str = "train", mib: int = 4_000, **said: Any) -> LeaseAsk:
    """One that lasts, however slow the machine is, unless its time is said."""
    return LeaseAsk(**{"id": name, "name": name, "mib": mib, "ttl_s": 3_600.0, **said})


class Rig:
    def __init__(
        self, folder: Path, *, models: Sequence[ModelSpec], gpus: int, wall: Callable[[], float], **limits: int
    ) -> None:
        # How far this gateway's clock is ahead of the loop's; timers fire by the latter.
        self.ahead_s = 0.0
        loop = asyncio.get_running_loop()
        self.clock = lambda: loop.time() + self.ahead_s
        self.loop = SchedulerLoop(DefaultScheduler(self), self.clock)
        self.state = self.loop.scheduler.state
        self.granted: list[str] = []
        self.told: list[str] = []
        # How often memory was looked at while it was missing, and what is really missing of every claim.
        self.looks = 0
        self.missing: dict[DeviceId, int] = {}
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self.leasing = LocalLeasing(
            self.loop,
            JournalWriter(folder),
            LeasableMemory(self.loop, cast(DeviceNames, self), cast(MemoryWatch, self)),
            cast(Hub, self),
            wait_max_s=3_600.0,
            wall=wall,
            **limits,
        )
        devices = tuple(Device(DeviceId(f"gpu{number}"), DeviceKind.GPU, GPU_MIB) for number in range(gpus))
        self.loop.post(ConfigChanged(self.clock(), devices=devices))
        self.leasing.begin()
        self.loop.post(ConfigChanged(self.clock(), models=tuple(models)))

    def id_of(self, name: str) -> DeviceId | None:
        return DeviceId(name) if DeviceId(name) in self.state.ledger.devices else None

    def publish(self, what: str, facts: Mapping[str, object]) -> None:
        self.told.append(f"{what} {facts['lease']}")

    def post_and_look(self, event: Event) -> None:
        self.loop.post(event)

    async def room_for(self, claim: Claim, timeout_s: float) -> Claim:
        deadline = self.clock() + timeout_s
        while self.missing and self.clock() < deadline:
            self.looks += 1
            await asyncio.sleep(0.005)
        return self.missing

    @property
    def waiting(self) -> int:
        return len(list(self.state.waitlist))

    def claims(self) -> list[dict[str, int]]:
        return [{str(device): mib for device, mib in slot.claim.items()} for slot in self.state.slots.values()]

    async def serve(self, model: str) -> None:
        """Make this model ready and leave it busy with one answer."""
        self.loop.post(RequestArrived(self.clock(), RequestId(f"r-{model}"), (ModelId(model),)))
        await until(lambda: f"r-{model}" in self.granted)

    def finish(self, model: str) -> None:
        self.loop.post(ServeDone(self.clock(), RequestId(f"r-{model}")))

    def hurry(self, name: str) -> None:
        """Post the most urgent request for this model."""
        self.loop.post(RequestArrived(self.clock(), RequestId(name), (ModelId(name),), priority=0))

    def shut_down(self) -> None:
        self.loop.post(ShutdownAsked(self.clock(), 0.0))

    async def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        await self.leasing.close()

    # --- effects ----------------------------------------------------------------------------------------------------

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        if request.startswith("lease:"):
            self.leasing.granted(LeaseId(request), slot)
        self.granted.append(request)

    def reject(self, request: RequestId | LeaseId, rejection: Rejection, reason: Reason) -> None:
        self.leasing.rejected(LeaseId(request), rejection)

    def recall(self, lease: LeaseId, deadline: float, reason: Reason) -> None:
        self.leasing.recalled(lease, deadline)

    def move(self, move: Move, reason: Reason) -> None:
        done = MoveDone(self.clock(), move.id, Outcome.DONE)
        asyncio.get_running_loop().call_later(0.01, self.loop.post, done)

    def set_timer(self, timer: Timer, at: float | None, reason: Reason) -> None:
        if pending := self._timers.pop(timer, None):
            pending.cancel()
        if at is not None:
            loop = asyncio.get_running_loop()
            self._timers[timer] = loop.call_at(at, lambda: self.loop.post(TimerFired(max(self.clock(), at), timer)))

    def cut(self, request: RequestId, reason: Reason) -> None:
        raise AssertionError("nothing is cut here")

    def abort(self, move: MoveId, reason: Reason) -> None:
        raise AssertionError("nothing is aborted here")

    def answer(self, op: OpId, outcome: OpOutcome, reason: Reason) -> None:
        raise AssertionError("no orders are given here")


@contextlib.asynccontextmanager
async def rig(
    folder: Path, *models: ModelSpec, gpus: int = 1, wall: Callable[[], float] = lambda: 1_000.0, **limits: int
) -> AsyncIterator[Rig]:
    """One run of a gateway; another one on the same folder is the run after."""
    one = Rig(folder, models=models, gpus=gpus, wall=wall, **limits)
    try:
        yield one
    finally:
        await one.close()


def model(name: str, mib: int, **said: Any) -> ModelSpec:
    return ModelSpec(ModelId(name), need=Need(mib), concurrency=1, **said)
