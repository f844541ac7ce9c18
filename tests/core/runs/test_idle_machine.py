"""On a machine where nothing else is asked for, a model that fits on its own always comes, wherever others are."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.core.events import Limits
from greenroom.core.model import Device, ModelSpec, Need
from tests.core.world import Fate, World, gpu, host, model

HOST_MIB = 12_000
NAMES = "abc"

# Few sizes, so that most models just do not fit beside each other, on a GPU or in the green room.
mib = st.sampled_from([2_000, 4_000, 6_000, 7_000])
needs_asleep = st.one_of(st.none(), *[st.builds(Need, st.sampled_from([0, 1_500]), mib)] * 3)
gpus = st.sampled_from([[8_000], [8_000], [4_000, 8_000]])
green_rooms = st.sampled_from([None, 3_000, 5_000, 5_000, 8_000])


@st.composite
def models(draw: st.DrawFn) -> list[ModelSpec]:
    names = NAMES[: draw(st.integers(2, len(NAMES)))]
    host_mib = st.sampled_from([0, 0, 1_000])
    return [model(name, draw(mib), host_mib=draw(host_mib), asleep=draw(needs_asleep)) for name in names]


def devices(sizes_mib: list[int]) -> list[Device]:
    return [*(gpu(number, size_mib) for number, size_mib in enumerate(sizes_mib)), host(HOST_MIB)]


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(gpus, green_rooms, models(), st.lists(st.sampled_from(NAMES), min_size=2, max_size=12))
def test_each_of_one_request_after_the_other_is_served(
    sizes_mib: list[int], green_room_mib: int | None, specs: list[ModelSpec], asked_for: list[str]
) -> None:
    world = World(specs, devices(sizes_mib), Limits(green_room_mib=green_room_mib, wait_max_s=None))
    there = [name for name in asked_for if name in world.specs]
    for number, name in enumerate(there):
        world.arrive(f"r{number}", name, takes_s=1.0)
        world.run(120.0)
        assert world.fate(f"r{number}") is Fate.SERVED, f"{name} does not come"
