"""A gateway made of real tables and no engines, and a client that speaks ASGI to its management API."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote_to_bytes

from greenroom.access.client_stats import ClientStats
from greenroom.access.key_ring import KeyRing
from greenroom.access.keys import Caller
from greenroom.access.limits import Limiter
from greenroom.api.reports.history import sample
from greenroom.api.reports.streams import Streams
from greenroom.app import make_management
from greenroom.config import loader
from greenroom.config.diff import Changes
from greenroom.config.part import GatewayState
from greenroom.config.schema import Config, Model, Server
from greenroom.core.effects import Effects
from greenroom.core.events import ConfigChanged, LeaseAsked
from greenroom.core.model import (
    Device,
    DeviceId,
    DeviceKind,
    LeaseId,
    ModelId,
    MoveKind,
    Need,
    RequestId,
    Slot,
    SlotId,
    TenantId,
    Tier,
)
from greenroom.core.queue.waitlist import Waiter, WaiterKind
from greenroom.core.scheduler import DefaultScheduler
from greenroom.errors import GreenroomError, LeaseLost, LeaseUnknown
from greenroom.features.governance.audit import AuditLog
from greenroom.features.governance.gate import GovernanceGate
from greenroom.features.governance.nonces import NonceJournal
from greenroom.features.library.downloads import Downloads
from greenroom.features.operations.loads import Loads
from greenroom.http.limits import EdgeStats
from greenroom.leases.records import Lease, LeaseAsk
from greenroom.library.library import Library
from greenroom.library.roots import Roots
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.known_models import KnownModels
from greenroom.runtime.loop import Tickets
from greenroom.runtime.memory.readings import Reading
from greenroom.runtime.memory.watch import MemoryLook
from greenroom.runtime.observer import Hub, Residency
from greenroom.runtime.operations.files import OperationFiles
from greenroom.runtime.operations.table import JobLimits, OperationTable
from greenroom.runtime.record.learned import LearnedTimes
from greenroom.runtime.remote.fallback import CloudFallback
from greenroom.runtime.resolver import Resolver
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.shell import Shell
from greenroom.runtime.slots import LiveSlot, LiveSlots
from greenroom.runtime.workers.hosted_slots import HostedSlots
from greenroom.serving.prefix_cache import PrefixSalts
from greenroom.serving.tasks import Tasks, model_facts
from greenroom.telemetry.activity import Activity
from greenroom.telemetry.history import History
from greenroom.telemetry.metrics import Metrics
from tests.runtime.memory.readings import gpu, reading

GPU = DeviceId("gpu0")
ADMIN = Caller(name="root", tenant=None, priority_max=1, admin=True)
PLAIN = Caller(name="plain", tenant=TenantId("plain"), priority_max=1, admin=False)
# Governance is off, and opens neither.
NOTHING_USED = NonceJournal(Path("/nowhere/nonces"), 0.0)
UNWRITTEN = AuditLog(Path("/nowhere/audit.jsonl"))
# The clock stands still unless a test moves it.
NOW = 1_000.0
# Generous: a loaded machine with two cores.
SOON_S = 20.0


def model(**said: Any) -> Model:
    return Model(**{"cmd": "engine --port ${PORT}", "memory_mib": 100, **said})


@dataclass
class FakeOrders:
    """Writes down what was asked; does what the test says it should."""

    asked: list[tuple[MoveKind, str, tuple[str, ...], float | None]] = field(default_factory=list)
    error: Exception | None = None
    then: Callable[[], None] = lambda: None

    def expect_leavable(self, models: Iterable[ModelId]) -> None:
        pass

    async def move(
        self,
        kind: MoveKind,
        model: ModelId,
        *,
        evict: tuple[ModelId, ...] = (),
        grace_s: float | None = None,
        force: bool = False,
    ) -> None:
        self.asked.append((kind, model, evict, grace_s))
        if self.error is not None:
            raise self.error
        self.then()


class FakeEffects:
    """Nothing is carried out, only written down: tests set tables up themselves."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *said: self.asked.append(name)


@dataclass
class FakeFailures:
    failures: dict[ModelId, GreenroomError] = field(default_factory=dict)


@dataclass
class FakeDecided:
    decisions: deque[Mapping[str, Any]] = field(default_factory=deque)
    residency: Residency = field(default_factory=lambda: Residency(lambda: 1_700_000_000.0, lambda: 0.0))


@dataclass
class FakeListening:
    addresses: list[str] = field(default_factory=lambda: ["127.0.0.1:8210"])
    connections: int = 3
    stats: EdgeStats = field(default_factory=lambda: EdgeStats(accepted=7))


@dataclass
class FakeWatch:
    """One look, which a test puts there; looking again is only counted."""

    last: MemoryLook = field(default_factory=lambda: MemoryLook(NOW, reading(gpu("gpu0", total_mib=8192))))
    kind: str = "simulated"
    failure: str | None = None
    sees_pids: bool = True
    looks: int = 0

    async def look_now(self) -> Reading:
        self.looks += 1
        return self.last.reading


