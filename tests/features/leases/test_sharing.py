"""A gateway's leases in a store that others use: entered, kept, entered again, given back, and recalled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from greenroom.core.events import Event, Limits, MemoryChanged
from greenroom.core.model import (
    Claim,
    Device,
    DeviceId,
    DeviceKind,
    ModelId,
    ModelSpec,
    Move,
    MoveId,
    MoveKind,
    Slot,
    SlotId,
)
from greenroom.core.policy import make_policy
from greenroom.core.state import ModelRecord, State
from greenroom.core.state_view import StateView
from greenroom.errors import StoreDown
from greenroom.features.leases.holders import Recalls
from greenroom.features.leases.sharing import Sharing
from greenroom.leases.records import Lease, LeaseAsk
from greenroom.leases.shared.stored import Membership, PublishReply, SlotAsk
from greenroom.runtime.memory.readings import GpuReading, HostReading, Reading
from greenroom.runtime.moves.admission import NoGrant
from greenroom.runtime.observer import Hub
from greenroom.runtime.scheduler_loop import SchedulerLoop
from tests.sim.shared.book import Book, BookStore
from tests.waiting import until

GPU = DeviceId("gpu0")
TTL_S = 30.0


@dataclass
class FakeWatch:
    post_and_look: Callable[[Event], None]
    reading = Reading((GpuReading(GPU, 0, "fake", 10_000, 0, {}),), HostReading(0, 0, 0, 0))

    async def look_now(self) -> None:
        return

    def nudge(self) -> None:
        return


class NotingStore(BookStore):
    """Notes what was last offered, also if the store does not hear it."""

    offered: Mapping[str, int] = {}
    publishes = 0

    async def publish(self, gateway: str, devices: Mapping[str, int], prices: Mapping[str, float]) -> PublishReply:
        self.offered = devices
        self.publishes += 1
        return await super().publish(gateway, devices, prices)


@dataclass
class Rig:
    """One gateway on a book of its own clock; questions fail while `is_down`."""

    now: float = 1_000.0
    is_down: bool = False
    fails: Exception | None = None
    posted: list[Event] = field(default_factory=list)
    told: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.book = Book(lambda: self.now)
        self.state = State(make_policy(Limits()))
        self.state.ledger.set_devices([Device(GPU, DeviceKind.GPU, 10_000, 500)])
        self.store, self.other = self.client(), self.client()
        self.sharing = Sharing(
            Membership(self.store, "me", TTL_S, holder=None),
            cast(SchedulerLoop, SimpleNamespace(view=StateView(self.state), clock=lambda: self.now)),
            FakeWatch(self._post),
            cast(Hub, SimpleNamespace(publish=lambda what, facts: self.told.append((what, dict(facts))))),
        )

    def client(self) -> NotingStore:
        return NotingStore(lambda: self.book, self._asks, ttl_s=TTL_S, grace_s=0)

    async def _asks(self, question: Any) -> bytes:
        if self.is_down:
            raise StoreDown("it cannot be reached")
        if self.fails is not None:
            raise self.fails
        said: bytes = question()
        return said

    def _post(self, event: Event) -> None:
        self.posted.append(event)
        if isinstance(event, MemoryChanged):
            if event.leases is not None:
                self.state.ledger.set_others(event.leases)
            if event.store_is_down is not None:
                self.state.store_is_down = event.store_is_down

    def slot(self, name: str, mib: int, *, planned: bool = False) -> Move:
        """A slot the scheduler knows of, and the move that brings it."""
        slot = Slot(SlotId(name), ModelSpec(ModelId(f"m-{name}")), {GPU: mib})
        self.state.add_model(ModelRecord(slot.spec, slot.spec.need))
        slot.planned = MoveKind.LOAD if planned else None
        self.state.add_slot(slot)
        if not planned:
            self.state.ledger.hold(slot.id, slot.claim)
        return self.move(name, MoveKind.LOAD, slot.claim)

    def move(self, name: str, kind: MoveKind, claim: Claim, makes_room_for: str | None = None) -> Move:
        newcomer = None if makes_room_for is None else SlotId(makes_room_for)
        slot = self.state.slots[SlotId(name)]
        if newcomer is not None:
            slot.leaving_for, slot.leaving_to = newcomer, slot.tier
        return Move(MoveId(f"{kind.value} {name}"), kind, slot.id, slot.model, 1, claim, self.now, newcomer)

    async def beat(self) -> None:
        await self.sharing.beat()

    def claims(self) -> dict[str, tuple[str, int]]:
        return {record["id"]: (record["state"], record["claim"].get(GPU, 0)) for record in self.book.records()}


@pytest.fixture
async def rig() -> Rig:
    rig = Rig()
    await rig.beat()
    return rig


async def test_a_load_is_held_before_it_starts_and_given_back_when_it_is_over(rig: Rig) -> None:
    move = rig.slot("s1", 4_000)
    await rig.sharing.slots.enter(move)
    assert rig.claims() == {"me/s1": ("held", 4_000)}
    await rig.sharing.slots.leave(move.slot)
    assert rig.claims() == {}


async def test_what_another_gateway_holds_is_refused(rig: Rig) -> None:
    await rig.other.hold(SlotAsk("you/s1", "m", {GPU: 6_000}), gateway="you")
    with pytest.raises(NoGrant, match="3,500 of 9,500"):
        await rig.sharing.slots.enter(rig.slot("s1", 4_000))
    await rig.sharing.slots.leave(SlotId("s1"))
    await rig.beat()
    (other,) = rig.state.ledger.others
    assert (other.holder, dict(other.claim), other.is_model) == ("m", {GPU: 6_000}, True)


async def test_a_slot_without_memory_needs_no_store(rig: Rig) -> None:
    rig.is_down = True
    await rig.sharing.slots.enter(rig.slot("s1", 0))
    await rig.sharing.slots.confirm(SlotId("s1"))


async def test_a_swap_is_entered_before_its_victim_is_touched_and_the_victim_releases_into_it(rig: Rig) -> None:
    await rig.sharing.slots.enter(rig.slot("old", 6_000))
    new = rig.slot("new", 8_000, planned=True)
    await rig.sharing.slots.make_way(rig.move("old", MoveKind.UNLOAD, {}, "new"))
    assert rig.claims() == {"me/old": ("held", 6_000), "me/new": ("pending", 3_500)}
    await rig.sharing.slots.leave(SlotId("old"))
    assert rig.claims() == {"me/new": ("pending", 8_000)}
    rig.state.slots[SlotId("new")].planned = None
    await rig.sharing.slots.enter(new)
    assert rig.claims() == {"me/new": ("held", 8_000)}


@pytest.mark.parametrize("is_down", [False, True])
async def test_a_victim_that_would_leave_in_vain_is_not_touched(rig: Rig, is_down: bool) -> None:
    await rig.sharing.slots.enter(rig.slot("old", 3_000))
    await rig.other.hold(SlotAsk("you/s1", "m", {GPU: 5_000}), gateway="you")
    rig.slot("new", 8_000, planned=True)
    rig.is_down = is_down
    with pytest.raises(NoGrant):
        await rig.sharing.slots.make_way(rig.move("old", MoveKind.UNLOAD, {}, "new"))


async def test_a_plan_that_is_called_off_leaves_nothing_pending(rig: Rig) -> None:
    await rig.sharing.slots.enter(rig.slot("old", 6_000))
    rig.slot("new", 8_000, planned=True)
    await rig.sharing.slots.make_way(rig.move("old", MoveKind.UNLOAD, {}, "new"))
    rig.state.drop_slot(rig.state.slots[SlotId("new")])
    await rig.beat()
    assert rig.claims() == {"me/old": ("held", 6_000)}


async def test_a_gateway_that_stood_still_confirms_its_lease_before_an_engine_starts(rig: Rig) -> None:
    await rig.sharing.slots.enter(rig.slot("s1", 4_000))
    await rig.sharing.slots.confirm(SlotId("s1"))
    # In steps, as time passes for the store: another gateway uses it meanwhile.
    for _ in range(6):
        rig.now += TTL_S / 3
        await rig.other.leases()
    await rig.other.hold(SlotAsk("you/s1", "m", {GPU: 9_000}), gateway="you")
    with pytest.raises(NoGrant, match="lost"):
        await rig.sharing.slots.confirm(SlotId("s1"))


async def lapsed(rig: Rig, *others: SlotAsk) -> None:
    """In steps, as time passes for the store: our leases lapse, and other gateways take these at once."""
    for _ in range(6):
        rig.now += TTL_S / 3
        await rig.other.leases()
    for ask in others:
        await rig.other.hold(ask, gateway="you")


def left(rig: Rig) -> list[SlotId]:
    """Slots that the scheduler was told to make leave."""
    return [slot for event in rig.posted if isinstance(event, MemoryChanged) for slot in event.taken]


async def test_a_lease_that_was_lost_is_held_again_at_once_where_its_place_is_free(rig: Rig) -> None:
    await rig.sharing.slots.enter(rig.slot("s1", 6_000))
    await lapsed(rig, SlotAsk("you/s1", "m", {GPU: 3_000}))
    await rig.beat()
    assert rig.sharing.slots_without_lease == 0 and rig.claims()["me/s1"] == ("held", 6_000)
    assert not left(rig)


async def test_a_slot_whose_place_another_gateway_has_taken_leaves_and_says_so(rig: Rig) -> None:
    await rig.sharing.slots.enter(rig.slot("s1", 4_000))
    await lapsed(rig, SlotAsk("you/s1", "theirs", {GPU: 9_000}))
    await rig.beat()
    await rig.beat()
    assert left(rig) == ["s1"] and rig.sharing.slots.is_taken(SlotId("s1"))
    (facts,) = [facts for what, facts in rig.told if what == "lease_lost"]
    assert facts == {"slot": "s1", "model": "m-s1", "lease": "me/s1", "holders": ["theirs"]}
    await rig.sharing.slots.leave(SlotId("s1"))
    await rig.beat()
    assert rig.claims() == {"you/s1": ("held", 9_000)} and rig.sharing.slots_without_lease == 0


async def test_of_several_slots_only_those_leave_that_no_longer_fit(rig: Rig) -> None:
    await rig.sharing.slots.enter(rig.slot("s1", 4_000))
    await rig.sharing.slots.enter(rig.slot("s2", 5_000))
    await lapsed(rig, SlotAsk("you/s1", "theirs", {GPU: 5_000}))
    await rig.beat()
    assert left(rig) == ["s2"] and rig.claims()["me/s1"] == ("held", 4_000)


async def test_a_slot_stays_where_another_gateway_takes_its_engine_for_a_strangers(rig: Rig) -> None:
    await rig.sharing.slots.enter(rig.slot("s1", 4_000))
    await lapsed(rig, SlotAsk("you/s1", "theirs", {GPU: 5_000}))
    hold = rig.store.hold

    async def after_theirs(*words: Any, **more: Any) -> Any:
        await rig.other.publish("you", {GPU: 5_500}, {})
        return await hold(*words, **more)

    rig.store.hold = after_theirs  # type: ignore[method-assign]
    await rig.beat()
    assert rig.sharing.slots_without_lease == 1 and not left(rig)
    rig.store.hold = hold  # type: ignore[method-assign]
    await rig.beat()
    assert rig.sharing.slots_without_lease == 0 and not left(rig)


async def test_a_lease_that_is_gone_is_noticed_by_the_beat_that_reads_of_it(rig: Rig) -> None:
    await rig.sharing.slots.enter(rig.slot("s1", 4_000))
    await rig.beat()
    # An operator may have released it: no renewal is due for long.
    await rig.other.release("me/s1", kind="slot")
    await rig.other.hold(SlotAsk("you/s1", "theirs", {GPU: 9_000}), gateway="you")
    for _ in range(2):
        await rig.beat()
    assert left(rig) == ["s1"]


async def test_an_engine_that_uses_more_than_it_was_given_is_told_of_with_that(rig: Rig) -> None:
    move = rig.slot("s1", 4_000)
    await rig.sharing.slots.enter(move)
    rig.state.ledger.observe(move.slot, {GPU: 4_020})
    await rig.beat()
    assert rig.claims() == {"me/s1": ("held", 4_000)}, "a little is no news"
    rig.state.ledger.observe(move.slot, {GPU: 5_000})
    await rig.beat()
    assert rig.claims() == {"me/s1": ("held", 5_000)}


async def test_what_is_written_down_for_this_gateway_and_unknown_to_it_is_given_back(rig: Rig) -> None:
    await rig.other.hold(SlotAsk("me/never", "m", {GPU: 1_000}), gateway="me")
    await rig.beat()
    await rig.beat()
    assert rig.claims() == {}


async def test_what_ends_while_the_store_is_down_is_given_back_when_it_is_up(rig: Rig) -> None:
    await rig.sharing.slots.enter(rig.slot("s1", 4_000))
    rig.is_down = True
    with pytest.raises(StoreDown):
        await rig.beat()
    await rig.sharing.slots.leave(SlotId("s1"))
    assert rig.claims() == {"me/s1": ("held", 4_000)}
    rig.is_down = False
    await rig.beat()
    assert rig.claims() == {}


async def test_an_outage_is_told_once_at_its_beginning_and_once_at_its_end(rig: Rig) -> None:
    rig.is_down, rig.told[:] = True, []
    await rig.sharing.open()
    try:
        assert rig.state.store_is_down and rig.sharing.failure is not None
        rig.is_down = False
        rig.sharing.heartbeat.hurry()
        await until(lambda: rig.sharing.failure is None, "it is heard of")
        assert not rig.state.store_is_down
        assert [facts["up"] for what, facts in rig.told if what == "lease_store"] == [False, True]
    finally:
        await rig.sharing.close()


async def test_beats_that_fail_are_told_once_and_go_on(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    await rig.sharing.open()
    rig.fails, begun = RuntimeError("can't start new thread"), rig.store.publishes
    await until(lambda: rig.store.publishes > begun + 2, "beats go on")
    rig.fails = None
    await until(lambda: rig.store.publishes > begun + 4, "beats go on")
    await rig.sharing.close()
    assert capsys.readouterr().err.count("failed and is tried again") == 1


async def test_margin_and_strangers_are_not_offered(rig: Rig) -> None:
    rig.state.ledger.set_foreign({GPU: 1_500})
    await rig.beat()
    lease = await rig.other.acquire(LeaseAsk("t", "train", 8_000))
    assert lease.claim == {GPU: 8_000}


async def test_what_an_engine_without_a_lease_uses_is_not_offered(rig: Rig) -> None:
    await rig.sharing.slots.enter(rig.slot("s1", 4_000))
    await lapsed(rig, SlotAsk("you/s1", "m", {GPU: 6_000}))
    await rig.beat()
    await rig.other.release("you/s1", kind="slot")
    rig.is_down = True
    with pytest.raises(StoreDown):
        await rig.beat()
    assert rig.sharing.slots_without_lease == 1
    with pytest.raises(StoreDown):
        await rig.beat()
    assert rig.store.offered == {GPU: 5_500}
    rig.is_down = False
    await rig.sharing.slots.leave(SlotId("s1"))
    await rig.beat()
    assert rig.store.offered == {GPU: 9_500}


async def test_what_hurries_while_leases_are_read_is_looked_at_with_the_next_beat(rig: Rig) -> None:
    reads, leases = 0, rig.store.leases

    async def read_and_hurry() -> Any:
        nonlocal reads
        reads += 1
        if reads == 1:
            rig.sharing.heartbeat.hurry()
        return await leases()

    rig.store.leases = read_and_hurry  # type: ignore[method-assign]
    rig.sharing.heartbeat.hurry()
    for _ in range(3):
        await rig.beat()
    assert reads == 2, "once for each call that hurried, though the store has nothing new"


async def test_leases_that_could_not_be_read_are_read_with_the_next_beat(rig: Rig) -> None:
    reads, leases = 0, rig.store.leases

    async def fail_once() -> Any:
        nonlocal reads
        reads += 1
        if reads == 1:
            raise RuntimeError("not today")
        return await leases()

    rig.store.leases = fail_once  # type: ignore[method-assign]
    rig.sharing.heartbeat.hurry()
    with pytest.raises(RuntimeError):
        await rig.beat()
    await rig.beat()
    assert reads == 2


@dataclass
class Recalled:
    now: float = 100.0
    told: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recalls = Recalls(
            cast(SchedulerLoop, SimpleNamespace(clock=lambda: self.now)),
            cast(Hub, SimpleNamespace(publish=lambda what, facts: self.told.append((what, facts["lease"])))),
        )

    def seen(self, *leases: Lease) -> list[tuple[str, Any]]:
        """What is told when these are all there are."""
        self.told = []
        self.recalls.note(leases)
        self.recalls.look()
        return self.told


def lease(recall_in_s: float | None, token: int = 1, state: str = "held") -> Lease:
    return Lease("job", "train", token, {"gpu0": 1}, 2, True, state, 30.0, 30.0, recall_in_s, None, "program")


def test_a_recall_is_told_once_and_once_more_when_it_is_overdue() -> None:
    one = Recalled()
    assert one.seen(lease(None)) == []
    assert one.seen(lease(5.0)) == [("recall", "job")]
    one.now += 4.0
    assert one.seen(lease(1.0)) == []
    one.now += 1.5
    assert one.seen(lease(-0.5)) == [("lease_overdue", "job")]
    assert one.seen(lease(-1.0)) == []


def test_overdue_is_told_also_where_nothing_else_has_changed() -> None:
    one = Recalled()
    one.seen(lease(5.0))
    one.now += 6.0
    one.told = []
    one.recalls.look()
    assert one.told == [("lease_overdue", "job")]


def test_one_that_has_left_is_forgotten_and_may_be_recalled_again() -> None:
    one = Recalled()
    one.seen(lease(5.0))
    one.now += 6.0
    assert one.seen() == []
    assert one.seen(lease(5.0, token=2)) == [("recall", "job")]
    assert one.seen(lease(5.0, token=3)) == [("recall", "job")]
    assert one.seen(lease(5.0, token=4, state="waiting")) == []
