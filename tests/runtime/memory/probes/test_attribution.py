from __future__ import annotations

from greenroom.core.model import DeviceId
from greenroom.runtime.memory.devices import HOST
from greenroom.runtime.memory.readings import Attribution, Owner, attribute
from tests.runtime.memory.readings import gpu, reading, used

A, B = DeviceId("GPU-a"), DeviceId("GPU-b")


def test_processes_of_slots_are_theirs_and_all_others_are_strangers() -> None:
    seen = reading(used("GPU-a", {1: 100, 2: 50, 3: 7_000}), used("GPU-b", {2: 60}))
    shares = attribute(seen, {"s1": Owner({A: 200}), "s2": Owner({A: 50, B: 60})}, {1: "s1", 2: "s2"})
    assert shares.seen == {"s1": {A: 100}, "s2": {A: 50, B: 60}}
    assert shares.foreign_mib == {A: 7_000, B: 0}
    assert shares.strangers == {A: {3: 7_000}, B: {}}
    assert shares.unseen == frozenset()


def test_all_processes_of_one_slot_are_added_up() -> None:
    shares = attribute(reading(used("GPU-a", {1: 100, 2: 50})), {"s1": Owner({A: 200})}, {1: "s1", 2: "s1"})
    assert shares.seen == {"s1": {A: 150}}


def test_a_slot_that_nothing_is_seen_of_has_no_figure_rather_than_none_used() -> None:
    shares = attribute(reading(gpu()), {"s1": Owner({A: 200})}, {})
    assert shares.seen == {"s1": {}}


def test_what_no_process_explains_is_foreign() -> None:
    """Another container's processes may be hidden while ours are seen; memory of an ended one may not be back yet."""
    shares = attribute(reading(used("GPU-a", {1: 100}, besides=900)), {"s1": Owner({A: 200})}, {1: "s1"})
    assert shares.foreign_mib == {A: 900}


def test_processes_that_grew_after_the_total_was_read_make_nothing_negative() -> None:
    shares = attribute(reading(gpu(used_mib=50, processes={1: 100, 2: 30})), {"s1": Owner({A: 200})}, {1: "s1"})
    assert shares.foreign_mib == {A: 30}


def test_a_process_of_an_owner_that_has_gone_is_a_stranger() -> None:
    shares = attribute(reading(used("GPU-a", {1: 100})), {}, {1: "s1"})
    assert shares.foreign_mib == {A: 100}
    assert shares.strangers == {A: {1: 100}}


def test_an_engine_in_a_container_of_a_daemon_does_not_count_twice() -> None:
    seen = reading(used("GPU-a", {1: 5_000, 2: 300}))
    assert attribute(seen, {"s1": Owner({A: 5_000}, hidden=True)}, {}).foreign_mib == {A: 300}


def test_a_hidden_owner_whose_processes_are_seen_after_all_is_not_taken_off_again() -> None:
    seen = reading(used("GPU-a", {1: 5_000, 2: 300}))
    assert attribute(seen, {"s1": Owner({A: 5_000}, hidden=True)}, {1: "s1"}).foreign_mib == {A: 300}


def test_a_hidden_owner_that_does_not_use_its_claim_yet_makes_nothing_negative() -> None:
    assert attribute(reading(gpu()), {"s1": Owner({A: 5_000}, hidden=True)}, {}).foreign_mib == {A: 0}


def test_where_pids_cannot_be_seen_what_was_declared_is_taken_off_the_total() -> None:
    seen = reading(gpu(used_mib=9_000, processes=None))
    shares = attribute(seen, {"s1": Owner({A: 5_000}), "lease": Owner({A: 1_000})}, {})
    assert shares == Attribution({A: 3_000}, {"s1": {}, "lease": {}}, {}, frozenset({A}))


def test_where_pids_cannot_be_seen_a_claim_larger_than_use_makes_nothing_negative() -> None:
    seen = reading(gpu(used_mib=1_000, processes=None))
    assert attribute(seen, {"s1": Owner({A: 5_000})}, {}).foreign_mib == {A: 0}


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
