"""What was spent at each provider today, and the budget that ends it.

Owns the sums of a day (UTC) and their file in the state directory. A request is entered with what it is expected to
cost before it is sent, so that requests at once cannot pass the budget together; when it has ended, its real cost takes
that place. What is written down includes what is still under way: a gateway that is killed forgets no expense.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from greenroom.config.plain_file import read_plain
from greenroom.config.schema import Remote
from greenroom.config.sections.remotes import TokenCost
from greenroom.errors import RemoteBudgetSpent
from greenroom.http.body import Payload
from greenroom.runtime.detached import run_detached
from greenroom.telemetry.logs import get_logger

_log = get_logger("remote")

FILE_NAME: Final = "spending.json"
VERSION: Final = 1
FILE_BYTES_MAX: Final = 1024 * 1024
DAY_S: Final = 86_400
# A clock that was wrong for a while must neither open a new budget for today nor keep the old one for ever.
DAYS_KEPT: Final = 7
# Where a request does not say how long its answer may be, or what its body holds.
ANSWER_TOKENS: Final = 1_000
BYTES_PER_TOKEN: Final = 4
TOKENS_MAX: Final = 10**9


_NULL: Final = msgspec.Raw(b"null")


class _Asked(msgspec.Struct):
    """The fields of a request by which its answer is bounded. Each is read alone: a wrong one hides no other."""

    max_tokens: msgspec.Raw = _NULL
    max_completion_tokens: msgspec.Raw = _NULL
    n: msgspec.Raw = _NULL
    best_of: msgspec.Raw = _NULL


class Spending:
    """`write` replaces a file; it blocks. Call `open` before anything is asked."""

    def __init__(self, folder: Path, write: Callable[[Path, str], None], wall: Callable[[], float] = time.time) -> None:
        self._path = folder / FILE_NAME
        self._write = write
        self._wall = wall
        self._spent: dict[int, dict[str, float]] = {}
        self._open: set[Bill] = set()
        self._writing: asyncio.Task[None] | None = None
        self._is_stale = False

    def open(self) -> None:
        """Read what earlier runs spent. Blocks."""
        try:
            said = json.loads(read_plain(self._path, FILE_BYTES_MAX))
            if said["version"] == VERSION:
                self._spent = msgspec.convert(said["days"], dict[int, dict[str, float]], strict=False)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            _log.error("what was spent cannot be read, and is counted from 0", file=str(self._path), error=str(error))

    def meter(self, name: str, remote: Remote, model: str) -> Meter | None:
        """Counts what this model of a provider costs; None if nothing is known of its cost."""
        cost = remote.costs.get(model, remote.cost)
        return None if cost is None else Meter(self, name, cost, remote.budget_per_day)

    def spent(self, name: str) -> float:
        """What was spent at this provider today, with what requests that are under way may cost."""
        under_way = sum(bill.expected for bill in self._open if bill.name == name)
        return self._spent.get(self._today, {}).get(name, 0.0) + under_way

    def begin(self, bill: Bill, budget: float | None) -> None:
        """Enter a request. Raises RemoteBudgetSpent if it might cost more than is left of today's budget."""
        spent = self.spent(bill.name)
        if budget is not None and spent + bill.expected > budget:
            raise RemoteBudgetSpent(
                f"remotes.{bill.name}: {spent:.4g} of today's budget of {budget:g} are spent, and this request may "
                f"cost {bill.expected:.4g}.",
                retry_after_s=DAY_S - self._wall() % DAY_S,
            )
        self._open.add(bill)
        self._write_soon()

    def end(self, bill: Bill, cost: float) -> None:
        """Enter what a request has cost."""
        self._open.discard(bill)
        of_today = self._spent.setdefault(self._today, {})
        of_today[bill.name] = of_today.get(bill.name, 0.0) + cost
        self._write_soon()

    async def close(self) -> None:
        """Write a last time, if there is anything to write."""
        while self._writing is not None:
            await asyncio.wait((self._writing,))

    @property
    def _today(self) -> int:
        return int(self._wall() // DAY_S)

    def _write_soon(self) -> None:
        self._is_stale = True
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_down(), name="write spending")
            self._writing.add_done_callback(self._written)

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writing = None

    async def _write_down(self) -> None:
        while self._is_stale:
            self._is_stale = False
            try:
                await run_detached(partial(self._write, self._path, self._text()), "write spending")
            except OSError as error:
                _log.error("what was spent cannot be written", file=str(self._path), error=str(error))

    def _text(self) -> str:
        today = self._today
        days = {day: sums for day, sums in self._spent.items() if abs(day - today) <= DAYS_KEPT}
        names = {*days.get(today, {}), *(bill.name for bill in self._open)}
        days[today] = {name: self.spent(name) for name in names}
        return json.dumps({"version": VERSION, "days": days})


class Meter:
    """Counts the requests to one model of a provider."""

    def __init__(self, spending: Spending, name: str, cost: TokenCost, budget: float | None) -> None:
        self._spending = spending
        self._name = name
        self._cost = cost
        self._budget = budget

    def begin(self, payload: Payload) -> Bill:
        """Enter a request that is about to be sent. Raises RemoteBudgetSpent."""
        prompt = -(-len(payload) // BYTES_PER_TOKEN)
        bill = Bill(self._spending, self._name, self._cost, prompt, _answer_tokens(payload))
        self._spending.begin(bill, self._budget)
        return bill


class Bill:
    """One request: what it is expected to cost, until it is settled, once."""

    __slots__ = ("_cost", "_is_settled", "_prompt", "_spending", "expected", "name")

    def __init__(self, spending: Spending, name: str, cost: TokenCost, prompt: int, answer: int) -> None:
        self._spending = spending
        self._cost = cost
        self._prompt = prompt
        self._is_settled = False
        self.name = name
        self.expected = cost.of(prompt, answer)

    def settle(self, prompt: int | None, answer: int | None, cached: int = 0) -> None:
        """It has ended and used so many tokens; None where that is not known: then what was expected counts."""
        if answer is None:
            self._end(self.expected)
        else:
            self._end(self._cost.of(self._prompt if prompt is None else prompt, answer, cached))

    def drop(self) -> None:
        """It has cost nothing: the provider did not answer it."""
        self._end(0.0)

    def _end(self, cost: float) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._spending.end(self, cost)


def _answer_tokens(payload: Payload) -> int:
    """The most tokens that the answer may have, as far as the request says."""
    if not isinstance(payload, bytes):
        return ANSWER_TOKENS
    try:
        asked = msgspec.json.decode(payload, type=_Asked)
    except msgspec.DecodeError:
        return ANSWER_TOKENS
    bounds = [_count(said, ANSWER_TOKENS) for said in (asked.max_tokens, asked.max_completion_tokens) if said != _NULL]
    answers = max(_count(asked.n, 1), _count(asked.best_of, 1))
    return min(max(bounds, default=ANSWER_TOKENS) * answers, TOKENS_MAX)


def _count(said: msgspec.Raw, otherwise: int) -> int:
    """A whole number above 0, which some providers also read from 5.0 or "5"; `otherwise` for anything else."""
    try:
        number = float(bytes(said).strip(b'"'))
    except ValueError:
        return otherwise
    if number >= TOKENS_MAX:
        return TOKENS_MAX
    return int(number) if number >= 1 and number.is_integer() else otherwise
