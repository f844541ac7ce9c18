"""Windows, quotas and holds, by a clock that the test sets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.access.budgets import Window
from greenroom.access.keys import ANYONE, Caller, Keys
from greenroom.access.limits import Limiter, Quota, QuotaHold, reset_at
from greenroom.config.schema import Config, RateLimits, TenantLimits
from greenroom.core.model import TenantId
from greenroom.errors import RateLimited

MINUTE = 60.0
START = 1_000_000 * MINUTE


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


# --- the window -------------------------------------------------------------------------------------------------------


def taken(window: Window, now: float) -> bool:
    """Take one if there is one."""
    if window.left(now) < 1:
        return False
    window.take(1, now)
    return True


def test_limit_is_reached_in_a_minute_and_not_exceeded() -> None:
    window = Window(3)
    assert [taken(window, START + second) for second in (0, 1, 2, 3, 59)] == [True, True, True, False, False]


def test_half_of_the_next_minute_gives_back_half_of_the_limit() -> None:
    window = Window(10)
    window.take(10, START + 59)
    assert window.left(START + MINUTE) == 0
    assert window.left(START + MINUTE + 30) == 5
    assert window.left(START + 2 * MINUTE) == 10


def test_a_minute_without_use_forgets_everything() -> None:
    window = Window(10)
    window.take(10, START)
    assert window.left(START + 2 * MINUTE) == 10


def test_clock_set_back_gives_nothing_twice() -> None:
    window = Window(2)
    window.take(2, START + MINUTE)
    assert window.left(START) <= 0


def test_clock_set_back_over_the_end_of_a_minute_gives_nothing_twice() -> None:
    window = Window(2)
    window.take(2, START + 59)
    assert window.left(START + MINUTE) <= 0
    assert window.left(START + 59) <= 0


@pytest.mark.parametrize("back_s", [MINUTE, 3_600.0])
def test_clock_set_back_holds_up_for_two_minutes_at_most(back_s: float) -> None:
    window = Window(2)
    window.take(2, START)
    window.take(2, START + MINUTE)
    now = START + MINUTE - back_s
    assert window.wait_s(1, now) <= 2 * MINUTE
    assert window.left(now) <= 0
    assert window.left(now + 2 * MINUTE) == 2


def test_unused_is_given_back_to_the_minute_in_which_it_was_taken() -> None:
    window = Window(10)
    minute = window.take(8, START)
    window.give_back(5, minute, START + 30)
    assert window.left(START + 30) == 7
    window.give_back(1, minute, START + MINUTE)
    assert window.left(START + MINUTE) == 8, "of the minute before, the 2 that were used count"
    window.take(4, START + MINUTE)
    window.give_back(9, minute, START + MINUTE)
    assert window.left(START + MINUTE) == 6, "more than was taken is never given back, nor from another minute"
    window.give_back(2, minute, START + 2 * MINUTE)
    assert window.left(START + 2 * MINUTE) == 6, "a minute that counts no more has nothing to give back to"


LIMITS = st.integers(1, 40)
# Steps of an eighth of a second: exact as floats.
STEPS = st.lists(st.integers(0, 400).map(lambda eighths: eighths / 8), max_size=200)


@given(LIMITS, STEPS)
def test_never_above_the_limit_in_a_minute_nor_above_its_part_in_any_span(limit: int, steps: list[float]) -> None:
    """Against an exact count: in d seconds, at most limit x (1 + d / 60); in a minute of the clock, at most limit."""
    window, now, admitted = Window(limit), START, []
    for step in steps:
        now += step
        if taken(window, now):
            admitted.append(now)
    for first, start in enumerate(admitted):
        of_minute = [at for at in admitted if at // MINUTE == start // MINUTE]
        assert len(of_minute) <= limit
        for last, end in enumerate(admitted[first:], first):
            if end - start <= MINUTE:
                assert last - first + 1 <= limit * (1 + (end - start) / MINUTE) + 1e-6


@given(LIMITS, STEPS)
def test_never_refuses_what_an_exact_sliding_count_of_two_minutes_would_allow(limit: int, steps: list[float]) -> None:
    """It may be stricter than an exact sliding minute, but not than both minutes counted in full."""
    window, now, admitted = Window(limit), START, list[float]()
    for step in steps:
        now += step
        recent = [at for at in admitted if at // MINUTE >= now // MINUTE - 1]
        if taken(window, now):
            admitted.append(now)
        else:
            assert len(recent) >= limit


@given(LIMITS, STEPS, st.integers(1, 40))
def test_after_the_wait_it_says_so_much_can_be_taken(limit: int, steps: list[float], amount: int) -> None:
    window, now = Window(limit), START
    for step in steps:
        now += step
        taken(window, now)
    wait_s = window.wait_s(amount, now)
    assert 0 <= wait_s <= 2 * MINUTE
    assert window.left(now + wait_s + 0.001) >= min(amount, limit)


def test_reset_is_the_end_of_the_minute() -> None:
    assert reset_at(START + 0.1) == reset_at(START + 59.9) == START + MINUTE


# --- tenants, keys and models -----------------------------------------------------------------------------------------


def caller(name: str, tenant: str, **limits: Any) -> Caller:
    return Caller(name, TenantId(tenant), 0, admin=False, limits=RateLimits(**limits) if limits else None)


def limiter(clock: Callable[[], float], callers: tuple[Caller, ...] = (), **tenants: dict[str, int]) -> Limiter:
    made = Limiter(wall=clock)
    made.configure(Config(tenants={name: TenantLimits(**said) for name, said in tenants.items()}), callers)
    return made


def admitted(limiter: Limiter, by: Caller, tenant: bytes | None = None) -> bool:
    try:
        limiter.admit(by, tenant)
    except RateLimited:
        return False
    return True


def refusal(limiter: Limiter, by: Caller, tenant: bytes | None = None) -> RateLimited:
    with pytest.raises(RateLimited) as refused:
        limiter.admit(by, tenant)
    return refused.value


def test_nothing_is_on_where_nothing_is_limited() -> None:
    made = limiter(Clock())
    assert not made.is_on
    assert made.admit(ANYONE, b"lab") is None
    assert made.charge_of(None, ANYONE, b"lab", [made.of_model("m")]) is None


def test_refusal_tells_limit_remaining_and_end_of_the_minute() -> None:
    clock = Clock()
    made = limiter(clock, lab={"requests_per_minute": 2})
    clock.now += 20
    assert admitted(made, ANYONE, b"lab") and admitted(made, ANYONE, b"lab")
    error = refusal(made, ANYONE, b"lab")
    assert error.message == "Tenant lab exceeded 2 req/min"
    assert error.beside == {"limit": 2, "remaining": 0, "resetAt": START + MINUTE}
    # The first of the two is free when half of the next minute has passed.
    assert error.retry_after_s == pytest.approx(70)
    clock.now += 70.001
    assert admitted(made, ANYONE, b"lab")


def test_tenants_of_keys_have_the_default_each_to_itself() -> None:
    one, two = caller("k1", "one"), caller("k2", "two")
    made = limiter(Clock(), (one, two), default={"requests_per_minute": 1})
    assert admitted(made, one) and admitted(made, two)
    assert not admitted(made, one)


def test_tenants_made_up_without_keys_share_the_default() -> None:
    made = limiter(Clock(), default={"requests_per_minute": 2}, lab={"requests_per_minute": 1})
    assert admitted(made, ANYONE, b"made-up-1") and admitted(made, ANYONE)
    assert not admitted(made, ANYONE, b"made-up-2")
    assert admitted(made, ANYONE, b"lab"), "a tenant that is configured has limits of its own"
    assert not admitted(made, ANYONE, b"lab")


def test_two_keys_share_what_their_tenant_may_and_each_has_its_own() -> None:
    small, large = caller("small", "lab", requests_per_minute=1), caller("large", "lab")
    made = limiter(Clock(), (small, large), lab={"requests_per_minute": 3})
    assert admitted(made, small)
    assert refusal(made, small).message == "Key small exceeded 1 req/min"
    assert admitted(made, large) and admitted(made, large), "a refused request counts for nothing"
    assert refusal(made, large).message == "Tenant lab exceeded 3 req/min"


def test_limits_that_change_keep_what_was_counted() -> None:
    made = limiter(Clock(), lab={"requests_per_minute": 2})
    assert admitted(made, ANYONE, b"lab") and admitted(made, ANYONE, b"lab")
    made.configure(Config(tenants={"lab": TenantLimits(requests_per_minute=3)}))
    assert admitted(made, ANYONE, b"lab")
    assert not admitted(made, ANYONE, b"lab")
    made.configure(Config())
    assert not made.is_on
    assert admitted(made, ANYONE, b"lab")


def test_a_key_that_is_read_anew_keeps_what_was_counted() -> None:
    made = limiter(Clock(), (caller("k", "t", requests_per_minute=1),))
    assert admitted(made, caller("k", "t", requests_per_minute=1))
    assert not admitted(made, caller("k", "t", requests_per_minute=1))


def test_keys_of_the_configuration_carry_their_limits() -> None:
    keys = [{"name": "k", "key": "s", "limits": {"concurrent_max": 1}}]
    config = Config.model_validate({"server": {"api_keys": keys}})
    (found,) = Keys(config.server.api_keys)
    assert found.limits == RateLimits(concurrent_max=1)


def begun(limiter: Limiter, tokens: int = 0, model: str = "m") -> QuotaHold:
    hold = limiter.charge_of(limiter.admit(ANYONE, None), ANYONE, None, [limiter.of_model(model)])
    assert hold is not None
    hold.tokens_asked = tokens
    hold.begin()
    return hold


def test_places_at_once_are_freed_at_the_end_and_only_once() -> None:
    made = limiter(Clock(), default={"concurrent_max": 1})
    first = begun(made)
    error = refusal(made, ANYONE)
    assert (error.retry_after_s, error.beside["limit"], error.beside["remaining"]) == (1.0, 1, 0)
    first.end(0)
    first.end(0)
    second = begun(made)
    assert not admitted(made, ANYONE)
    second.end(0)


def test_request_refused_when_its_body_has_come_holds_no_place() -> None:
    made = limiter(Clock(), default={"concurrent_max": 1})
    both = [made.charge_of(made.admit(ANYONE, None), ANYONE, None, [made.of_model("m")]) for _ in range(2)]
    assert both[0] and both[1]
    both[0].begin()
    with pytest.raises(RateLimited):
        both[1].begin()
    both[1].end(0)
    assert not admitted(made, ANYONE)


def test_tokens_are_reserved_and_settled_with_what_was_used() -> None:
    made = limiter(Clock(), default={"tokens_per_minute": 100})
    first = begun(made, tokens=80)
    with pytest.raises(RateLimited) as refused:
        begun(made, tokens=30)
    assert refused.value.beside["remaining"] == 20
    first.end(10)
    second = begun(made, tokens=90)
    second.end(90)
    assert refusal(made, ANYONE).message == "Tenant default exceeded 100 tokens/min"


def test_tokens_used_beyond_the_reservation_count_for_what_follows() -> None:
    clock = Clock()
    made = limiter(clock, default={"tokens_per_minute": 100})
    begun(made).end(150)
    assert not admitted(made, ANYONE)
    clock.now += MINUTE + 15
    assert not admitted(made, ANYONE), "the minute before counts for three quarters of 150"
    clock.now += 10
    assert admitted(made, ANYONE)


def test_tokens_that_one_limit_refuses_are_reserved_at_none() -> None:
    models = {"m": {"path": "/m.gguf", "limits": {"tokens_per_minute": 50}}}
    made = Limiter(wall=Clock())
    made.configure(Config.model_validate({"models": models, "tenants": {"default": {"tokens_per_minute": 100}}}))
    begun(made, tokens=20)
    refused = made.charge_of(made.admit(ANYONE, None), ANYONE, None, [made.of_model("m")])
    assert refused is not None
    refused.tokens_asked = 40
    with pytest.raises(RateLimited, match="Model m exceeded"):
        refused.begin()
    refused.end(10)
    assert [quota.figures(START)["tokens_left"] for quota in made.quotas] == [30, 80]


def test_a_request_that_asks_for_more_tokens_than_the_limit_is_let_in_alone() -> None:
    made = limiter(Clock(), default={"tokens_per_minute": 100})
    begun(made, tokens=1_000).end(5)
    with pytest.raises(RateLimited):
        begun(made, tokens=1_000)


def told(hold: QuotaHold) -> dict[bytes, int]:
    """What its caller is told by X-RateLimit-*."""
    lines = (line.partition(b": ") for line in hold.answer_lines().split(b"\r\n") if line)
    return {name.removeprefix(b"x-ratelimit-"): int(value) for name, _, value in lines}


def left_of(limiter: Limiter) -> int:
    """Tokens that callers are told to have left."""
    hold = limiter.charge_of(None, ANYONE, None, [limiter.of_model("m")])
    assert hold is not None
    return told(hold)[b"remaining"]


def test_a_reservation_above_the_limit_takes_no_more_than_the_limit() -> None:
    clock = Clock()
    made = limiter(clock, default={"tokens_per_minute": 100})
    running = begun(made, tokens=1_000_000)
    clock.now += MINUTE + 30
    assert left_of(made) == 50, "half of the minute before, in which 100 were reserved"
    running.end(20)
    assert left_of(made) == 90, "half of the 20 that were used"


def test_a_reservation_is_settled_in_the_minute_in_which_it_was_made() -> None:
    clock = Clock()
    made = limiter(clock, default={"tokens_per_minute": 100})
    first, second = begun(made, tokens=50), begun(made, tokens=50)
    clock.now += MINUTE
    assert left_of(made) == 0
    first.end(10)
    assert left_of(made) == 40
    second.end(70)
    assert left_of(made) == 20, "of 50 + 10 in the minute before, and 20 beyond the reservation in this one"
    clock.now += 2 * MINUTE
    assert left_of(made) == 100


def test_a_reservation_ends_where_it_was_made_also_if_limits_change_meanwhile() -> None:
    made = limiter(Clock(), default={"tokens_per_minute": 100})
    running = begun(made, tokens=80)
    made.configure(Config(tenants={"default": TenantLimits(tokens_per_minute=200, concurrent_max=5)}))
    assert left_of(made) == 120
    running.end(30)
    assert left_of(made) == 170
    late = begun(made, tokens=50)
    made.configure(Config(tenants={"default": TenantLimits(concurrent_max=5)}))
    made.configure(Config(tenants={"default": TenantLimits(tokens_per_minute=200)}))
    late.end(10)
    assert left_of(made) == 200, "nothing of an earlier budget is counted against a new one"


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 80), st.integers(0, 80), st.integers(0, 130)), max_size=40),
)
def test_what_counts_is_what_was_used_once_all_answers_have_ended(
    limit: int, asked: list[tuple[int, int, int, int]]
) -> None:
    """Against exact sums by minute: reservations within the limit count where they were made, the excess at the end."""
    clock, exact = Clock(), dict[int, int]()
    made = limiter(clock, default={"tokens_per_minute": limit})
    running: list[tuple[float, int, int, int, QuotaHold]] = []
    for pause_s, tokens, used, takes_s in asked:
        clock.now += pause_s
        running.sort(key=lambda one: one[0])
        for one in [one for one in running if one[0] <= clock.now]:
            running.remove(one)
            _settle(clock, exact, one)
        try:
            hold = begun(made, tokens=tokens)
        except RateLimited:
            continue
        running.append((clock.now + takes_s, int(clock.now // MINUTE), min(tokens, limit), used, hold))
    for one in sorted(running, key=lambda one: one[0]):
        _settle(clock, exact, one)
    minute = int(clock.now // MINUTE)
    passed = clock.now / MINUTE - minute
    counted = math.floor(limit - exact.get(minute - 1, 0) * (1 - passed)) - exact.get(minute, 0)
    assert left_of(made) == max(0, counted)


def _settle(clock: Clock, exact: dict[int, int], one: tuple[float, int, int, int, QuotaHold]) -> None:
    ends, began, reserved, used, hold = one
    clock.now = max(clock.now, ends)
    hold.end(used)
    exact[began] = exact.get(began, 0) + min(used, reserved)
    minute = int(clock.now // MINUTE)
    exact[minute] = exact.get(minute, 0) + max(0, used - reserved)


def test_model_limits_hold_for_all_tenants_together() -> None:
    made = Limiter(wall=Clock())
    made.configure(Config.model_validate({"models": {"m": {"path": "/m.gguf", "limits": {"requests_per_minute": 2}}}}))
    begun(made).end(0)
    begun(made).end(0)
    with pytest.raises(RateLimited, match="Model m exceeded 2 req/min"):
        begun(made)
    assert made.charge_of(None, ANYONE, None, [made.of_model("other")]) is None


def of_model(**limits: int) -> Config:
    return Config.model_validate({"models": {"m": {"path": "/m.gguf", "limits": limits}}})


def test_a_models_limit_that_is_removed_does_not_hold_while_its_requests_run() -> None:
    made = Limiter(wall=Clock())
    made.configure(of_model(concurrent_max=1))
    running = begun(made)
    made.configure(Config.model_validate({"models": {"m": {"path": "/m.gguf"}}}))
    assert not made.is_on
    assert made.charge_of(None, ANYONE, None, [made.of_model("m")]) is None
    made.configure(of_model(concurrent_max=1))
    with pytest.raises(RateLimited):
        begun(made)
    running.end(0)
    begun(made).end(0)


def test_without_several_tenants_the_one_that_is_named_is_ignored_also_after_the_body() -> None:
    made = Limiter(wall=Clock())
    tenants = {"lab": {"concurrent_max": 1}, "default": {"concurrent_max": 2}}
    made.configure(Config.model_validate({"server": {"multi_tenant": False}, "tenants": tenants}))
    hold = made.charge_of(None, ANYONE, b"lab", [made.of_model("m")])
    assert hold is not None
    assert [quota.name for quota in hold.quotas] == ["default"]


def test_headers_tell_of_the_limit_with_the_least_left() -> None:
    by = caller("k", "lab", requests_per_minute=5)
    made = limiter(Clock(), (by,), lab={"requests_per_minute": 3, "tokens_per_minute": 1})
    hold = made.admit(by, None)
    assert hold is not None
    assert told(hold) == {b"limit": 3, b"remaining": 2, b"reset": START + MINUTE}


def test_headers_tell_of_tokens_where_requests_are_not_limited() -> None:
    made = limiter(Clock(), default={"tokens_per_minute": 100})
    assert told(begun(made, tokens=30))[b"remaining"] == 70
    assert not told(begun(limiter(Clock(), default={"concurrent_max": 1})))


# --- requests that one of several models serves -----------------------------------------------------------------------


def test_a_request_for_a_task_is_counted_for_the_model_that_serves_it() -> None:
    limiter = Limiter(wall=Clock())
    models = {
        "a": {"path": "a.gguf", "limits": {"concurrent_max": 1, "tokens_per_minute": 100}},
        "b": {"path": "b.gguf", "limits": {"requests_per_minute": 1, "tokens_per_minute": 100}},
    }
    limiter.configure(Config.model_validate({"models": models}))

    def begun() -> tuple[QuotaHold, list[Any]]:
        quotas = [limiter.of_model(name) for name in ("a", "b", "free")]
        hold = limiter.charge_of(None, ANYONE, None, quotas, is_task=True)
        assert hold is not None and quotas[2] is None
        hold.tokens_asked = 60
        hold.begin()
        return hold, quotas

    def tokens_left(quota: Quota) -> int | None:
        return quota.figures(START)["tokens_left"]

    one, (a, b, _) = begun()
    assert a.in_flight == b.in_flight == 0
    one.serve_by(a)
    one.serve_by(a)
    assert (a.in_flight, tokens_left(a)) == (1, 40)
    other, _ = begun()
    with pytest.raises(RateLimited, match="Model a has 1 requests at once"):
        other.serve_by(a)
    other.serve_by(b)
    # The first one failed and turns to b, which has neither tokens nor requests left; its place at a is free again.
    with pytest.raises(RateLimited, match="Model b exceeded"):
        one.serve_by(b)
    assert (a.in_flight, b.in_flight, tokens_left(a)) == (0, 1, 100)
    one.serve_by(None)
    one.end(0)
    other.end(10)
    assert (a.in_flight, b.in_flight, tokens_left(b)) == (0, 0, 90)