@dataclass
class FakeLeasing:
    """Keeps what is asked for, at once and for ever; says no, or says nothing, where a test wants that."""

    lists_slots: bool = False
    asked: list[LeaseAsk] = field(default_factory=list)
    held: dict[str, Lease] = field(default_factory=dict)
    error: Exception | None = None
    may_answer: asyncio.Event | None = None
    given_up: int = 0

    def known(self) -> list[Lease]:
        return list(self.held.values())

    async def acquire(self, ask: LeaseAsk, asker: str = "") -> Lease:
        self.asked.append(ask)
        if self.error is not None:
            raise self.error
        if self.may_answer is not None:
            try:
                await self.may_answer.wait()
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        claim = {"gpu0": ask.mib}
        lease = Lease(
            ask.id, ask.name, 7, claim, 1, ask.preemptible, "held", ask.ttl_s, ask.ttl_s, None, ask.holder, "program"
        )
        self.held[ask.id] = lease
        return lease

    async def unheard(self, id: str, asker: str) -> None:
        self.held.pop(id, None)

    async def renew(self, id: str, token: int) -> Lease:
        lease = await self.find(id)
        if token != lease.token:
            raise LeaseLost(f"The lease {id} was granted anew.")
        return lease

    async def release(self, id: str, token: int | None = None) -> None:
        if id in self.held and token in (None, self.held[id].token):
            del self.held[id]

    async def leases(self) -> list[Lease]:
        return list(self.held.values())

    async def find(self, id: str) -> Lease:
        if id not in self.held:
            raise LeaseUnknown(f"There is no lease {id}.")
        return self.held[id]

    async def close(self) -> None:
        pass


@dataclass
class FakeStore:
    """A store that is shared with others, as a test wants it."""

    failure: str | None = None
    since: float = 0.0
    grace_left_s: float = 0.0
    slots_without_lease: int = 0


class FakeGateway:
    salts = PrefixSalts()

    def __init__(self, models: Mapping[str, Model] | None = None, **server: Any) -> None:
        self.config = Config(models=dict(models or {}), server=Server(**server))
        self.path: Path | None = None
        self.started_at = 1_700_000_000.0
        self.is_draining = self.is_starting = self.is_catching_up = False
        self.now = self.began = NOW
        # How far the wall clock is set ahead.
        self.wall_ahead_s = 0.0
        self.client_stats = ClientStats(self.clock)
        self.limiter = Limiter(wall=self.clock)
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.fallback = CloudFallback(Path(folder), environ={})
        self.catalog, self.slots, self.hub = Catalog(), LiveSlots(), Hub()
        self.metrics, self.activity = Metrics(), Activity()
        self.effects = FakeEffects()
        self.loop = SchedulerLoop(DefaultScheduler(cast(Effects, self.effects)), self.clock)
        self.state = self.loop.scheduler.state
        self.tickets = Tickets(self.loop)
        self.operations, self.mover = FakeOrders(), FakeFailures()
        self.observer, self.edge = FakeDecided(), FakeListening()
        self.memory_watch, self.leasing = FakeWatch(), FakeLeasing()
        self.sharing: FakeStore | None = None
        self.history = History(lambda: replace(sample(self), at=1_700_000_000.0 + self.now - NOW + self.wall_ahead_s))
        self.library = Library(Roots(()), None)
        state = GatewayState(self.config)
        self.resolver = Resolver(
            self.catalog,
            self.library,
            state,
            KnownModels(self.catalog, self.loop, self.slots, self.mover.failures),
            LearnedTimes(Path("/nowhere"), self.loop, self.catalog),
        )
        self.tasks = Tasks(model_facts(self.catalog))
        keep = JobLimits(keep_s=600, count_max=100, bytes_max=1_000_000, unfinished_max=100)
        self.table = OperationTable(OperationFiles(Path(folder)), lambda: keep, self.hub)
        shell = SimpleNamespace(
            table=self.table,
            live=state,
            config=self.config,
            loop=self.loop,
            slots=self.slots,
            hosted_slots=HostedSlots(),
        )
        self.loads = Loads(cast(Shell, shell), self.resolver, cast(Downloads, None), self.operations)
        self.governance = GovernanceGate(lambda: NOTHING_USED, UNWRITTEN)
        self.keys = KeyRing(lambda: None)
        # Tests of their routes have a whole gateway.
        self.downloads = self.updates = self.versions = self.jobs = self.pictures = self.bodies = self.spending = (
            self.usage
        ) = None
        # Parts of which routes ask few things, which are all here.
        self.shell = self.requests = self.remote = self.models = self.hosted_moves = self
        # What was to be forgotten, and what comes of it.
        self.flushed: list[tuple[str, str | None, str | None]] = []
        self.flush_error: Exception | None = None
        self.before_flush: Callable[[], None] = lambda: None
        self.changes = Changes((), (), (), (), (), ())
        self.reload_error: Exception | None = None
        device = Device(GPU, DeviceKind.GPU, 8192, 512)
        self.loop.scheduler.handle(ConfigChanged(NOW, models=self.catalog.fill(self.config), devices=(device,)))

    @property
    def clock(self) -> Callable[[], float]:
        return lambda: self.now

    async def flush(self, slot: SlotId, tenant: str | None, tag: str | None) -> tuple[int, int]:
        self.flushed.append((slot, tenant, tag))
        self.before_flush()
        if self.flush_error is not None:
            raise self.flush_error
        return 3, 5 * 2**20

    async def reread(self) -> Config:
        return loader.load(self.path).config

    async def pin(self, model: ModelId, pinned: bool) -> None:
        assert self.catalog.pin(model, pinned) is not None

    async def reload(self) -> Changes:
        if self.reload_error is not None:
            raise self.reload_error
        return self.changes

    def catalog_id(self, name: str) -> ModelId:
        entry = self.catalog.find(name)
        assert entry is not None
        return entry.id

    # --- what tests set up ------------------------------------------------------------------------------------------

    def add_slot(self, name: str, tier: Tier, *, slot_id: str = "", pid: int | None = None, **facts: Any) -> Slot:
        """A slot on this tier that holds 100 MiB of the GPU."""
        spec = self.state.models[ModelId(name)].spec
        slot = Slot(SlotId(slot_id or f"s-{name}"), spec, {GPU: 100}, tier=tier)
        for fact, value in facts.items():
            setattr(slot, fact, value)
        self.state.add_slot(slot)
        self.state.ledger.hold(slot.id, slot.claim)
        if pid is not None:
            self.slots.live[slot.id] = cast(LiveSlot, SimpleNamespace(child=SimpleNamespace(pid=pid), figures=None))
        return slot

    def lease_of(self, mib: int, *, priority: int) -> LeaseAsked:
        """Another program that takes so much, and would leave for a more urgent request."""
        return LeaseAsked(NOW, LeaseId("lease"), Need(gpu_mib=mib), priority=priority, preemptible=True)

    def add_waiter(
        self, name: str, number: int, *, kind: WaiterKind = WaiterKind.REQUEST, arrived: float = NOW
    ) -> None:
        waiter_id, model_id = RequestId(f"r-{number}"), ModelId(name)
        tenant = TenantId("lab")
        self.state.waitlist.add(Waiter(waiter_id, kind, number, model_id, (model_id,), 1, arrived, tenant))


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


