"""One gateway of a simulation: the real scheduler and the real sharing; engines, callers and the probe are played.

Owns the order of a move's steps, which is that of the real mover: hold, look, confirm, start; make way, stop, wait for
the memory, give back.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

from greenroom.core.effects import OpOutcome, Reason, RejectCode, Rejection
from greenroom.core.events import (
    ConfigChanged,
    Event,
    Limits,
    MemoryChanged,
    MoveDone,
    RequestArrived,
    ServeDone,
    ShutdownAsked,
    SlotsLost,
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
    MoveKind,
    OpId,
    Outcome,
    RequestId,
    SlotId,
    Tier,
)
from greenroom.core.scheduler import DefaultScheduler
from greenroom.errors import StoreDown
from greenroom.features.leases.sharing import Sharing
from greenroom.leases.shared.stored import Membership, SharedStore
from greenroom.runtime.memory.readings import Reading
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.moves.admission import Grants, NoGrant
from greenroom.runtime.observer import Hub
from greenroom.runtime.scheduler_loop import SchedulerLoop
from tests.sim.shared.gpus import Gpus

LOOK_EVERY_S = 1.0
LOOK_TAKES_S = 0.002
ROOM_S = 5.0
AGAIN_S = 0.05

# Busy models are closed for others soon, so that many turns fit into a run.
LIMITS = Limits(deadlines_s=(1.0, 10.0, 40.0), away_share=1.0)


class World(Protocol):
    gpus: Gpus
    chance: random.Random
    ttl_s: float

    def new_store(self, is_dead: Callable[[], bool]) -> SharedStore: ...

    def load_s(self, model: ModelId) -> float: ...

    def answered(self, gateway: str, request: RequestId) -> None: ...

    def cut(self, gateway: str, request: RequestId) -> None: ...

    def refused(self, gateway: str, request: RequestId, code: RejectCode) -> None: ...


class Gateway:
    """From its start to its end or its death. `grants` stands in for its own way to ask, where a fault is planted."""

    def __init__(self, world: World, name: str, models: tuple[ModelSpec, ...], grants: Grants | None = None) -> None:
        self._world = world
        self.name = name
        self._models = models
        self._loop = asyncio.get_running_loop()
        # A dead gateway sends nothing, whatever of it is still unwinding.
        self.is_dead = False
        # One that is cut off from the store cannot renew.
        self.is_cut_off = False
        self.clock: Callable[[], float] = self._loop.time
        scheduler = DefaultScheduler(self)
        self.state = scheduler.state
        self._events = SchedulerLoop(scheduler, self.clock)
        self.post: Callable[[Event], None] = self._events.post
        self.sharing = Sharing(
            Membership(world.new_store(lambda: self.is_dead or self.is_cut_off), name, world.ttl_s, holder=None),
            self._events,
            cast(MemoryWatch, self),
            Hub(),
        )
        self.grants = grants or self.sharing.slots
        self._wanted = asyncio.Event()
        self._moves: dict[MoveId, asyncio.Task[Any]] = {}
        self._aborted: set[MoveId] = set()
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._remains: set[asyncio.Task[Any]] = set()
        self.engines: dict[SlotId, Claim] = {}
        self._serving: dict[RequestId, asyncio.TimerHandle] = {}

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        capacity = self._world.gpus.capacity_mib
        devices = tuple(Device(device, DeviceKind.GPU, mib) for device, mib in capacity.items())
        self.post(ConfigChanged(self.clock(), devices=devices, limits=LIMITS))
        self.sharing.begin()
        self.post(ConfigChanged(self.clock(), models=self._models))
        await self.sharing.open()
        self._own(self._watch())

    async def stop(self) -> None:
        """In good order."""
        self.post(ShutdownAsked(self.clock(), 0.0))
        await self._events.until(lambda: all(slot.lease is not None for slot in self.state.slots.values()))
        while self._remains:
            await asyncio.wait(self._remains)
        await self.sharing.close()
        self._end_tasks()

    def kill(self) -> None:
        """Kill it at once, silently. Its keepers end its engines a moment later."""
        self.is_dead = True
        if (beating := self.sharing.heartbeat._task) is not None:
            beating.cancel()
        for want in self.sharing.waiting_models._wants.values():
            want.task.cancel()
        self._end_tasks()
        for owner in [one for one in self._world.gpus.users if one.startswith(f"{self.name}/")]:
            self._loop.call_later(self._world.chance.uniform(0.05, 1.0), self._world.gpus.give_back, owner)

    def _end_tasks(self) -> None:
        for task in (*self._moves.values(), *self._tasks, *self._remains):
            task.cancel()
        for handle in (*self._timers.values(), *self._serving.values()):
            handle.cancel()

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _owner(self, slot: SlotId) -> str:
        return f"{self.name}/{slot}"

    def told(self) -> dict[str, Any]:
        """The state, for the message of a failure."""
        state = self.state
        return {
            "down": self.sharing.failure,
            "waiting": {model: queue.waiting for model, queue in state.waitlist.queues.items()},
            "slots": {
                slot.id: (slot.model, slot.tier.value, slot.planned, slot.move, slot.leaving_to)
                for slot in state.slots.values()
            },
            "others": [(one.id, dict(one.claim)) for one in state.ledger.others],
            "foreign": dict(state.ledger.foreign),
            "pausing": {model: record.pausing for model, record in state.models.items() if record.pausing},
            "line": {want.id: want.lease is not None for want in self.sharing.waiting_models._wants.values()},
        }

    # --- callers ----------------------------------------------------------------------------------------------------

    def ask(self, request: RequestId, model: ModelId, priority: int) -> None:
        self.post(RequestArrived(self.clock(), request, (model,), priority))

    def crash(self, slot: SlotId, lingers_s: float) -> None:
        """An engine ends by itself. What it answered is cut short, and its memory comes back a little later."""
        if slot not in self.engines:
            return
        del self.engines[slot]
        task = self._loop.create_task(self._clear_up(slot, lingers_s))
        self._remains.add(task)
        task.add_done_callback(self._remains.discard)
        cut = list(self.state.slots[slot].in_flight) if slot in self.state.slots else []
        self.post_and_look(SlotsLost(self.clock(), (slot,), Tier.COLD, "crashed"))
        for request in cut:
            self._end_answer(request)
            self._world.cut(self.name, request)

    async def _clear_up(self, slot: SlotId, lingers_s: float) -> None:
        await asyncio.sleep(lingers_s)
        self._world.gpus.give_back(self._owner(slot))
        await self.grants.leave(slot)

    # --- the probe --------------------------------------------------------------------------------------------------

    def post_and_look(self, event: Event) -> None:
        self.post(event)
        self.nudge()

    @property
    def reading(self) -> Reading:
        return self._world.gpus.reading()

    def nudge(self) -> None:
        self._wanted.set()

    async def _watch(self) -> None:
        while True:
            self._wanted.clear()
            await self.look_now()
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wanted.wait()
            except TimeoutError:
                continue

    async def look_now(self) -> None:
        await asyncio.sleep(LOOK_TAKES_S)
        gpus, ledger = self._world.gpus, self.state.ledger
        mine = {owner for owner in gpus.users if owner.startswith(f"{self.name}/")}
        foreign: dict[DeviceId, int] = {}
        for device in gpus.capacity_mib:
            known = gpus.of(mine, device) + sum(lease.claim.get(device, 0) for lease in ledger.others)
            foreign[device] = max(0, gpus.used_mib(device) - known)
        if any(foreign[device] != ledger.foreign.get(device, 0) for device in foreign):
            self.post(MemoryChanged(self.clock(), foreign))

    async def lacks(self, claim: Claim) -> bool:
        deadline = self.clock() + ROOM_S
        while not self._world.gpus.has_room(claim):
            if self.clock() >= deadline:
                return True
            await self.look_now()
            await asyncio.sleep(AGAIN_S)
        return False

    # --- moves ------------------------------------------------------------------------------------------------------

    async def _carry_out(self, move: Move) -> Claim | None:
        if move.kind is MoveKind.UNLOAD:
            await self._unload(move)
            return None
        while self._remains:
            await asyncio.wait(self._remains)
        try:
            await self.grants.enter(move)
            if await self.lacks(move.claim):
                raise NoGrant("free on paper only")
            await self.grants.confirm(move.slot)
            self._world.gpus.take(self._owner(move.slot), move.claim)
            try:
                await asyncio.sleep(self._world.load_s(move.model))
            except BaseException:
                if not self.is_dead:
                    self._world.gpus.give_back(self._owner(move.slot))
                raise
        except BaseException:
            await self.grants.leave(move.slot)
            raise
        self.engines[move.slot] = move.claim
        return move.claim

    async def _unload(self, move: Move) -> None:
        if move.slot in self.engines:
            await self.grants.make_way(move)
        if self.engines.pop(move.slot, None) is None:
            return
        await asyncio.sleep(self._world.chance.uniform(0.02, 0.4))
        self._world.gpus.give_back(self._owner(move.slot))
        await self.grants.leave(move.slot)

    def _ended(self, move: Move, task: asyncio.Task[Claim | None]) -> None:
        if self._moves.pop(move.id, None) is None or self._loop.is_closed():
            return
        seen, outcome = None, Outcome.ABORTED
        if not task.cancelled():
            error = task.exception()
            if error is None:
                seen, outcome = task.result(), Outcome.DONE
            elif isinstance(error, NoGrant | StoreDown):
                outcome = Outcome.STORE_DOWN if isinstance(error, StoreDown) else Outcome.NO_LEASE
            else:
                raise error
        elif move.id not in self._aborted:
            # The gateway was killed; there is nothing left to tell.
            return
        self.post_and_look(MoveDone(self.clock(), move.id, outcome, seen))

    # --- effects ----------------------------------------------------------------------------------------------------

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        if request.startswith("room:"):
            self.sharing.room.granted(LeaseId(request), slot)
            return
        took_s = self._world.chance.uniform(0.05, 1.0)
        self._serving[RequestId(request)] = self._loop.call_later(took_s, self._serve, RequestId(request))

    def _serve(self, request: RequestId) -> None:
        self._world.answered(self.name, request)
        self._end_answer(request)

    def _end_answer(self, request: RequestId) -> None:
        handle = self._serving.pop(request, None)
        if handle is not None:
            handle.cancel()
            self.post(ServeDone(self.clock(), request))

    def reject(self, request: RequestId | LeaseId, rejection: Rejection, reason: Reason) -> None:
        if request.startswith("room:"):
            self.sharing.room.rejected(LeaseId(request), rejection)
        else:
            self._world.refused(self.name, RequestId(request), rejection.code)

    def cut(self, request: RequestId, reason: Reason) -> None:
        self._loop.call_soon(self._end_answer, request)
        self._world.cut(self.name, request)

    def move(self, move: Move, reason: Reason) -> None:
        task = self._loop.create_task(self._carry_out(move))
        self._moves[move.id] = task
        task.add_done_callback(lambda task: self._ended(move, task))

    def abort(self, move: MoveId, reason: Reason) -> None:
        if move in self._moves and move not in self._aborted:
            self._aborted.add(move)
            self._moves[move].cancel()

    def answer(self, op: OpId, outcome: OpOutcome, reason: Reason) -> None:
        raise AssertionError("there is no operator here")

    def recall(self, lease: LeaseId, deadline: float, reason: Reason) -> None:
        self.sharing.room.recalled(lease, deadline)

    def set_timer(self, timer: Timer, at: float | None, reason: Reason) -> None:
        if pending := self._timers.pop(timer, None):
            pending.cancel()
        if at is not None:
            self._timers[timer] = self._loop.call_at(at, self._fire, timer, at)

    def _fire(self, timer: Timer, at: float) -> None:
        self._timers.pop(timer, None)
        self.post(TimerFired(max(self.clock(), at), timer))
