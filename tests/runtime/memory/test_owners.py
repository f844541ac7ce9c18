"""Which slots and leases were given memory, from a scheduler's tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from greenroom.core.model import DeviceId, LeaseId, ModelId, ModelSpec, OtherLease, Slot, SlotId
from greenroom.core.state import State
from greenroom.runtime.memory.devices import WORKER_GPU_MIB
from greenroom.runtime.memory.readings import Owner
from greenroom.runtime.memory.slot_memory import OTHER_WORD, MemoryOwners
from greenroom.runtime.slots import LiveSlot, LiveSlots
from greenroom.runtime.workers.hosted_slots import HostedSlots
from tests.api.management_rig import FakeGateway

A = DeviceId("GPU-a")
S1, S2 = SlotId("s1"), SlotId("s2")


class Tables:
    def __init__(self) -> None:
        self.state: State = FakeGateway().state
        self.slots = LiveSlots()
        self.lease_pids: dict[SlotId, int] = {}
        self.hosted = HostedSlots()
        self.owners = MemoryOwners(self.state, self.slots, lambda: self.lease_pids, "gate:run:", self.hosted)

    def hold(self, slot_id: SlotId, mib: int, *, lease: str | None = None, seen: int | None = None) -> None:
        spec = ModelSpec(ModelId("m"))
        slot = Slot(slot_id, spec, {A: mib}, lease=None if lease is None else LeaseId(lease))
        self.state.add_slot(slot)
        self.state.ledger.hold(slot_id, {A: mib}, {} if seen is None else {A: seen})

    def live(self, slot_id: SlotId, pid: int, listener: str = "own") -> None:
        entry: Any = SimpleNamespace(config=SimpleNamespace(listener=listener))
        self.slots.live[slot_id] = cast(LiveSlot, SimpleNamespace(child=SimpleNamespace(pid=pid), entry=entry))


def test_a_live_slot_owns_its_process_and_holds_what_was_seen_or_claimed() -> None:
    tables = Tables()
    tables.hold(S1, 500)
    tables.live(S1, 11)
    tables.hold(S2, 500, seen=300)
    assert tables.owners() == {"s1": Owner({A: 500}, frozenset({11})), "s2": Owner({A: 300})}
    tables.live(S1, 11, listener="any")
    assert tables.owners()["s1"] == Owner({A: 500}, frozenset({11}), hidden=True), "it may run elsewhere"


def test_a_lease_belongs_to_its_holders_process_or_is_hidden_if_that_is_unknown() -> None:
    tables = Tables()
    tables.hold(S1, 500, lease="here")
    tables.hold(S2, 500, lease="there")
    tables.lease_pids[S1] = 42
    here, there = Owner({A: 500}, frozenset({42}), claim={A: 500}), Owner({A: 500}, hidden=True)
    assert tables.owners() == {"s1": here, "s2": there}


def test_leases_of_other_gateways_are_hidden() -> None:
    tables = Tables()
    tables.state.ledger.set_others([OtherLease(LeaseId("l9"), "another gateway", {A: 700}, 1, False)])
    assert tables.owners() == {f"{OTHER_WORD}l9": Owner({A: 700}, hidden=True)}


def test_every_try_to_start_a_slot_belongs_to_it_and_other_runs_to_none() -> None:
    owners = Tables().owners
    assert owners.by_identity("gate:run:s1.1") == "s1"
    assert owners.by_identity("gate:run:s1.12") == "s1"
    assert owners.by_identity("gate:earlier:s1.1") is None
    assert owners.by_identity("gate:run:") is None


def test_hosted_slots_live_in_their_worker_which_is_an_owner_itself() -> None:
    tables = Tables()
    tables.hold(S1, 500)
    tables.hold(S2, 500)
    worker: Any = SimpleNamespace(id="worker1", pid=7, key=SimpleNamespace(gpus=(A,)))
    spare: Any = SimpleNamespace(id="worker2", pid=8, key=None)
    tables.hosted.workers = {"worker1": worker, "worker2": spare}
    told: Any = SimpleNamespace(worker=worker, told={A: 400})
    orphan: Any = SimpleNamespace(worker=None, told={})
    tables.hosted.there = {S1: told, S2: orphan}
    assert tables.owners() == {
        "s1": Owner({A: 500}, host="worker1", told={A: 400}),
        "s2": Owner({A: 500}, host=""),
        "worker1": Owner({A: WORKER_GPU_MIB}, frozenset({7}), is_host=True),
        "worker2": Owner({}, frozenset({8}), is_host=True),
    }
    assert tables.owners.by_identity("gate:run:worker1.1") == "worker1"
