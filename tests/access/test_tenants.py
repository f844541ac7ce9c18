"""Names of tenants and priorities, as callers send them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from greenroom.access.keys import OTHER, Tenants, cap, parse_priority
from greenroom.config.kinds import Name
from greenroom.core.model import NO_TENANT
from greenroom.errors import BadRequest

# Another process may hold the machine for a while: that says nothing about the code.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_name_is_what_was_sent() -> None:
    assert Tenants().name(b"physics lab/2") == "physics lab/2"


@pytest.mark.parametrize("raw", [None, b""])
def test_a_request_without_a_tenant_name_has_no_tenant(raw: bytes | None) -> None:
    tenants = Tenants()
    assert tenants.name(raw) == NO_TENANT
    assert len(tenants) == 0


@pytest.mark.parametrize(
    "raw",
    [b"a" * 257, "é".encode() * 257, b"a\nb", b"a\x00", b"\x7f", "müller".encode("latin-1"), b"\t", b" lab", b"lab "],
)
def test_name_that_cannot_be_one_is_refused_and_not_kept(raw: bytes) -> None:
    tenants = Tenants()
    with pytest.raises(BadRequest) as refused:
        tenants.name(raw)
    assert refused.value.param == "X-Tenant-ID"
    assert len(tenants) == 0


@pytest.mark.parametrize("name", ["é", "müller", "研究室", "a" * 256, "é" * 256, "physics lab/2"])
def test_a_header_can_name_every_tenant_that_the_configuration_can(name: str) -> None:
    assert TypeAdapter(Name).validate_python(name) == name
    assert Tenants().name(name.encode()) == name


@patient
@given(st.text(max_size=300))
def test_header_and_configuration_agree_on_names(name: str) -> None:
    def is_taken(take: Callable[[], object]) -> bool:
        try:
            take()
        except (BadRequest, ValidationError):
            return False
        return True

    configured = is_taken(lambda: TypeAdapter(Name).validate_python(name))
    assert not name or is_taken(lambda: Tenants().name(name.encode())) == configured


def test_tenants_beyond_the_limit_share_one_name() -> None:
    tenants = Tenants(live_max=3)
    assert [tenants.name(b"%d" % number) for number in range(5)] == ["0", "1", "2", OTHER, OTHER]
    assert tenants.name(b"1") == "1"


def test_idle_tenant_makes_room() -> None:
    clock = Clock()
    tenants = Tenants(live_max=2, idle_s=600, clock=clock)
    tenants.name(b"a")
    tenants.name(b"b")
    clock.now += 400
    tenants.name(b"a")
    clock.now += 300
    # b has been idle for 700 s, a for 300 s.
    assert tenants.name(b"c") == "c"
    assert tenants.name(b"d") == OTHER
    assert tenants.name(b"a") == "a"
    assert len(tenants) == 2


@patient
@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 400)), max_size=200))
def test_never_more_than_allowed_are_kept_and_the_recent_keep_their_name(steps: list[tuple[int, float]]) -> None:
    clock = Clock()
    tenants = Tenants(live_max=5, idle_s=600, clock=clock)
    named_at: dict[int, float] = {}
    for number, pause_s in steps:
        clock.now += pause_s
        name = tenants.name(b"%d" % number)
        assert name in (str(number), OTHER)
        if clock.now - named_at.get(number, -1e9) < 600:
            assert name == str(number)
        if name == str(number):
            named_at[number] = clock.now
        assert len(tenants) <= 5
        # What would be left of forgotten ones shows nowhere else.
        assert set(tenants._used_at) == set(tenants._names)


@pytest.mark.parametrize(
    ("raw", "priority"),
    [
        *((b"high", 0), (b"normal", 1), (b"low", 2), ("HIGH", 0), (b" low ", 2)),
        *((0, 0), (-100, -100), (100, 100), ("7", 7), (b"-3", -3), ("007", 7)),
    ],
)
def test_priority_is_a_word_or_a_number(raw: object, priority: int) -> None:
    assert parse_priority(raw) == priority


@pytest.mark.parametrize(
    "raw",
    [*(101, -101, 10**30, "101", b"-101"), *("", "urgent", "1.5", "1e1", "+1", "١", b"\xb2"), *(True, 1.0, None, [1])],
)
def test_any_other_priority_is_refused_by_name(raw: object) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_priority(raw, param="X-Priority")
    assert refused.value.param == "X-Priority"


@pytest.mark.parametrize(("asked", "given"), [(-5, 1), (0, 1), (1, 1), (2, 2), (100, 100)])
def test_priority_is_capped_at_what_the_caller_may_have(asked: int, given: int) -> None:
    assert cap(asked, priority_max=1) == given
