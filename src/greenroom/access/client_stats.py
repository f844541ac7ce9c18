"""What each client of a key asks for, how often and with which errors; and cooldown of those that only make mistakes.

Owns the counts since the start, bounded in number: callers choose the ids of their clients. A client that makes more
mistakes than it may is cooling down, which others notice by nothing. Nothing here waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

from greenroom.config.schema import Clients
from greenroom.errors import CoolingDown

# Clients that are kept apart, in all and of one key and tenant; further ones are counted under the name OTHER.
ROWS_MAX: Final = 2_000
CLIENTS_MAX: Final = 50
# Models of one client; what it asks of others is counted under OTHER.
MODELS_MAX: Final = 20
# A client without a request for this long makes room for others.
IDLE_S: Final = 3_600.0
OTHER: Final = "other"
# Statuses of mistakes that are the caller's own, by the gateway or by an engine. 401 is none: it may be about a key
# that is not the caller's. 408, 429 and 499 tell of time, and from 500 on of us.
MISTAKES: Final = frozenset((400, 403, 404, 405, 411, 413, 414, 415, 417, 422, 431))
_MINUTE_S: Final = 60.0
_ROUNDS_MAX: Final = 32

# Key, tenant and client; empty where there is none.
Who = tuple[str, str, str]


class ClientRecord:
    """One client of a key. Times are those of the clock."""

    def __init__(self, who: Who, now: float) -> None:
        self.key, self.tenant, self.client = who
        self.since = self.seen_at = now
        self.requests = 0
        self.models: dict[str, int] = {}
        # By code, or by status where an engine refused it.
        self.errors: dict[str, int] = {}
        self.mistakes = 0
        # Answered with 5xx.
        self.failed = 0
        self.cooldowns = 0
        self.cools_until = 0.0
        # When it made its last mistakes; None before the first one.
        self._mistakes_at: deque[float] | None = None
        # Cooldowns that followed each other soon.
        self._rounds = 0
        # Its requests in the minute of the clock that ends then, and in the one before.
        self._ends_at = _minute_end(now)
        self._now = self._before = 0

    def count(self, model: str, now: float) -> None:
        self.seen_at = now
        self.requests += 1
        if now >= self._ends_at:
            self._before, self._now = (self._now if now < self._ends_at + _MINUTE_S else 0), 0
            self._ends_at = _minute_end(now)
        self._now += 1
        models = self.models
        if model in models:
            models[model] += 1
        elif model:
            name = model if len(models) < MODELS_MAX else OTHER
            models[name] = models.get(name, 0) + 1

    def per_minute(self, now: float) -> float:
        """Its requests within the last minute, by what is left of the minute before this one."""
        left = (self._ends_at - now) / _MINUTE_S
        if left > 0.0:
            return self._now + self._before * left
        return self._now * max(0.0, 1.0 + left)

    def count_error(self, status: int, code: str) -> None:
        self.errors[code] = self.errors.get(code, 0) + 1
        if status >= 500:
            self.failed += 1
        elif status in MISTAKES:
            self.mistakes += 1

    def may_be_forgotten(self, rules: Clients, now: float) -> bool:
        """True once what it did no longer matters: neither for its next cooldown nor for how long that lasts."""
        since = max(self.seen_at, self.cools_until + _length_s(rules, self._rounds)) if self._rounds else self.seen_at
        return now - since > max(rules.window_s, _MINUTE_S)

    def cool(self, rules: Clients, now: float) -> None:
        """Count a mistake, and begin a cooldown if it is one too many."""
        assert rules.errors_max is not None
        if now < self.cools_until:
            # Made before the cooldown began.
            return
        made = self._mistakes_at
        if made is None or made.maxlen != rules.errors_max + 1:
            made = self._mistakes_at = deque(made or (), rules.errors_max + 1)
        made.append(now)
        if len(made) <= rules.errors_max or now - made[0] > rules.window_s:
            return
        lasted_s = _length_s(rules, self._rounds)
        if self._rounds and now > self.cools_until + rules.window_s + lasted_s:
            self._rounds = 0
        self._rounds = min(self._rounds + 1, _ROUNDS_MAX)
        self.cooldowns += 1
        self.cools_until = now + _length_s(rules, self._rounds)
        made.clear()


def _minute_end(now: float) -> float:
    return (now // _MINUTE_S + 1.0) * _MINUTE_S


def _length_s(rules: Clients, rounds: int) -> float:
    """How long the cooldown lasts that is the so-manieth in a row."""
    return min(rules.cooldown_s * 2.0 ** (rounds - 1), rules.cooldown_max_s)


class ClientStats:
    """All clients of this gateway. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float], *, rows_max: int = ROWS_MAX, clients_max: int = CLIENTS_MAX) -> None:
        self._clock = clock
        self._rows_max = rows_max
        self._clients_max = clients_max
        self._rules = Clients()
        # False: no client ever cools down.
        self.are_cooled = False
        self._rows: dict[Who, ClientRecord] = {}
        # The clients of one key and tenant that are kept apart.
        self._clients: dict[tuple[str, str], dict[str, ClientRecord]] = {}
        self._swept_at = -math.inf
        # All that does not fit.
        self._overflow = ClientRecord((OTHER, OTHER, OTHER), clock())

    def configure(self, rules: Clients) -> None:
        self._rules = rules
        self.are_cooled = rules.errors_max is not None

    def count(self, key: str, tenant: str, client: str, model: str, status: int, code: str | None) -> None:
        """Count a request that has ended. `code` is that of the error that the gateway answered with."""
        now = self._clock()
        row = self._rows.get((key, tenant, client))
        if row is None:
            row = self._new_row((key, tenant, client), now)
        row.count(model, now)
        if status >= 400:
            row.count_error(status, code or f"status_{status}")
            # What does not fit into the table are many clients, most of which may be innocent.
            if self.are_cooled and status in MISTAKES and row is not self._overflow:
                row.cool(self._rules, now)

    def check(self, key: str, tenant: str, client: str) -> None:
        """Raises CoolingDown. Needs to be asked only where `are_cooled`."""
        row = self._rows.get((key, tenant, client))
        now = self._clock()
        if row is None and not self._has_room(key, tenant, now):
            row = self._rows.get((key, tenant, OTHER))
        # Rounded, because the sum of two numbers less one of them may be more than the other.
        left_s = 0.0 if row is None else round(row.cools_until - now, 6)
        if row is not None and left_s > 0:
            raise CoolingDown(
                f"{_named(row)} made more than {self._rules.errors_max} mistakes within {self._rules.window_s:g} s. "
                f"Ask again in {math.ceil(left_s)} s, with other requests.",
                retry_after_s=left_s,
            )

    def rows(self) -> list[ClientRecord]:
        """Those that asked last first; then all that did not fit into the table, as one."""
        rows = sorted(self._rows.values(), key=lambda row: row.seen_at, reverse=True)
        return [*rows, self._overflow] if self._overflow.requests else rows

    def now(self) -> float:
        return self._clock()

    def _has_room(self, key: str, tenant: str, now: float) -> bool:
        return len(self._clients.get((key, tenant), ())) < self._clients_max or bool(self._quiet(key, tenant, now))

    def _quiet(self, key: str, tenant: str, now: float) -> list[ClientRecord]:
        """Its clients that make room for others of the same key."""
        return [row for row in self._clients[(key, tenant)].values() if row.may_be_forgotten(self._rules, now)]

    def _new_row(self, who: Who, now: float) -> ClientRecord:
        key, tenant, _ = who
        if len(self._rows) >= self._rows_max:
            self._forget_idle(now)
        clients = self._clients.get((key, tenant), {})
        if len(clients) >= self._clients_max:
            if quiet := self._quiet(key, tenant, now):
                forgotten = min(quiet, key=lambda row: row.seen_at).client
                del clients[forgotten], self._rows[(key, tenant, forgotten)]
            else:
                who = (key, tenant, OTHER)
        if (row := self._rows.get(who)) is not None:
            return row
        if len(self._rows) >= self._rows_max:
            return self._overflow
        row = self._rows[who] = ClientRecord(who, now)
        self._keep_apart(row)
        return row

    def _keep_apart(self, row: ClientRecord) -> None:
        if row.client != OTHER:
            self._clients.setdefault((row.key, row.tenant), {})[row.client] = row

    def _forget_idle(self, now: float) -> None:
        """At most once a minute: it looks at all rows."""
        if now - self._swept_at < _MINUTE_S:
            return
        self._swept_at = now
        kept = [row for row in self._rows.values() if now - row.seen_at < IDLE_S or now < row.cools_until]
        self._rows = {(row.key, row.tenant, row.client): row for row in kept}
        self._clients = {}
        for row in kept:
            self._keep_apart(row)


def _named(row: ClientRecord) -> str:
    if row.client:
        return f"The client {row.client}"
    return f"The key {row.key}" if row.key else "What gives neither a key nor a client's id"
