"""Whose memory it is that was seen, and whether it is back."""

from __future__ import annotations

import pytest

from greenroom.core.model import Claim, DeviceId
from greenroom.runtime.memory.devices import HOST
from greenroom.runtime.memory.readings import Attribution, GpuReading, Owner, attribute, not_back, short_of
from tests.runtime.memory.readings import gpu, reading, used

A, B = DeviceId("GPU-a"), DeviceId("GPU-b")


def test_processes_of_slots_are_theirs_and_all_others_are_strangers() -> None:
    seen = reading(used("GPU-a", {1: 100, 2: 50, 3: 7_000}), used("GPU-b", {2: 60}))
    shares = attribute(seen, {"s1": Owner({A: 200}), "s2": Owner({A: 50, B: 60})}, {1: "s1", 2: "s2"})
    assert shares.seen == {"s1": {A: 100}, "s2": {A: 50, B: 60}}
    assert shares.foreign_mib == {A: 7_000, B: 0}
    assert shares.strangers == {A: {3: 7_000}, B: {}}
    assert shares.unseen == frozenset()


HIDDEN = {"s1": Owner({A: 5_000}, hidden=True)}
CLAIMED = {"s1": Owner({A: 200})}


@pytest.mark.parametrize(
    ("shown", "owners", "pids", "seen", "foreign_mib"),
    [
        pytest.param(used("GPU-a", {1: 100, 2: 50}), CLAIMED, {1: "s1", 2: "s1"}, {A: 150}, 0, id="all of one slot"),
        pytest.param(gpu(), CLAIMED, {}, {}, 0, id="nothing is seen: no figure rather than none used"),
        # Another container's processes may be hidden while ours are seen; memory of an ended one may not be back yet.
        pytest.param(used("GPU-a", {1: 100}, besides=900), CLAIMED, {1: "s1"}, {A: 100}, 900, id="no process explains"),
        pytest.param(
            gpu(used_mib=50, processes={1: 100, 2: 30}),
            CLAIMED,
            {1: "s1"},
            {A: 100},
            30,
            id="processes that grew after the total was read make nothing negative",
        ),
        pytest.param(used("GPU-a", {1: 5_000, 2: 300}), HIDDEN, {}, {}, 300, id="an engine of a daemon counts once"),
        pytest.param(
            used("GPU-a", {1: 5_000, 2: 300}),
            HIDDEN,
            {1: "s1"},
            {A: 5_000},
            300,
            id="a hidden owner that is seen after all is not taken off again",
        ),
        pytest.param(gpu(), HIDDEN, {}, {}, 0, id="a hidden owner that does not use its claim yet"),
        pytest.param(
            gpu(used_mib=1_000, processes=None), {"s1": Owner({A: 5_000})}, {}, {}, 0, id="no pids, less use than claim"
        ),
    ],
)
def test_what_is_not_seen_to_be_a_slots_is_foreign(
    shown: GpuReading, owners: dict[str, Owner], pids: dict[int, str], seen: Claim, foreign_mib: int
) -> None:
    shares = attribute(reading(shown), owners, pids)
    assert (shares.seen, shares.foreign_mib) == ({"s1": seen}, {A: foreign_mib})


def test_a_process_of_an_owner_that_has_gone_is_a_stranger() -> None:
    shares = attribute(reading(used("GPU-a", {1: 100})), {}, {1: "s1"})
    assert shares.foreign_mib == {A: 100} and shares.strangers == {A: {1: 100}}


def test_where_pids_cannot_be_seen_what_was_declared_is_taken_off_the_total() -> None:
    seen = reading(gpu(used_mib=9_000, processes=None))
    shares = attribute(seen, {"s1": Owner({A: 5_000}), "lease": Owner({A: 1_000})}, {})
    assert shares == Attribution({A: 3_000}, {"s1": {}, "lease": {}}, {}, frozenset({A}))


def test_leases_of_one_program_share_what_it_uses_and_nothing_counts_twice() -> None:
    owners = {
        name: Owner({A: 4_000}, frozenset({1}), claim=claim)
        for name, claim in (("first", {A: 4_000}), ("elsewhere", {B: 9}), ("second", {A: 3_000}))
    }
    for use, first, second in ((1_000, 1_000, 0), (7_000, 4_000, 3_000), (8_000, 4_000, 4_000)):
        shares = attribute(reading(used("GPU-a", {1: use, 2: 50})), owners, {1: "second"})
        assert shares.seen == {"first": {A: first}, "elsewhere": {}, "second": {A: second}}
        assert shares.foreign_mib == {A: 50}


def test_what_a_program_uses_where_none_of_its_leases_is_counts_once() -> None:
    owners = {name: Owner({A: 10}, frozenset({1}), claim={A: 10}) for name in ("first", "second")}
    assert attribute(reading(used("GPU-b", {1: 70})), owners, {1: "first"}).seen == {"first": {}, "second": {B: 70}}


def test_slots_that_share_a_process_have_what_it_says_of_them_and_the_rest_is_its_own() -> None:
    owners = {
        "s1": Owner({A: 500}, host="w1", told={A: 400, HOST: 90}),
        "s2": Owner({A: 500}, host="w1", told={A: 100}),
        "s3": Owner({HOST: 50}, host="", told={HOST: 50}),
        "w1": Owner({A: 300}, frozenset({1}), is_host=True),
    }
    shares = attribute(reading(used("GPU-a", {1: 800, 2: 70}), used("GPU-b", {1: 20})), owners, {1: "w1"})
    assert shares.seen == {"s1": {A: 400, HOST: 90}, "s2": {A: 100}, "s3": {HOST: 50}}
    assert shares.own_mib == {A: 300, B: 20}
    assert shares.foreign_mib == {A: 70, B: 0} and shares.strangers == {A: {2: 70}, B: {}}


def test_a_process_that_is_seen_with_less_than_it_says_has_nothing_of_its_own() -> None:
    owners = {"s1": Owner({A: 500}, host="w1", told={A: 400}), "w1": Owner({}, frozenset({1}), is_host=True)}
    shares = attribute(reading(used("GPU-a", {1: 300})), owners, {1: "w1"})
    assert shares.own_mib == {A: 0} and shares.seen == {"s1": {A: 400}}


def test_where_pids_cannot_be_seen_a_shared_process_is_taken_to_use_what_is_set_aside_for_it() -> None:
    owners = {"s1": Owner({A: 400}, host="w1", told={A: 400}), "w1": Owner({A: 800}, frozenset({1}), is_host=True)}
    shares = attribute(reading(gpu(used_mib=1_500, processes=None)), owners, {})
    assert shares.foreign_mib == {A: 300} and shares.own_mib == {}


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