class Client:
    """Asks as the bridge does: a decoded path to route by, and the raw one beside it."""

    def __init__(
        self, gateway: FakeGateway, *, is_admin: bool = True, caller: Caller | None = None, streams_max: int = 200
    ) -> None:
        # Quiet streams look often, so that nothing waits for that.
        streams = Streams(gateway, streams_max, look_s=0.01)
        self.app = make_management(gateway, streams)
        self._is_admin = is_admin
        self.caller = caller

    async def get(self, target: str, **headers: str) -> Answer:
        return await self.ask("GET", target, headers=headers)

    async def post(self, target: str, order: Any = None) -> Answer:
        if order is None:
            return await self.ask("POST", target)
        return await self.ask("POST", target, json.dumps(order).encode(), {"content_type": "application/json"})

    async def ask(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        call = Call(body)
        async with asyncio.timeout(SOON_S):
            await self.app(self._scope(method, target, headers or {}), call.receive, call.send)
        return call.answer

    @asynccontextmanager
    async def stream(self, target: str, **headers: str) -> AsyncIterator[Call]:
        call = Call(b"")
        task = asyncio.ensure_future(self.app(self._scope("GET", target, headers), call.receive, call.send))
        try:
            yield call
        finally:
            call.left.set()
            async with asyncio.timeout(SOON_S):
                await task

    def _scope(self, method: str, target: str, headers: Mapping[str, str]) -> dict[str, Any]:
        return scope(method, target, headers, is_admin=self._is_admin, caller=self.caller)


def scope(
    method: str, target: str, headers: Mapping[str, str], *, is_admin: bool = True, caller: Caller | None = None
) -> dict[str, Any]:
    raw, _, query = target.encode().partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote_to_bytes(raw).decode("utf-8", "replace"),
        "raw_path": raw,
        "query_string": query,
        "root_path": "",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 0),
        "server": None,
        "state": {"request_id": "r-test", "is_admin": is_admin, "caller": caller or (ADMIN if is_admin else PLAIN)},
    }


class Call:
    """One request's two ends."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.left = asyncio.Event()
        self.answer = Answer(0, {}, b"")
        self.is_over = False
        self._news = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = [name for name, _ in message["headers"]]
            assert len(names) == len(set(names)), "a header was given twice"
            self.answer.status = message["status"]
            self.answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert not self.is_over, "something was sent after the end"
            self.answer.body += message.get("body", b"")
            self.is_over = not message.get("more_body", False)
        self._news.set()

    async def until(self, fact: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not fact():
                self._news.clear()
                await self._news.wait()

    async def until_seen(self, text: bytes) -> None:
        await self.until(lambda: text in self.answer.body)
