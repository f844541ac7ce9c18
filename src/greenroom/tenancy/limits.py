"""How many requests and tokens tenants, keys and models may use per minute, and how many requests at once.

Owns which tenant, key and model a request counts for. A `Meter` has the budgets (`budgets.py`) of one of them; a
`Charge` is one request, counted against up to three meters. Requests are counted when they are admitted: for tenant and
key at the headers, for the model and for tokens when the body has been read. Nothing here waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Final

from greenroom.config.schema import Config, RateLimits
from greenroom.config.sections.tenants import DEFAULT_TENANT
from greenroom.errors import RateLimited
from greenroom.tenancy.budgets import MINUTE_S, Budget, Window
from greenroom.tenancy.keys import Caller

# When a place among the requests at once becomes free is not known; asking again this soon is cheap.
PLACE_RETRY_S: Final = 1.0
# More requests at once than there can be.
UNLIMITED: Final = 1 << 60

TENANT: Final = "tenant"
KEY: Final = "key"
MODEL: Final = "model"

_LINES: Final = b"x-ratelimit-limit: %d\r\nx-ratelimit-remaining: %d\r\nx-ratelimit-reset: %d\r\n"

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

    def no_requests(self, budget: Budget, now: float) -> RateLimited:
        """Its requests per minute are used up."""
        return self._used_up(budget, "req", 1, now)

    def no_tokens(self, budget: Budget, asked: int, now: float) -> RateLimited:
        """Its tokens per minute do not suffice for a request that asks for so many."""
        return self._used_up(budget, "tokens", min(asked, budget.reservable(now)) or 1, now)

    def no_place(self, now: float) -> RateLimited:
        """It has as many requests at once as it may."""
        return RateLimited(
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


def _applied(budget: Budget | None, limit: int | None, name: str, new_budget: NewBudget) -> Budget | None:
    if limit is None:
        return None
    if budget is None:
        return new_budget(name, limit)
    budget.limit = limit
    return budget


class Charge:
    """One request, and the meters that it is counted against."""

    __slots__ = ("_begun", "_least", "_least_of", "_of_caller", "_reserved", "_wall", "meters", "model", "tokens_asked")

    def __init__(self, meters: tuple[Meter, ...], wall: Callable[[], float]) -> None:
        """`meters` are those of its tenant and its key."""
        self.meters = self._of_caller = meters
        self.model: Meter | None = None
        # What it says it will use at most; 0 if it says nothing.
        self.tokens_asked = 0
        self._wall = wall
        # The meters at which it has a place; what it reserved, where, and for which minute. A reload changes neither.
        self._begun: tuple[Meter, ...] = ()
        self._reserved: list[tuple[Budget, int, int]] = []
        # Of the limits on requests that it was counted for, the one with the least left.
        self._least = UNLIMITED
        self._least_of: Budget | None = None

    def admit(self, *, is_job: bool) -> None:
        """Count a request for tenant and key. Raises RateLimited, and then nothing is counted.

        A job needs no place at once: it waits for one on disk.
        """
        now = self._wall()
        for meter in self._of_caller:
            tokens = meter.tokens
            if tokens is not None and tokens.left(now) < 1:
                raise meter.no_tokens(tokens, 0, now)
            if meter.in_flight >= meter.concurrent_max and not is_job:
                raise meter.no_place(now)
        for position, meter in enumerate(self._of_caller):
            try:
                self._count_for(meter, now)
            except RateLimited:
                for before in self._of_caller[:position]:
                    if before.requests is not None:
                        before.requests.give_back(1, before.requests.minute, now)
                raise

    def set_model(self, model: Meter | None) -> None:
        """Count it against this model, too."""
        self.model = model
        self.meters = self._of_caller if model is None else (*self._of_caller, model)

    def admit_to_model(self) -> None:
        """Count a request for the model. Raises RateLimited, and then nothing is counted."""
        if self.model is not None:
            now, tokens = self._wall(), self.model.tokens
            if tokens is not None and tokens.left(now) < 1:
                raise self.model.no_tokens(tokens, 0, now)
            self._count_for(self.model, now)

    def _count_for(self, meter: Meter, now: float) -> None:
        budget = meter.requests
        if budget is not None:
            left = budget.take_one(now)
            if left < 0:
                raise meter.no_requests(budget, now)
            if left < self._least:
                self._least, self._least_of = left, budget

    def begin(self, *, is_counted: bool = False) -> None:
        """Reserve tokens and take a place among the requests at once. Raises RateLimited, and then nothing is counted.

        The request is counted for its model, too, unless `is_counted`: a job's was, when it was submitted.
        """
        now, meters = self._wall(), self.meters
        for meter in meters:
            if meter.in_flight >= meter.concurrent_max:
                raise meter.no_place(now)
        try:
            self._reserve(now)
            if self.model is not None and not is_counted:
                self._count_for(self.model, now)
        except RateLimited:
            self._settle(0, now)
            raise
        self._begun = meters
        for meter in meters:
            meter.in_flight += 1

    def serve_by(self, model: Meter | None) -> None:
        """Count a request that has begun for this model, too, instead of for the one before. Raises RateLimited."""
        if model is self.model:
            return
        now = self._wall()
        if (before := self.model) is not None:
            self._leave(before, now)
        if model is None:
            return
        if model.in_flight >= model.concurrent_max:
            raise model.no_place(now)
        self.set_model(model)
        try:
            self._reserve_at(model, now)
            self._count_for(model, now)
        except RateLimited:
            self._leave(model, now)
            raise
        self._begun = (*self._begun, model)
        model.in_flight += 1

    def _leave(self, model: Meter, now: float) -> None:
        """Give back its place and its tokens at this model. It stays counted as a request."""
        self.set_model(None)
        if model in self._begun:
            self._begun = tuple(meter for meter in self._begun if meter is not model)
            model.in_flight -= 1
        for budget, amount, minute in [one for one in self._reserved if one[0] is model.tokens]:
            budget.give_back(amount, minute, now)
            self._reserved.remove((budget, amount, minute))

    def _reserve(self, now: float) -> None:
        for meter in self.meters:
            self._reserve_at(meter, now)

    def _reserve_at(self, meter: Meter, now: float) -> None:
        budget = meter.tokens
        if budget is not None:
            amount = budget.reserve(self.tokens_asked, now)
            if amount < 0:
                raise meter.no_tokens(budget, self.tokens_asked, now)
            self._reserved.append((budget, amount, budget.minute))

    def end(self, tokens_used: int | None) -> None:
        """Free its place, and count the tokens that were really used. Only the first call after `begin` counts.

        What was reserved and not used is given back to the minute of the reservation; what was used beyond it counts
        from now on. None: an engine worked and nothing tells how much; what was reserved stays counted.
        """
        for meter in self._begun:
            meter.in_flight -= 1
        self._begun = ()
        if tokens_used is None:
            self._reserved.clear()
        elif self._reserved:
            self._settle(tokens_used, self._wall())

    def _settle(self, used: int, now: float) -> None:
        for budget, reserved, minute in self._reserved:
            if used > reserved:
                budget.take(used - reserved, now)
            elif used < reserved:
                budget.give_back(reserved - used, minute, now)
        self._reserved.clear()

    def counts_tokens(self) -> bool:
        for meter in self.meters:  # noqa: SIM110 (a generator for each request costs more than the rest of this)
            if meter.tokens is not None:
                return True
        return False

    def answer_lines(self) -> bytes:
        """X-RateLimit-*: of its limits on requests, the one that had the least left; else of those on tokens."""
        now, budget, least = self._wall(), self._least_of, self._least
        if budget is None:
            for meter in self.meters:
                if meter.tokens is not None and (left := meter.tokens.remaining(now)) < least:
                    budget, least = meter.tokens, left
        return b"" if budget is None else _LINES % (budget.limit, least, reset_at(now))


def reset_at(now: float) -> int:
    """The end of this minute, in seconds since 1970."""
    return (int(now // MINUTE_S) + 1) * int(MINUTE_S)


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
            self._of_named[name.encode()] = (meter,)
        self._of_others = self._of_named.get(DEFAULT_TENANT.encode(), ())
        self._of_caller = {}
        for caller in callers:
            self._meters_of(caller)
        self.is_on = bool(self._meters)

    @property
    def meters(self) -> list[Meter]:
        """Of all tenants, keys and models that are limited."""
        return list(self._meters.values())

    def now(self) -> float:
        """By the clock that its minutes go by."""
        return self._wall()

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
        admitted.set_model(meter)
        return admitted

    def charge_of_any(
        self, admitted: Charge | None, caller: Caller, said_tenant: bytes | None, models: Iterable[str]
    ) -> tuple[Charge | None, list[Meter | None]]:
        """The charge of a request that one of these models will serve (`Charge.serve_by`), and the meter of each."""
        meters = [self._meters.get((MODEL, model)) for model in models]
        if admitted is None and (any(meters) or self._of(caller, said_tenant)):
            admitted = Charge(self._of(caller, said_tenant), self._wall)
        return admitted, meters

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
