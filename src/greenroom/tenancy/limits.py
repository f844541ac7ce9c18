"""How many requests and tokens tenants, keys and models may use per minute, and how many requests at once.

Owns the counts. A `Window` counts the minute of the clock and the one before; a `Meter` has the windows of one tenant,
key or model; a `Charge` is one request, counted against up to three meters. Requests are counted when they are
admitted: for tenant and key at the headers, for the model and for tokens when the body has been read. Nothing here
waits. `shared_limits.py` has windows that several gateways share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Final

from greenroom.config.schema import Config, RateLimits
from greenroom.config.sections.tenants import DEFAULT_TENANT
from greenroom.errors import RateLimited
from greenroom.tenancy.keys import Caller

MINUTE_S: Final = 60.0
# When a place among the requests at once becomes free is not known; asking again this soon is cheap.
PLACE_RETRY_S: Final = 1.0
# More requests at once than there can be.
UNLIMITED: Final = 1 << 60

Headers = list[tuple[bytes, bytes]]


class Budget:
    """An amount per minute. `now` is seconds since 1970. A class rather than a protocol: calls are cheaper compiled."""

    limit: int

    def left(self, now: float) -> int:
        """How much may be taken now; 0 or less if nothing."""
        raise NotImplementedError

    def has(self, amount: int, now: float) -> bool:
        """True if so much may be taken now. One that is shared may fetch it for the next time."""
        raise NotImplementedError

    def reservable(self, now: float) -> int:
        """The most that one request can reserve: the limit, or what can be had of a shared one."""
        raise NotImplementedError

    def remaining(self, now: float) -> int:
        """How much is left, as callers are told."""
        raise NotImplementedError

    def take(self, amount: int, now: float) -> int:
        """Count this much, also beyond the limit. Returns the minute for which it is counted."""
        raise NotImplementedError

    def give_back(self, amount: int, minute: int, now: float) -> None:
        """Uncount what was taken in this minute and not used. Nothing happens if that minute counts no more."""
        raise NotImplementedError

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until so much could be taken if nothing else is taken meanwhile."""
        raise NotImplementedError


class Window(Budget):
    """A sliding window of two buckets: of the last minute, the part that the sliding minute still covers counts.

    If callers take no more than `left`, then never more than `limit` in a minute of the clock, and in any d seconds up
    to 60 at most `limit` x (1 + d / 60).
    """

    def __init__(self, limit: int, period_s: float = MINUTE_S) -> None:
        self.limit = limit
        self._period_s = period_s
        self.minute = 0
        self._ends = period_s
        self.count = 0
        self.before = 0

    def left(self, now: float) -> int:
        if now >= self._ends:
            self._roll(now)
        if self.before == 0:
            return self.limit - self.count
        return math.floor(self.limit - self.before * (1.0 - self._passed(now))) - self.count

    def has(self, amount: int, now: float) -> bool:
        return self.left(now) >= amount

    def reservable(self, now: float) -> int:
        return self.limit

    def remaining(self, now: float) -> int:
        left = self.left(now)
        return left if left > 0 else 0

    def take(self, amount: int, now: float) -> int:
        if now >= self._ends:
            self._roll(now)
        self.count += amount
        return self.minute

    def give_back(self, amount: int, minute: int, now: float) -> None:
        if now >= self._ends:
            self._roll(now)
        if minute == self.minute:
            self.count = max(0, self.count - amount)
        elif minute == self.minute - 1:
            self.before = max(0, self.before - amount)

    def wait_s(self, amount: int, now: float) -> float:
        if now >= self._ends:
            self._roll(now)
        passed, amount = self._passed(now), min(amount, self.limit)
        room = self.limit - self.count - amount
        if room >= 0:
            return max(0.0, _covered_at(self.before, room) - passed) * self._period_s
        return (1.0 - passed + _covered_at(self.count, self.limit - amount)) * self._period_s

    def set_counts(self, minute: int, count: int, before: int) -> None:
        """Begin anew with these counts."""
        self.minute, self.count, self.before = minute, count, before
        self._ends = (minute + 1) * self._period_s

    def _roll(self, now: float) -> None:
        """Begin a new minute."""
        minute = int(now / self._period_s)
        if minute > self.minute:
            self.set_counts(minute, 0, self.count if minute == self.minute + 1 else 0)

    def _passed(self, now: float) -> float:
        """Which part of the minute has passed. A clock that is set back stands still."""
        return max(0.0, min(1.0, now / self._period_s - self.minute))


