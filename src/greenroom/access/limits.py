"""How many requests and tokens tenants, keys and models may use per minute, and how many requests at once.

Owns which tenant, key and model a request counts for. A `Quota` has the budgets (`budgets.py`) of one of them, as
`LIMITS` lists them; a `QuotaHold` is one request, counted against up to three quotas. Requests are counted when they
are admitted: for tenant and key at the headers, for the model and for tokens when the body has been read. Nothing here
waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Literal

from greenroom.access.budgets import LIMITS, MINUTE_S, Budget, Window
from greenroom.access.keys import Caller
from greenroom.config.schema import Config, RateLimits
from greenroom.config.sections.keys import DEFAULT_TENANT
from greenroom.errors import ConfigError, RateLimited
from greenroom.runtime.shell import Shell

if TYPE_CHECKING:
    from greenroom.access.shared_limits import SharedLimits

# When a place among the requests at once becomes free is not known; asking again this soon is cheap.
PLACE_RETRY_S: Final = 1.0
# More requests at once than there can be.
UNLIMITED: Final = 1 << 60

TENANT: Final = "tenant"
KEY: Final = "key"
MODEL: Final = "model"
Kind = Literal["tenant", "key", "model"]

_LINES: Final = b"x-ratelimit-limit: %d\r\nx-ratelimit-remaining: %d\r\nx-ratelimit-reset: %d\r\n"

# What a request reserved: where, of which budget, how much, and for which minute.
Reserved = tuple["Quota", Budget, int, int]
# The budget of a limit that has this name in the store, so much, and this period.
NewBudget = Callable[[str, int, float], Budget]


def in_memory(name: str, limit: int, period_s: float) -> Budget:
    return Window(limit, period_s)


class Quota:
    """What one tenant, key or model may use, and what it uses."""

    def __init__(self, kind: Kind, name: str) -> None:
        self.kind = kind
        self.name = name
        # Limits per period, by their keys; and those of them that count requests, and those that count tokens.
        self.budgets: dict[str, Budget] = {}
        self.requests: tuple[Budget, ...] = ()
        self.tokens: tuple[Budget, ...] = ()
        self.concurrent_max = UNLIMITED
        self.in_flight = 0

    def apply(self, limits: RateLimits, new_budget: NewBudget) -> None:
        """Go by these limits from now on. What was counted stays counted."""
        self.concurrent_max = limits.concurrent_max or UNLIMITED
        scope = "" if self.kind == TENANT else f"_{self.kind}"
        before, self.budgets, self.requests, self.tokens = self.budgets, {}, (), ()
        for row in LIMITS:
            most = getattr(limits, row.key)
            if not row.period_s or most is None:
                continue
            budget = before.get(row.key) or new_budget(f"{row.in_store}{scope}:{self.name}", most, row.period_s)
            budget.limit, budget.unit = most, row.unit
            self.budgets[row.key] = budget
            if row.of_tokens:
                self.tokens += (budget,)
            else:
                self.requests += (budget,)
        for key in before.keys() - self.budgets.keys():
            before[key].drop()

    def drop(self) -> None:
        """Nothing is limited by it any more."""
        for budget in self.budgets.values():
            budget.drop()

    def figures(self, now: float) -> dict[str, int | None]:
        """Its limits, and what is left of each, by the fields of the API."""
        found: dict[str, int | None] = {}
        for row in LIMITS:
            budget = self.budgets.get(row.key)
            found[row.key], found[row.left] = (None, None) if budget is None else (budget.limit, budget.remaining(now))
        places = None if self.concurrent_max == UNLIMITED else self.concurrent_max
        return found | {"concurrent_max": places, "in_flight": self.in_flight}

    def used_share(self, now: float) -> float:
        """Of the limit of which most is used."""
        shares = [1 - budget.remaining(now) / budget.limit for budget in self.budgets.values()]
        if self.concurrent_max != UNLIMITED:
            shares.append(self.in_flight / self.concurrent_max)
        return max(shares, default=0.0)

    def used_up(self, budget: Budget, amount: int, now: float) -> RateLimited:
        """What is left of this budget does not suffice for so much."""
        wait_s, left = budget.wait_s(amount, now), budget.remaining(now)
        why = f"exceeded {budget.limit} {budget.unit}"
        return self._refused(why, wait_s, budget.limit, left, reset_at(now, budget.period_s))

    def no_place(self, now: float) -> RateLimited:
        """It has as many requests at once as it may."""
        why = f"has {self.concurrent_max} requests at once, as many as it may"
        return self._refused(why, PLACE_RETRY_S, self.concurrent_max, 0, math.ceil(now + PLACE_RETRY_S))

    def _refused(self, why: str, wait_s: float, limit: int, left: int, resets_at: int) -> RateLimited:
        beside = {"limit": limit, "remaining": left, "resetAt": resets_at}
        return RateLimited(f"{self.kind.capitalize()} {self.name} {why}", retry_after_s=wait_s, beside=beside)


class QuotaHold:
    """One request, and the quotas that it is counted against."""

    __slots__ = ("_begun", "_least", "_least_of", "_of_caller", "_reserved", "_wall", "model", "quotas", "tokens_asked")

    def __init__(self, quotas: tuple[Quota, ...], wall: Callable[[], float]) -> None:
        """`quotas` are those of its tenant and its key."""
        self.quotas = self._of_caller = quotas
        self.model: Quota | None = None
        # What it says it will use at most; 0 if it says nothing.
        self.tokens_asked = 0
        self._wall = wall
        # The quotas at which it has a place, and what it reserved. A reload changes neither.
        self._begun: tuple[Quota, ...] = ()
        self._reserved: list[Reserved] = []
        # Of the limits on requests that it was counted for, the one with the least left.
        self._least = UNLIMITED
        self._least_of: Budget | None = None

    def admit(self, quotas: tuple[Quota, ...], *, is_job: bool) -> None:
        """Count a request for these quotas. Raises RateLimited, and then nothing is counted. A job needs no place at
        once: it waits for one on disk."""
        now = self._wall()
        for quota in quotas:
            for budget in quota.tokens:
                if budget.left(now) < 1:
                    raise quota.used_up(budget, 1, now)
            if quota.in_flight >= quota.concurrent_max and not is_job:
                raise quota.no_place(now)
        self._count(quotas, now)

    def set_model(self, model: Quota | None) -> None:
        """Count it against this model, too."""
        self.model = model
        self.quotas = self._of_caller if model is None else (*self._of_caller, model)

    def admit_to_model(self) -> None:
        """Count a job for its model. Raises RateLimited, and then nothing is counted."""
        if self.model is not None:
            self.admit((self.model,), is_job=True)

    def begin(self, *, is_counted: bool = False) -> None:
        """Reserve tokens and take a place among the requests at once. Raises RateLimited, and then nothing is counted.
        The request is counted for its model, too, unless `is_counted`: a job's was, when it was submitted."""
        self._enter(self.quotas, () if is_counted or self.model is None else (self.model,))

    def serve_by(self, model: Quota | None) -> None:
        """Count a request that has begun for this model, too, instead of for the one before. Raises RateLimited."""
        if model is self.model:
            return
        if self.model is not None:
            self._leave(self.model)
        if model is not None:
            self._enter((model,), (model,))
            self.set_model(model)

    def _enter(self, quotas: tuple[Quota, ...], counted: tuple[Quota, ...]) -> None:
        """Take a place and reserve tokens at these quotas, and count a request for some of them."""
        now, reserved = self._wall(), self._reserved
        for quota in quotas:
            if quota.in_flight >= quota.concurrent_max:
                raise quota.no_place(now)
        before = len(reserved)
        try:
            for quota in quotas:
                for budget in quota.tokens:
                    amount = budget.reserve(self.tokens_asked, now)
                    if amount < 0:
                        raise quota.used_up(budget, self.tokens_asked or 1, now)
                    reserved.append((quota, budget, amount, budget.minute))
            if counted:
                self._count(counted, now)
        except RateLimited:
            _settle(reserved[before:], 0, now)
            del reserved[before:]
            raise
        for quota in quotas:
            quota.in_flight += 1
        self._begun += quotas

    def _count(self, quotas: tuple[Quota, ...], now: float) -> None:
        """Count a request for all of these quotas, or for none. Raises RateLimited."""
        for quota in quotas:
            for budget in quota.requests:
                left = budget.take_one(now)
                if left < 0:
                    asked = [one for each in quotas for one in each.requests]
                    for taken in asked[: asked.index(budget)]:
                        taken.give_back(1, taken.minute, now)
                    raise quota.used_up(budget, 1, now)
                if left < self._least:
                    self._least, self._least_of = left, budget

    def _leave(self, model: Quota) -> None:
        """Give back its place and its tokens at this model. It stays counted as a request."""
        self.set_model(None)
        if model in self._begun:
            self._begun = tuple([quota for quota in self._begun if quota is not model])
            model.in_flight -= 1
        _settle([one for one in self._reserved if one[0] is model], 0, self._wall())
        self._reserved = [one for one in self._reserved if one[0] is not model]

    def end(self, tokens_used: int | None) -> None:
        """Free its place, and count the tokens that were really used. Only the first call after `begin` counts. What
        was reserved and not used is given back to the minute of the reservation; what was used beyond it counts from
        now on. None: an engine worked and nothing tells how much; what was reserved stays counted."""
        for quota in self._begun:
            quota.in_flight -= 1
        self._begun = ()
        if self._reserved:
            if tokens_used is not None:
                _settle(self._reserved, tokens_used, self._wall())
            self._reserved.clear()

    def counts_tokens(self) -> bool:
        for quota in self.quotas:  # noqa: SIM110 (a generator for each request costs more than the rest of this)
            if quota.tokens:
                return True
        return False

    def answer_lines(self) -> bytes:
        """X-RateLimit-*: of its limits on requests, the one that had the least left; else of those on tokens."""
        now, budget, least = self._wall(), self._least_of, self._least
        if budget is None:
            for quota in self.quotas:
                for tokens in quota.tokens:
                    if (left := tokens.remaining(now)) < least:
                        budget, least = tokens, left
        return b"" if budget is None else _LINES % (budget.limit, least, reset_at(now, budget.period_s))


