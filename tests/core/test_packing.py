"""Models of whole parts: where each part goes, on how many GPUs, and what is said if there is no way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from hypothesis import example, given, settings
from hypothesis import strategies as st

from greenroom.core.decide.placement import bounded, options, shortfall
from greenroom.core.model import Claim, Device, DeviceId, DeviceKind, ModelId, ModelSpec, Need
from greenroom.core.packing import pack

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)
ROOMS = st.lists(st.integers(-5, 60), min_size=1, max_size=3)
HOST = DeviceId("host")


def fits(parts: Sequence[int], rooms: Sequence[int], places: Sequence[int]) -> bool:
    used = [sum(part for part, at in zip(parts, places, strict=True) if at == room) for room in range(len(rooms))]
    return all(one <= max(0, room) for one, room in zip(used, rooms, strict=True))


@settings(deadline=None)
@given(SIZES, ROOMS)
@example([3, 3, 2, 2, 2], [6, 6])  # The emptiest room first is no way here.
def test_parts_are_packed_whenever_there_is_a_way(parts: list[int], rooms: list[int]) -> None:
    places = pack(parts, rooms)
    if places is None:
        assert not any(fits(parts, rooms, one) for one in product(range(len(rooms)), repeat=len(parts)))
    else:
        assert fits(parts, rooms, places)


def test_a_search_without_end_is_given_up() -> None:
    assert pack([2] * 63 + [3], [9] * 14) is None


def spec(parts: Sequence[int], devices: Sequence[str] = (), beside_mib: int = 0) -> ModelSpec:
    named = tuple(DeviceId(device) for device in devices)
    return ModelSpec(ModelId("m"), devices=named, can_split=True, parts=tuple(parts), beside_mib=beside_mib)


def machine(*mib: int, host: int = 1_000_000) -> tuple[list[Device], dict[DeviceId, int]]:
    gpus = [Device(DeviceId(f"gpu{number}"), DeviceKind.GPU, size) for number, size in enumerate(mib)]
    devices = [*gpus, Device(HOST, DeviceKind.HOST, host)]
    return devices, {device.id: device.capacity_mib for device in devices}


def placed(
    model: ModelSpec, need: Need, devices: Sequence[Device], most: Mapping[DeviceId, int], free: Claim | None = None
) -> list[Claim]:
    return options(model, need, devices, most if free is None else free, most, most)


def on_gpus(claim: Claim) -> dict[str, int]:
    return {device: mib for device, mib in claim.items() if device != HOST}


def test_one_gpu_is_enough_where_one_holds_it() -> None:
    devices, most = machine(100, 60)
    assert [on_gpus(one) for one in placed(spec([30, 40]), Need(80, 90), devices, most)] == [{"gpu0": 80}]


def test_whole_parts_and_the_rest_are_on_each_of_as_few_gpus_as_can_hold_them() -> None:
    devices, most = machine(50, 50, 50)
    claims = placed(spec([30, 25, 4], beside_mib=2), Need(64, 70), devices, most)
    # Beside the parts there is 64 - 59 and 2 on each.
    assert {tuple(sorted(on_gpus(one).values())) for one in claims} == {(36, 37)}
    assert len(claims) == 3 and all(len(on_gpus(one)) == 2 and one[HOST] == 70 for one in claims)


def test_several_named_devices_are_all_used() -> None:
    devices, most = machine(100, 100, 100)
    (claim,) = placed(spec([30, 25, 4], ["gpu0", "gpu1", "gpu2"]), Need(60), devices, most)
    assert on_gpus(claim) == {"gpu0": 31, "gpu1": 26, "gpu2": 5}


def test_free_memory_decides_where_the_parts_go() -> None:
    devices, most = machine(100, 100)
    (claim,) = placed(spec([70, 50]), Need(120), devices, most, {**most, DeviceId("gpu0"): 55})
    assert on_gpus(claim) == {"gpu0": 50, "gpu1": 70}


def test_what_is_not_free_yet_may_become_free() -> None:
    devices, most = machine(100, 100)
    (claim,) = placed(spec([70, 50]), Need(120), devices, most, {DeviceId("gpu0"): 0, DeviceId("gpu1"): 0})
    assert sorted(on_gpus(claim).values()) == [50, 70]


def test_a_part_that_no_gpu_holds_is_what_is_missing() -> None:
    devices, most = machine(50, 40)
    model = spec([55, 5], beside_mib=1)
    assert placed(model, Need(62), devices, most) == []
    assert shortfall(model, Need(62), devices, most) == (58, 50, 50)


def test_parts_that_fit_one_by_one_and_not_together_are_told_with_the_rest_of_each_gpu() -> None:
    devices, most = machine(50, 40)
    model = spec([40, 30, 15])
    assert placed(model, Need(86), devices, most) == []
    assert shortfall(model, Need(86), devices, most) == (87, 90, 90)
    assert shortfall(spec([45, 39, 20]), Need(104), devices, most) == (104, 90, 90)


def test_a_host_without_room_for_the_copy_is_what_is_missing() -> None:
    devices, most = machine(50, 50, host=10)
    assert shortfall(spec([40, 30]), Need(70, 80), devices, most) == (80, 10, 10)


def test_a_need_is_raised_as_long_as_the_parts_still_fit() -> None:
    devices, most = machine(50, 50)
    model = spec([40, 30])
    assert bounded(model, Need(80, 5), devices, most) == Need(80, 5)
    assert bounded(model, Need(81, 5), devices, most) == Need(0, 5)


@settings(deadline=None)
@given(SIZES, st.lists(st.integers(0, 80), min_size=1, max_size=4), st.integers(0, 10), st.integers(0, 5))
def test_a_claim_holds_every_part_and_fits_its_gpus(parts: list[int], gpus: list[int], work: int, beside: int) -> None:
    devices, most = machine(*gpus)
    model, need = spec(parts, beside_mib=beside), Need(sum(parts) + work)
    for claim in placed(model, need, devices, most):
        shares = list(on_gpus(claim).values())
        assert all(mib <= most[device] for device, mib in claim.items())
        if len(shares) == 1:
            assert shares == [need.gpu_mib]
            continue
        rest = model.rest_mib(need)
        assert sum(shares) == sum(parts) + len(shares) * rest
        assert pack(parts, [share - rest for share in shares]) is not None, "an engine finds the parts in the shares"