def _covered_at(before: int, room: int) -> float:
    """The part of a minute after which what was counted in the minute before takes no more than `room`."""
    return 0.0 if before <= room else 1.0 - room / before


def reset_at(now: float) -> int:
    """The end of this minute, in seconds since 1970."""
    return (int(now // MINUTE_S) + 1) * int(MINUTE_S)


# The budget for this name in the store, limit and former budget if there was one.
NewBudget = Callable[[str, int], Budget]


def in_memory(name: str, limit: int) -> Budget:
    return Window(limit)


class Meter:
    """What one tenant, key or model may use, and what it uses."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name
        self.requests: Budget | None = None
        self.tokens: Budget | None = None
        self.concurrent_max = UNLIMITED
        self.in_flight = 0

    def apply(self, limits: RateLimits, new_budget: NewBudget) -> None:
        """Go by these limits from now on. What was counted stays counted."""
        scope = "" if self.kind == TENANT else f"_{self.kind}"
        self.requests = _applied(
            self.requests, limits.requests_per_minute, f"rate_limit{scope}:{self.name}", new_budget
        )
        self.tokens = _applied(self.tokens, limits.tokens_per_minute, f"token_limit{scope}:{self.name}", new_budget)
        self.concurrent_max = UNLIMITED if limits.concurrent_max is None else limits.concurrent_max

    def expect_request(self, now: float) -> None:
        """Raises RateLimited if one more request would exceed its requests per minute."""
        budget = self.requests
        if budget is not None and budget.left(now) < 1:
            raise self._used_up(budget, "req", 1, now)

    def expect_tokens(self, amount: int, now: float) -> None:
        """Raises RateLimited if so many tokens would exceed its tokens per minute."""
        budget = self.tokens
        if budget is not None:
            wanted = 1 if amount <= 1 else min(amount, budget.reservable(now))
            if not budget.has(wanted, now):
                raise self._used_up(budget, "tokens", wanted, now)

    def expect_room(self, tokens: int, now: float) -> None:
        """Raises RateLimited if so many tokens would exceed its limit, or it has as many requests at once as it may."""
        if self.tokens is not None:
            self.expect_tokens(tokens, now)
        if self.in_flight >= self.concurrent_max:
            raise RateLimited(
                f"{self.kind.capitalize()} {self.name} has {self.concurrent_max} requests at once, as many as it may",
                retry_after_s=PLACE_RETRY_S,
                beside={"limit": self.concurrent_max, "remaining": 0, "resetAt": math.ceil(now + PLACE_RETRY_S)},
            )

    def _used_up(self, budget: Budget, unit: str, amount: int, now: float) -> RateLimited:
        return RateLimited(
            f"{self.kind.capitalize()} {self.name} exceeded {budget.limit} {unit}/min",
            retry_after_s=budget.wait_s(amount, now),
            beside={"limit": budget.limit, "remaining": budget.remaining(now), "resetAt": reset_at(now)},
        )


TENANT: Final = "tenant"
KEY: Final = "key"
MODEL: Final = "model"


def _applied(budget: Budget | None, limit: int | None, name: str, new_budget: NewBudget) -> Budget | None:
    if limit is None:
        return None
    if budget is None:
        return new_budget(name, limit)
    budget.limit = limit
    return budget


class Charge:
    """One request, and the meters that it is counted against."""

    __slots__ = ("_begun", "_reserved", "_told", "_wall", "meters", "model", "tokens_asked")

    def __init__(self, meters: tuple[Meter, ...], wall: Callable[[], float]) -> None:
        """`meters` are those of its tenant and its key."""
        self.meters = meters
        self.model: Meter | None = None
        # What it says it will use at most; 0 if it says nothing.
        self.tokens_asked = 0
        self._wall = wall
        # The meters at which it has a place; what it reserved, where, and for which minute. A reload changes neither.
        self._begun: tuple[Meter, ...] = ()
        self._reserved: list[tuple[Budget, int, int]] = []
        # What its caller was told to have left of a limit on requests; -1: nothing.
        self._told = -1

    def admit(self, *, is_job: bool) -> None:
        """Count a request for tenant and key. Raises RateLimited, and then nothing is counted.

        A job needs no place at once: it waits for one on disk.
        """
        now = self._wall()
        for meter in self.meters:
            meter.expect_request(now)
            if is_job:
                meter.expect_tokens(0, now)
            else:
                meter.expect_room(0, now)
        for meter in self.meters:
            budget = meter.requests
            if budget is not None:
                budget.take(1, now)

    def admit_to_model(self) -> None:
        """Count a request for the model. Raises RateLimited, and then nothing is counted."""
        if self.model is not None:
            now = self._wall()
            self.model.expect_tokens(0, now)
            self._count_for_model(self.model, now)

    def _count_for_model(self, model: Meter, now: float) -> None:
        model.expect_request(now)
        if model.requests is not None:
            model.requests.take(1, now)

    def begin(self, *, is_counted: bool = False) -> None:
        """Reserve tokens and take a place among the requests at once. Raises RateLimited, and then nothing is counted.

        The request is counted for its model, too, unless `is_counted`: a job's was, when it was submitted.
        """
        now, meters, asked = self._wall(), self._all(), self.tokens_asked
        for meter in meters:
            meter.expect_room(asked, now)
        if self.model is not None and not is_counted:
            self._count_for_model(self.model, now)
        self._begun = meters
        for meter in meters:
            meter.in_flight += 1
            budget = meter.tokens
            if budget is not None:
                reserved = min(asked, budget.reservable(now)) if asked else 0
                self._reserved.append((budget, reserved, budget.take(reserved, now)))

    def end(self, tokens_used: int | None) -> None:
        """Free its place, and count the tokens that were really used. Only the first call after `begin` counts.

        What was reserved and not used is given back to the minute of the reservation; what was used beyond it counts
        from now on. None: an engine worked and nothing tells how much; what was reserved stays counted.
        """
        meters, self._begun = self._begun, ()
        for meter in meters:
            meter.in_flight -= 1
        reservations, self._reserved = self._reserved, []
        if not reservations or tokens_used is None:
            return
        now = self._wall()
        for budget, reserved, minute in reservations:
            if tokens_used > reserved:
                budget.take(tokens_used - reserved, now)
            elif tokens_used < reserved:
                budget.give_back(reserved - tokens_used, minute, now)

    def counts_tokens(self) -> bool:
        for meter in self.meters:
            if meter.tokens is not None:
                return True
        return self.model is not None and self.model.tokens is not None

    def headers(self) -> Headers:
        """X-RateLimit-*: of its limits on requests, the one with the least left; else of those on tokens."""
        now, least, limit = self._wall(), -1, 0
        meters = self._all()
        for meter in meters:
            budget = meter.requests
            if budget is not None and ((left := budget.remaining(now)) < least or least < 0):
                least, limit = left, budget.limit
        self._told = least
        if least < 0:
            for meter in meters:
                budget = meter.tokens
                if budget is not None and ((left := budget.remaining(now)) < least or least < 0):
                    least, limit = left, budget.limit
        return [] if least < 0 else rate_headers(limit, least, reset_at(now))

    def model_headers(self) -> Headers | None:
        """The same once its model is known; None if what was told already is still the least."""
        model = self.model
        if model is None:
            return None
        is_least = self._told < 0 or (
            model.requests is not None and model.requests.remaining(self._wall()) < self._told
        )
        return self.headers() if is_least else None

    def _all(self) -> tuple[Meter, ...]:
        return self.meters if self.model is None else (*self.meters, self.model)


def rate_headers(limit: int, remaining: int, reset: int) -> Headers:
    return [
        (b"x-ratelimit-limit", b"%d" % limit),
        (b"x-ratelimit-remaining", b"%d" % remaining),
        (b"x-ratelimit-reset", b"%d" % reset),
    ]


class Limiter:
    """The meters of all tenants, keys and models. `is_on` is False while nothing is limited."""

    def __init__(self, new_budget: NewBudget = in_memory, wall: Callable[[], float] = time.time) -> None:
        self.is_on = False
        self._new_budget = new_budget
        self._wall = wall
        self._config = Config()
        self._meters: dict[tuple[str, str], Meter] = {}
        # Of earlier configurations: they limit nothing, and go on counting if their limits come back.
        self._former: dict[tuple[str, str], Meter] = {}
        # False: the tenants that callers name are ignored.
        self._are_named = True
        # The meters of a key's holder, as long as it is the same record; and those of tenants that callers name.
        self._of_caller: dict[str, tuple[Caller, tuple[Meter, ...]]] = {}
        self._of_named: dict[bytes, tuple[Meter, ...]] = {}
        self._of_others: tuple[Meter, ...] = ()

    def configure(self, config: Config, callers: Iterable[Caller] = ()) -> None:
        """Go by these limits from now on, with what is counted already. `callers` are those that have a key."""
        self._are_named = config.server.multi_tenant
        self._config = config
        # Keys whose limits are not told here come back to theirs; requests that are counted against others still are.
        self._former = {key: meter for key, meter in self._former.items() if meter.in_flight} | self._meters
        self._meters = {}
        for name, model in config.models.items():
            if model.limits is not None:
                self._meter(MODEL, name, model.limits)
        self._of_named = {}
        for name, limits in config.tenants.items():
            meter = self._meter(TENANT, name, limits)
            self._of_named[name.encode("ascii")] = (meter,)
        self._of_others = self._of_named.get(DEFAULT_TENANT.encode(), ())
        self._of_caller = {}
        for caller in callers:
            self._meters_of(caller)
        self.is_on = bool(self._meters)

    def admit(self, caller: Caller, said_tenant: bytes | None, *, is_job: bool = False) -> Charge | None:
        """Count a request at its headers; None if neither tenant nor key are limited. Raises RateLimited."""
        meters = self._of(caller, said_tenant)
        if not meters:
            return None
        charge = Charge(meters, self._wall)
        charge.admit(is_job=is_job)
        return charge

    def charge_of(
        self, admitted: Charge | None, caller: Caller, said_tenant: bytes | None, model: str
    ) -> Charge | None:
        """The charge of a request whose body has been read; None if nothing that it uses is limited."""
        meter = self._meters.get((MODEL, model))
        if admitted is None:
            meters = self._of(caller, said_tenant)
            if meter is None and not meters:
                return None
            admitted = Charge(meters, self._wall)
        admitted.model = meter
        return admitted

    def _of(self, caller: Caller, said_tenant: bytes | None) -> tuple[Meter, ...]:
        if caller.tenant is None:
            # Without keys anyone can make up tenants: those that are not configured share one budget.
            if said_tenant is None or not self._are_named:
                return self._of_others
            return self._of_named.get(said_tenant, self._of_others)
        known = self._of_caller.get(caller.name)
        return known[1] if known is not None and known[0] is caller else self._meters_of(caller)

    def _meters_of(self, caller: Caller) -> tuple[Meter, ...]:
        meters: tuple[Meter, ...] = ()
        tenants, tenant = self._config.tenants, caller.tenant
        if tenant is not None and (limits := tenants.get(tenant) or tenants.get(DEFAULT_TENANT)) is not None:
            meters = (self._meter(TENANT, tenant, limits),)
        if caller.limits is not None:
            meters = (*meters, self._meter(KEY, caller.name, caller.limits))
        self._of_caller[caller.name] = (caller, meters)
        return meters

    def _meter(self, kind: str, name: str, limits: RateLimits) -> Meter:
        key = (kind, name)
        meter = self._meters.get(key) or self._former.pop(key, None) or Meter(kind, name)
        meter.apply(limits, self._new_budget)
        self._meters[key] = meter
        return meter