def _settle(reserved: list[Reserved], used: int, now: float) -> None:
    for _, budget, amount, minute in reserved:
        if used > amount:
            budget.take(used - amount, now)
        elif used < amount:
            budget.give_back(amount - used, minute, now)


def reset_at(now: float, period_s: float = MINUTE_S) -> int:
    """The end of this minute, or of another period, in seconds since 1970."""
    return int((now // period_s + 1.0) * period_s)


def make_shared_limits(shell: Shell) -> SharedLimits | None:
    """None if this gateway shares no limits. Raises ConfigError if the client of the store is not installed."""
    url = shell.config.limits.store or shell.config.leases.store
    if url is None:
        return None
    try:
        # Imported only if used: it is slow to import.
        from greenroom.access.shared_limits import SharedLimits
    except ImportError as error:
        raise ConfigError("limits.store needs the client for Redis: pip install 'greenroom[redis]'") from error
    return SharedLimits(url, shell.state_dir.run_name)


class Limiter:
    """The quotas of all tenants, keys and models. `is_on` is False while nothing is limited."""

    def __init__(self, new_budget: NewBudget = in_memory, wall: Callable[[], float] = time.time) -> None:
        self.is_on = False
        self._new_budget = new_budget
        self._wall = wall
        self._config = Config()
        self._quotas: dict[tuple[Kind, str], Quota] = {}
        # Of earlier configurations: they limit nothing, and go on counting if their limits come back.
        self._former: dict[tuple[Kind, str], Quota] = {}
        # False: the tenants that callers name are ignored.
        self._are_named = True
        self._of_model: dict[str, Quota] = {}
        # The quotas of a key's holder, as long as it is the same record; and those of tenants that callers name.
        self._of_caller: dict[str, tuple[Caller, tuple[Quota, ...]]] = {}
        self._of_named: dict[bytes, tuple[Quota, ...]] = {}
        self._of_others: tuple[Quota, ...] = ()

    def configure(self, config: Config, callers: Iterable[Caller] = ()) -> None:
        """Go by these limits from now on, with what is counted already. `callers` are those that have a key."""
        self._are_named = config.server.multi_tenant
        self._config = config
        # Keys whose limits are not told here come back to theirs; requests that are counted against others still are.
        for quota in self._former.values():
            if not quota.in_flight:
                quota.drop()
        self._former = {key: quota for key, quota in self._former.items() if quota.in_flight} | self._quotas
        self._quotas = {}
        self._of_model = {
            name: self._quota(MODEL, name, model.limits)
            for name, model in config.models.items()
            if model.limits is not None
        }
        self._of_named = {
            name.encode(): (self._quota(TENANT, name, limits),) for name, limits in config.tenants.items()
        }
        self._of_others = self._of_named.get(DEFAULT_TENANT.encode(), ())
        self._of_caller = {}
        for caller in callers:
            self._quotas_of(caller)
        self.is_on = bool(self._quotas)

    @property
    def quotas(self) -> list[Quota]:
        """Of all tenants, keys and models that are limited."""
        return list(self._quotas.values())

    def now(self) -> float:
        """By the clock that its minutes go by."""
        return self._wall()

    def admit(self, caller: Caller, said_tenant: bytes | None, *, is_job: bool = False) -> QuotaHold | None:
        """Count a request at its headers; None if neither tenant nor key are limited. Raises RateLimited."""
        quotas = self._of(caller, said_tenant)
        if not quotas:
            return None
        hold = QuotaHold(quotas, self._wall)
        hold.admit(quotas, is_job=is_job)
        return hold

    def of_model(self, model: str) -> Quota | None:
        """What limits this model; None if nothing does."""
        return self._of_model.get(model)

    def charge_of(
        self,
        admitted: QuotaHold | None,
        caller: Caller,
        said_tenant: bytes | None,
        models: Sequence[Quota | None],
        *,
        is_task: bool = False,
    ) -> QuotaHold | None:
        """The hold of a request whose body has been read; None if nothing that it uses is limited.

        Of the models of a task, the one that serves it is named later (`QuotaHold.serve_by`).
        """
        if admitted is None:
            quotas = self._of(caller, said_tenant)
            if not quotas and not any(models):
                return None
            admitted = QuotaHold(quotas, self._wall)
        if not is_task:
            admitted.set_model(models[0])
        return admitted

    def _of(self, caller: Caller, said_tenant: bytes | None) -> tuple[Quota, ...]:
        if caller.tenant is None:
            # Without keys anyone can make up tenants: those that are not configured share one budget.
            if said_tenant is None or not self._are_named:
                return self._of_others
            return self._of_named.get(said_tenant, self._of_others)
        known = self._of_caller.get(caller.name)
        return known[1] if known is not None and known[0] is caller else self._quotas_of(caller)

    def _quotas_of(self, caller: Caller) -> tuple[Quota, ...]:
        quotas: tuple[Quota, ...] = ()
        tenants, tenant = self._config.tenants, caller.tenant
        if tenant is not None and (limits := tenants.get(tenant) or tenants.get(DEFAULT_TENANT)) is not None:
            quotas = (self._quota(TENANT, tenant, limits),)
        if caller.limits is not None:
            quotas = (*quotas, self._quota(KEY, caller.name, caller.limits))
        self._of_caller[caller.name] = (caller, quotas)
        return quotas

    def _quota(self, kind: Kind, name: str, limits: RateLimits) -> Quota:
        key = (kind, name)
        quota = self._quotas.get(key) or self._former.pop(key, None) or Quota(kind, name)
        quota.apply(limits, self._new_budget)
        self._quotas[key] = quota
        return quota
