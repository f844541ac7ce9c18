from __future__ import annotations

import pytest

from greenroom.core.model import Claim, DeviceId
from greenroom.runtime.memory.devices import HOST
from greenroom.runtime.memory.readings import GpuReading, not_back, short_of
from tests.runtime.memory.readings import gpu, reading, used

A, B = DeviceId("GPU-a"), DeviceId("GPU-b")
BEFORE = reading(used("GPU-a", {1: 8_000, 2: 1_000}, besides=300))


@pytest.mark.parametrize(
    ("now", "missing"),
    [
        (used("GPU-a", {2: 1_000}, besides=300), {}),
        (used("GPU-a", {2: 1_000}, besides=8_300), {A: 8_000}),
        (used("GPU-a", {2: 1_000}, besides=2_300), {A: 2_000}),
        # As much as drivers keep.
        (used("GPU-a", {2: 1_000}, besides=700), {}),
        (used("GPU-a", {2: 1_000}, besides=701), {A: 401}),
        # Others came, grew, or left meanwhile.
        (used("GPU-a", {2: 5_000, 3: 6_000}, besides=300), {}),
        (used("GPU-a", {}, besides=300), {}),
        # It is still there.
        (used("GPU-a", {1: 8_000, 2: 1_000}, besides=300), {A: 8_000}),
        # No process can be seen.
        (gpu(used_mib=9_300, processes=None), {A: 8_000}),
        (gpu(used_mib=1_300, processes=None), {}),
    ],
)
def test_memory_not_back_is_what_is_still_used_less_what_others_took(now: GpuReading, missing: Claim) -> None:
    assert not_back(BEFORE, reading(now), {A: 8_000}) == missing


def test_a_little_may_stay_away_of_a_small_one_too() -> None:
    before = reading(used("GPU-a", {1: 100}))
    assert not_back(before, reading(gpu(used_mib=64)), {A: 100}) == {}
    assert not_back(before, reading(gpu(used_mib=65)), {A: 100}) == {A: 65}


def test_only_gpus_that_are_seen_before_and_after_are_compared() -> None:
    assert not_back(BEFORE, reading(gpu("GPU-b", used_mib=9_000)), {A: 8_000, B: 5_000, HOST: 100}) == {}


def test_a_claim_is_short_of_what_is_not_free() -> None:
    now = reading(gpu(used_mib=20_000), gpu("GPU-b", 1, used_mib=23_000))
    assert short_of(now, {A: 4_000, B: 1_001, HOST: 10**6}) == {B: 1}


def test_a_gpu_that_is_more_than_full_has_nothing_free() -> None:
    assert short_of(reading(gpu(used_mib=25_000)), {A: 100}) == {A: 100}
