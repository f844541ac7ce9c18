"""Memory arithmetic: the sums that are kept are those of a count from scratch."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.ledger import Ledger
from greenroom.core.model import Claim, Device, DeviceId, DeviceKind, SlotId

GPUS = tuple(DeviceId(f"gpu{number}") for number in range(3))
# The last one is not there: what was placed on it can still leave.
THERE = GPUS[:2]
SLOTS = tuple(SlotId(f"s{number}") for number in range(4))

claims: st.SearchStrategy[Claim] = st.dictionaries(st.sampled_from(GPUS), st.integers(1, 900), max_size=3)
steps = st.tuples(
    st.sampled_from(["hold", "seen", "observe", "promise", "unpromise", "leave", "stay", "release"]),
    st.integers(0, 3),
    claims,
)


@settings(deadline=None)
@given(st.lists(steps, max_size=30), st.frozensets(st.sampled_from(SLOTS)), claims)
def test_free_memory_is_what_no_slot_has_after_any_changes(
    happens: list[tuple[str, int, Claim]], without: frozenset[SlotId], wanted: Claim
) -> None:
    ledger = Ledger()
    ledger.set_devices([Device(device, DeviceKind.GPU, 8_000) for device in THERE])
    held: dict[SlotId, tuple[Claim, Claim]] = {}
    promised: dict[SlotId, Claim] = {}
    keeps: dict[SlotId, Claim] = {}
    for what, number, claim in happens:
        slot = SLOTS[number]
        match what:
            case "hold" | "seen":
                seen = claim if what == "seen" else {}
                ledger.hold(slot, {GPUS[0]: 100}, seen)
                held[slot] = ({GPUS[0]: 100}, seen)
                promised.pop(slot, None)
            case "observe":
                ledger.observe(slot, claim)
                if slot in held:
                    held[slot] = (held[slot][0], claim)
            case "promise":
                ledger.promise(slot, claim)
                promised[slot] = claim
            case "unpromise":
                ledger.unpromise(slot)
                promised.pop(slot, None)
            case "leave":
                ledger.leave(slot, claim)
                keeps[slot] = claim
            case "stay":
                ledger.stay(slot)
                keeps.pop(slot, None)
            case _:
                ledger.release(slot)
                keeps.pop(slot, None)
                held.pop(slot, None)
                promised.pop(slot, None)

    def has(slot: SlotId, device: DeviceId) -> int:
        return max((claim.get(device, 0) for claim in held.get(slot, ())), default=0)

    free, room = ledger.free_mib(without), ledger.room_mib()
    for device in GPUS:
        usable = 8_000 if device in THERE else 0
        taken = {slot: max(has(slot, device), promised.get(slot, {}).get(device, 0)) for slot in SLOTS}
        stays = {slot: keeps[slot].get(device, 0) if slot in keeps else taken[slot] for slot in SLOTS}
        assert free.get(device, 0) == usable - sum(mib for slot, mib in taken.items() if slot not in without)
        assert room.get(device, 0) == usable - sum(stays.values())
        assert {*ledger.slots_on(device)} == {slot for slot in held if has(slot, device)}
    assert ledger.going_from() == {device for slot in keeps for device in GPUS if has(slot, device)}
    fits = all(
        mib <= has(SLOTS[0], device)
        or sum(has(slot, device) for slot in SLOTS[1:]) + mib <= (8_000 if device in THERE else 0)
        for device, mib in wanted.items()
    )
    assert ledger.can_start(SLOTS[0], wanted) == fits


def test_memory_promised_to_a_leaving_slot_counts_as_free() -> None:
    ledger, gpu0 = Ledger(), DeviceId("gpu0")
    ledger.set_devices([Device(gpu0, DeviceKind.GPU, 1_000)])
    ledger.promise(SlotId("comes"), {gpu0: 300})
    ledger.promise(SlotId("stays"), {gpu0: 200})
    assert ledger.free_mib(frozenset({SlotId("comes")})) == {gpu0: 800}
    assert ledger.free_mib(frozenset()) == {gpu0: 500}


def test_what_was_never_promised_need_not_be_taken_back() -> None:
    ledger, gpu0 = Ledger(), DeviceId("gpu0")
    ledger.set_devices([Device(gpu0, DeviceKind.GPU, 1_000)])
    ledger.hold(SlotId("stays"), {gpu0: 200})
    ledger.unpromise(SlotId("stays"))
    ledger.unpromise(SlotId("nobody"))
    assert ledger.free_mib(frozenset()) == {gpu0: 800}
