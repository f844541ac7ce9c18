"""One seed, played to its end: gateways, trainers, callers and faults; then quiet, in which all must be served.

What must hold: no engine is ever started where its memory is not free; when the faults have ended everything that waits
is served within a bound; nothing is served with the lease of another; and when all have gone nothing is left,
neither in the store nor on a GPU.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from greenroom.core.effects import RejectCode
from greenroom.core.model import DeviceId, ModelId, ModelSpec, Need, RequestId
from greenroom.errors import BadRequest, LeaseDenied, LeaseLost, LeaseTaken, StoreDown
from greenroom.features.leases import sharing
from greenroom.features.leases.shared_slots import PENDING_S
from greenroom.leases.records import Holder, Lease, LeaseAsk
from greenroom.leases.shared.stored import SharedStore, SlotAsk
from greenroom.runtime.moves.admission import Grants
from greenroom.telemetry.logs import setup as setup_logs
from tests.sim.shared.book import Book, BookStore, at_once
from tests.sim.shared.gateway import Gateway
from tests.sim.shared.gpus import Gpus, Violation
from tests.sim.shared.virtual_loop import VirtualLoop

FAULTS_S = 15.0
# After the last fault all are served within this: what was lost lapses (a TTL and a third), a store that forgot
# grants nothing for as long, and each in the line has its turns.
BOUND_S = 120.0
# And then what is written down is what is there: leases of holders that died without a word have lapsed, and so have
# their plans.
REST_TTLS = 3.0
# An answer of the store that has not come by then does not come.
ANSWER_MAX_S = 1.0
EPOCH_S = 1_700_000_000.0
# From this seed on, eight of every 32 have gateways that are cut off from the store. Kept seeds and hashes have none.
CUT_OFF_FROM = 40
# Gateways on two GPUs that have a model which fits none of them alone.
SPLIT_SHARE = 0.3

Plant = Callable[[Gateway], Grants]


@dataclass(slots=True)
class Played:
    seed: int
    served: int = 0
    leases: int = 0
    drained_s: float = 0.0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)


class Play:
    def __init__(self, seed: int, plant: Plant | None = None) -> None:
        self.chance = random.Random(seed)
        self.played = Played(seed)
        self._plant = plant
        chance = self.chance
        self.ttl_s = chance.choice((1.5, 3.0))
        mib = chance.choice((8_000, 16_000))
        self.gpus = Gpus({DeviceId(f"gpu{number}"): mib for number in range(chance.randint(1, 2))})
        self._gpu_mib = mib
        self.book = Book(self._wall_s)
        self._is_down = False
        self._models = {name: self._specs(name) for name in ("a", "b", "c")[: chance.randint(2, 3)]}
        self._load_s = {spec.id: chance.uniform(0.1, 2.0) for specs in self._models.values() for spec in specs}
        self.gateways: dict[str, Gateway] = {}
        # The callers that each gateway owes an answer, over all its restarts.
        self._open: dict[str, dict[RequestId, tuple[ModelId, int]]] = {name: {} for name in self._models}
        self._asking_again: Counter[str] = Counter()
        self._lives: Counter[str] = Counter()
        self._waiting_trainers = 0
        self._numbers = 0
        self.errors: list[BaseException] = []

    def _specs(self, name: str) -> tuple[ModelSpec, ...]:
        sizes = [round(self._gpu_mib * self.chance.uniform(0.15, 0.9)) for _ in range(self.chance.randint(1, 3))]
        small = tuple(ModelSpec(ModelId(f"{name}{number}"), need=Need(mib)) for number, mib in enumerate(sizes))
        return small + self._split(name)

    def _split(self, name: str) -> tuple[ModelSpec, ...]:
        """Now and then one that is larger than a GPU. Drawn apart, so that seeds of before stay what they were."""
        chance = random.Random(f"{self.played.seed} {name} split")
        if len(self.gpus.capacity_mib) < 2 or chance.random() > SPLIT_SHARE:
            return ()
        need = Need(round(self._gpu_mib * chance.uniform(1.05, 1.7)))
        return (ModelSpec(ModelId(f"{name}-split"), need=need, can_split=True),)

    def _wall_s(self) -> float:
        return EPOCH_S + asyncio.get_running_loop().time()

    # --- what gateways ask of the world -----------------------------------------------------------------------------

    def load_s(self, model: ModelId) -> float:
        return self._load_s[model]

    def new_store(self, is_dead: Callable[[], bool]) -> SharedStore:
        async def asks(question: Callable[[], bytes]) -> bytes:
            await self._pass(is_dead)
            answer = question()
            await self._pass(is_dead)
            return answer

        return BookStore(lambda: self.book, asks, ttl_s=self.ttl_s)

    async def _pass(self, is_dead: Callable[[], bool]) -> None:
        """The way to the store or back, on which a question or an answer may be lost."""
        await asyncio.sleep(self.chance.uniform(0.0002, 0.005))
        if self._is_down:
            await asyncio.sleep(self.chance.uniform(0.0, ANSWER_MAX_S))
        if is_dead() or self._is_down or (self._is_stormy and self.chance.random() < 0.004):
            raise StoreDown("the store does not answer")

    @property
    def _is_stormy(self) -> bool:
        return asyncio.get_running_loop().time() < FAULTS_S

    def answered(self, gateway: str, request: RequestId) -> None:
        self._open[gateway.partition("#")[0]].pop(request, None)
        self.played.served += 1

    def refused(self, gateway: str, request: RequestId, code: RejectCode) -> None:
        """A refused caller asks again, as a new request."""
        self.played.refusals[code.value] += 1
        # Engines that crash again and again are backed off from.
        if code not in (RejectCode.STORE_DOWN, RejectCode.LOAD_FAILED, RejectCode.SHUTTING_DOWN):
            self.errors.append(Violation(f"{request} was refused: {code}"))
        if code is not RejectCode.SHUTTING_DOWN:
            self.cut(gateway, request)

    def cut(self, gateway: str, request: RequestId) -> None:
        """Callers without an answer ask again."""
        name = gateway.partition("#")[0]
        if (asked := self._open[name].pop(request, None)) is not None:
            self._asking_again[name] += 1
            asyncio.get_running_loop().call_later(1.0, self._ask_again, name, *asked)

    def _ask_again(self, name: str, model: ModelId, priority: int) -> None:
        self._asking_again[name] -= 1
        self._ask(name, model, priority)

    # --- actors -----------------------------------------------------------------------------------------------------

    async def run(self) -> Played:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_error)
        for name in self._models:
            await self._start(name)
        actors = [self._callers(name) for name in self._models]
        actors += [self._trainer(number) for number in range(self.chance.randint(0, 2))]
        await asyncio.gather(*actors, self._nemesis(), self._cutter(), self._impostor())
        self._is_down = False
        for name in [name for name in self._models if name not in self.gateways]:
            await self._start(name)
        await self._drain()
        await self._rest()
        await self._leave()
        self.played.virtual_s = loop.time()
        self._raise_errors()
        return self.played

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(error if error is not None else Violation(context["message"]))

    def _raise_errors(self) -> None:
        if self.errors:
            raise self.errors[0]

    async def _start(self, name: str) -> None:
        self._lives[name] += 1
        gateway = Gateway(self, f"{name}#{self._lives[name]}", self._models[name])
        if self._plant is not None:
            gateway.grants = self._plant(gateway)
        self.gateways[name] = gateway
        await gateway.start()
        # Callers that the last one did not answer ask again.
        asked, self._open[name] = list(self._open[name].values()), {}
        for model, priority in asked:
            self._ask(name, model, priority)

    def _ask(self, name: str, model: ModelId, priority: int) -> None:
        self._numbers += 1
        request = RequestId(f"r{self._numbers}")
        self._open[name][request] = (model, priority)
        if (gateway := self.gateways.get(name)) is not None:
            gateway.ask(request, model, priority)

    async def _callers(self, name: str) -> None:
        pause_s = self.chance.choice((0.5, 1.0, 3.0))
        while self._is_stormy:
            await asyncio.sleep(self.chance.expovariate(1 / pause_s))
            self._ask(name, self.chance.choice(self._models[name]).id, self.chance.choice((0, 1, 1, 2)))

    # --- training ---------------------------------------------------------------------------------------------------

    async def _trainer(self, number: int) -> None:
        store = self.new_store(lambda: False)
        turn = 0
        while self._is_stormy:
            await asyncio.sleep(self.chance.uniform(0.0, 3.0))
            turn += 1
            mib = round(self._gpu_mib * self.chance.uniform(0.2, 0.95))
            ask = LeaseAsk(f"t{number}.{turn}", "train", mib, wait_s=FAULTS_S + BOUND_S, ttl_s=self.ttl_s)
            self._waiting_trainers += 1
            try:
                lease = await store.acquire(ask)
            except (LeaseDenied, StoreDown) as error:
                raise Violation(f"a trainer waited in vain: {error}") from None
            finally:
                self._waiting_trainers -= 1
            self.played.leases += 1
            await self._train(store, lease)

    async def _train(self, store: SharedStore, lease: Lease) -> None:
        claim = {DeviceId(device): mib for device, mib in lease.claim.items()}
        if not self.gpus.has_room(claim):
            # A holder hung past the end of its lease, or died a moment ago. Only gateways measure before.
            self.played.faults["trainer_found_less"] += 1
            await self._release(store, lease)
            return
        self.gpus.take(lease.id, claim)
        ends_at = asyncio.get_running_loop().time() + self.chance.uniform(0.3, 4.0)
        end = self.chance.choice(("release", "release", "die", "stand_still")) if self._is_stormy else "release"
        try:
            while asyncio.get_running_loop().time() < ends_at:
                await asyncio.sleep(self.ttl_s / 4)
                try:
                    lease = await store.renew(lease.id, lease.token)
                except StoreDown:
                    continue
            if end == "stand_still":
                self.played.faults[end] += 1
                await asyncio.sleep(self.ttl_s * self.chance.uniform(1.0, 3.0))
        except LeaseLost:
            end = "lost"
        self.gpus.give_back(lease.id)
        if end == "release":
            await self._release(store, lease)
        elif end == "die":
            self.played.faults[end] += 1

    async def _release(self, store: SharedStore, lease: Lease) -> None:
        while True:
            try:
                return await store.release(lease.id, lease.token)
            except StoreDown:
                await asyncio.sleep(0.5)

    async def _impostor(self) -> None:
        """Names the leases of others, as what it is not. Its time is drawn apart, so that seeds stay what they were."""
        chance = random.Random(f"{self.played.seed} impostor")
        store = BookStore(lambda: self.book, at_once, ttl_s=self.ttl_s)
        while self._is_stormy:
            await asyncio.sleep(chance.expovariate(1 / 2.0))
            if self._is_down:
                continue
            for lease in (known := await store.leases()):
                if await self._is_served(store, lease):
                    raise Violation(f"an impostor was served with {lease}")
            if _kept(await store.leases()) != _kept(known):
                raise Violation(f"an impostor changed {known} to {await store.leases()}")
            self.played.faults["impostor"] += len(known)

    async def _is_served(self, store: SharedStore, lease: Lease) -> bool:
        ask = LeaseAsk(lease.id, lease.name, max(lease.claim.values(), default=1), holder=Holder("impostor", 1, 1, 1))
        slot = SlotAsk(lease.id, lease.name, {}, holder=ask.holder)
        other = "slot" if lease.kind == "program" else "program"
        await store.release(lease.id, lease.token, kind=other)
        await store.release(lease.id, kind=other)
        tries: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: store.acquire(ask),
            lambda: store.acquire(ask, kind="slot"),
            lambda: store.hold(slot, gateway="impostor"),
            lambda: store.pend(slot, (), gateway="impostor", pending_s=1.0),
            lambda: store.renew(lease.id, 1 if other == "slot" else lease.token),
        )
        for one in tries:
            try:
                await one()
            except (LeaseTaken, LeaseLost, BadRequest):
                continue
            return True
        return False

    # --- faults -----------------------------------------------------------------------------------------------------

    async def _nemesis(self) -> None:
        faults = (self._crash, self._crash, self._crash, self._kill, self._outage, self._outage, self._forget)
        while self._is_stormy:
            await asyncio.sleep(self.chance.expovariate(1 / 1.5))
            fault = self.chance.choice(faults)
            self.played.faults[fault.__name__.removeprefix("_")] += 1
            await fault()

    async def _cutter(self) -> None:
        """Cuts off gateways until their leases lapse. Only in some seeds, so that the others stay what they were."""
        chance = random.Random(f"{self.played.seed} cutter")
        while self._is_stormy and self.played.seed >= CUT_OFF_FROM and self.played.seed // 8 % 4 == 1:
            await asyncio.sleep(chance.expovariate(1 / 3.0))
            gateway = self.gateways.get(chance.choice(list(self._models)))
            if gateway is not None:
                self.played.faults["cut_off"] += 1
                gateway.is_cut_off = True
                await asyncio.sleep(self.ttl_s * chance.uniform(1.0, 3.0))
                gateway.is_cut_off = False

    async def _crash(self) -> None:
        alive = [(gateway, slot) for gateway in self.gateways.values() for slot in gateway.engines]
        if alive:
            gateway, slot = self.chance.choice(alive)
            gateway.crash(slot, self.chance.uniform(0.01, 1.5))

    async def _kill(self) -> None:
        name = self.chance.choice(list(self._models))
        self.gateways.pop(name).kill()
        await asyncio.sleep(self.chance.uniform(0.0, 4.0))
        await self._start(name)

    async def _outage(self) -> None:
        self._is_down = True
        await asyncio.sleep(self.chance.uniform(0.1, 2 * self.ttl_s))
        self._is_down = False

    async def _forget(self) -> None:
        """The store comes back with nothing."""
        self._is_down = True
        await asyncio.sleep(self.chance.uniform(0.1, 1.0))
        self.book = Book(self._wall_s)
        self._is_down = False

    # --- the end ----------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while any(self._open.values()) or self._asking_again.total() or self._waiting_trainers:
            self._raise_errors()
            if loop.time() > began + BOUND_S:
                waiting = {name: list(asked.values())[:3] for name, asked in self._open.items() if asked}
                raise Violation(f"not served {BOUND_S:g} s after the last fault: {waiting}; {self._shown()}")
            await asyncio.sleep(0.5)
        self.played.drained_s = loop.time() - began

    async def _rest(self) -> None:
        """The store is right: no lease of a holder that has gone, none missing of one that is there."""
        deadline = asyncio.get_running_loop().time() + REST_TTLS * self.ttl_s + PENDING_S
        while (wrong := self._wrongly_written()) is not None:
            self._raise_errors()
            if asyncio.get_running_loop().time() > deadline:
                raise Violation(f"{wrong}; {self._shown()}")
            await asyncio.sleep(0.2)

    def _wrongly_written(self) -> str | None:
        held = {record["id"] for record in self.book.records() if record["state"] == "held"}
        there = {
            entered.id for gateway in self.gateways.values() for entered in gateway.sharing.slots._entered.values()
        }
        engines = sum(len(gateway.engines) for gateway in self.gateways.values())
        if held == there and len(self.book.records()) == len(held) == engines:
            return None
        return f"held {sorted(held)}, known {sorted(there)}, {engines} engines, {len(self.book.records())} records"

    async def _leave(self) -> None:
        for gateway in self.gateways.values():
            await gateway.stop()
        if self.book.records() or self.gpus.users:
            raise Violation(f"left behind: {self.book.records()}, {self.gpus.users}")

    def _shown(self) -> str:
        written = {
            record["id"]: (record["state"], record.get("claim"), record.get("turn")) for record in self.book.records()
        }
        told = {gateway.name: gateway.told() for gateway in self.gateways.values()}
        return f"{told}, book {written}, users {self.gpus.users}, capacity {self.gpus.capacity_mib}"


def _kept(leases: list[Lease]) -> dict[str, tuple[object, ...]]:
    return {one.id: (one.state, one.token, one.claim, one.kind, one.gateway, one.holder) for one in leases}


def play(seed: int, plant: Plant | None = None) -> Played:
    """Raises Violation, with what was the case."""
    setup_logs("error", "text")
    random.seed(seed)
    loop, one = VirtualLoop(), Play(seed, plant)
    try:
        # What is caught and logged in a gateway, so that it goes on, must not go unnoticed here.
        with mock.patch.object(type(sharing._log), "bug", lambda log, what, bug, **facts: one.errors.append(bug)):
            return loop.run_until_complete(one.run())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        # As it is by default: the level belongs to the process, and other tests read what is logged.
        setup_logs("info", "text")
