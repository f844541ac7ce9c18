"""What was spent at each provider today, and the budget that ends it.

Owns the sums of a day (UTC) and their file in the state directory. A request is entered with what it is expected to
cost before it is sent, so that requests at once cannot pass the budget together; when it has ended, its real cost takes
that place. What a provider may have worked on is counted as it was expected, of a stream what came, and what it refused
is free. What is written down includes what is still under way: a gateway that is killed forgets no expense.
Gateways with a common store tell each other their sums (`shared.py`); while it is away, each spends its share of what
was left.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec

from greenroom.base.detached import run_detached
from greenroom.base.plain_file import read_plain, replace_file
from greenroom.base.repeated import AGAIN_S, Repeated
from greenroom.config.part import Apply
from greenroom.config.schema import Remote
from greenroom.config.sections.remotes import TokenCost
from greenroom.errors import RemoteBudgetSpent, RemoteSpendingUnknown
from greenroom.http.body import Payload, Spliced
from greenroom.http.relays.relay import Relay
from greenroom.telemetry.activity import Record
from greenroom.telemetry.logs import get_logger

_log = get_logger("remote")

FILE_NAME: Final = "spending.json"
VERSION: Final = 1
FILE_BYTES_MAX: Final = 1024 * 1024
DAY_S: Final = 86_400
# The last days of a gateway, in the order in which they began here, whatever the clock says: one that was wrong for a
# while must neither open a new budget for today nor keep the old one for ever.
DAYS_KEPT: Final = 7
# Where a request does not say how long its answer may be, or what its body holds.
ANSWER_TOKENS: Final = 1_000
BYTES_PER_TOKEN: Final = 4
TOKENS_MAX: Final = 10**9

# By day, counted from 1970, and provider.
Days = dict[int, dict[str, float]]

_NULL: Final = msgspec.Raw(b"null")


class _AnswerBounds(msgspec.Struct):
    """The fields of a request by which its answer is bounded. Each is read alone: a wrong one hides no other."""

    max_tokens: msgspec.Raw = _NULL
    max_completion_tokens: msgspec.Raw = _NULL
    n: msgspec.Raw = _NULL
    best_of: msgspec.Raw = _NULL
    prompt: msgspec.Raw = _NULL


@dataclass(frozen=True, slots=True)
class SharedSpending:
    """What the store said last: on which day, after this gateway had spent `own`, and how many gateways there are."""

    day: int
    own: dict[str, float]
    others: dict[str, float]
    gateways: int


class SpendingStore(Protocol):
    """What gateways share (`shared.py`)."""

    async def ask(self) -> bool:
        """Tell it what was spent here, and hear what others spent. False if it does not answer."""
        ...

    def wake(self) -> None:
        """The same soon, without waiting for it."""

    async def set(self, is_allowed: bool) -> bool:
        """Set the switch for fallbacks at all gateways. False if it does not answer."""
        ...


class Spending:
    """Call `open` before anything is asked."""

    def __init__(self, folder: Path, wall: Callable[[], float] = time.time) -> None:
        self._path = folder / FILE_NAME
        self._wall = wall
        self._spent: Days = {}
        self._open: set[Bill] = set()
        self._is_stale = False
        self._writing = Repeated(
            self._write_down, "writing what was spent", lambda: AGAIN_S if self._is_stale else None, _log.failed
        )
        # Why it is not known what earlier runs spent. The file is not written then: it is the only trace of that.
        self.problem: str | None = None
        # Exchanges sums with the other gateways. None where none is shared.
        self.shared: SpendingStore | None = None
        self.is_store_away = False
        self._heard: SharedSpending | None = None
        # What the file said, until the store was asked what an earlier run had told it beyond that.
        self._read: Days = {}
        self.is_recalled = False
        # Why the file cannot be written. While it cannot, a restart would forget what is spent.
        self._unwritten: str | None = None

    def open(self) -> None:
        """Read what earlier runs spent; no file means nothing. Blocks. Sets `problem` if the file cannot be read."""
        self._add(self._look())

    async def look_again(self) -> Apply:
        """Read the file if it could not be read before: an operator may have mended or removed it."""
        if self.problem is None:
            return lambda: None
        return partial(self._add, await run_detached(self._look, "read spending"))

    def _look(self) -> Days | str:
        """What the file says, or why it cannot be read."""
        try:
            return _read(self._path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return f"{self._path} cannot be read: {str(error)[:200] or type(error).__name__}"

    def _add(self, said: Days | str) -> None:
        """Add what the file says to what was spent since."""
        if isinstance(said, str):
            self.problem = said
            _log.error("what was spent is not known: nothing more is, where there is a budget", problem=said)
            return
        self.problem = None
        self._read = said
        for day, sums in said.items():
            of_day = self._spent.setdefault(day, {})
            of_day.update({name: of_day.get(name, 0.0) + cost for name, cost in sums.items()})

    def meter(self, name: str, remote: Remote, model: str) -> SpendingMeter | None:
        """Counts what this model of a provider costs; None if nothing is known of its cost."""
        cost = remote.costs.get(model, remote.cost)
        return None if cost is None else SpendingMeter(self, name, cost, remote.budget_per_day)

    def spent(self, name: str) -> float:
        """What was spent at this provider today, with what requests that are under way may cost. By all gateways that
        share a store, as far as it is known."""
        return self._own(name) + self._others(name)

    def _own(self, name: str) -> float:
        under_way = sum(bill.expected for bill in self._open if bill.name == name)
        return self._spent.get(self._today, {}).get(name, 0.0) + under_way

    def _others(self, name: str) -> float:
        heard = self._heard
        return 0.0 if heard is None or heard.day != self._today else heard.others.get(name, 0.0)

    def own(self) -> tuple[int, dict[str, float]]:
        """Today, and what this gateway has spent; nothing while that is not known."""
        names = {*self._spent.get(self._today, {}), *(bill.name for bill in self._open)}
        return self._today, {} if self.problem is not None else {name: self._own(name) for name in sorted(names)}

    def hear(self, heard: SharedSpending) -> None:
        self._heard, self.is_store_away = heard, False

    def recall(self, day: int, told: Mapping[str, float]) -> None:
        """So much an earlier run has spent on this day, as it told the store: count what its file did not say."""
        self.is_recalled = True
        of_day, read = self._spent.setdefault(day, {}), self._read.get(day, {})
        for name, cost in told.items():
            of_day[name] = of_day.get(name, 0.0) + max(0.0, cost - read.get(name, 0.0))

    def _left(self, name: str, budget: float) -> float:
        """What may still be spent here today. While the store is away, a share of what was left when it went."""
        if not self.is_store_away:
            return budget - self.spent(name)
        heard = self._heard
        if heard is None:
            return 0.0
        own_then = heard.own.get(name, 0.0) if heard.day == self._today else 0.0
        share = max(0.0, budget - own_then - self._others(name)) / heard.gateways
        return own_then + share - self._own(name)

    def begin(self, bill: Bill, budget: float | None) -> None:
        """Enter a request. Raises RemoteBudgetSpent if it might cost more than is left of today's budget,
        RemoteSpendingUnknown if that is not known."""
        if budget is not None and self.problem is not None:
            raise RemoteSpendingUnknown(
                f"What was spent at remotes.{bill.name} today is not known, and it has a budget: {self.problem}. Mend "
                "that file, or remove it to count from 0, and reload the configuration.",
                retry_after_s=None,
            )
        if budget is not None and self._unwritten is not None:
            self._write_soon()
            raise RemoteSpendingUnknown(
                f"What is spent at remotes.{bill.name} cannot be written down, and it has a budget: {self._unwritten}.",
                retry_after_s=None,
            )
        if budget is not None and bill.expected > self._left(bill.name, budget):
            raise self._refusal(bill, budget, self.spent(bill.name))
        self._open.add(bill)
        self._write_soon()

    async def confirm(self, bill: Bill, budget: float | None) -> None:
        """Tell the other gateways of a request that was entered. Raises RemoteBudgetSpent if theirs leave no room."""
        if budget is None or self.shared is None or self.is_store_away:
            return
        await self.shared.ask()
        if self._left(bill.name, budget) < 0.0:
            raise self._refusal(bill, budget, self.spent(bill.name) - bill.expected)

    def _refusal(self, bill: Bill, budget: float, spent: float) -> RemoteBudgetSpent:
        share = ""
        if self.is_store_away:
            share = (
                " The store of what all gateways spend does not answer: this one may spend a share of what was left."
            )
        return RemoteBudgetSpent(
            f"remotes.{bill.name}: {spent:.4g} of today's budget of {budget:g} are spent, and this request may "
            f"cost {bill.expected:.4g}.{share}",
            retry_after_s=DAY_S - self._wall() % DAY_S,
        )

    def end(self, bill: Bill, cost: float) -> None:
        """Enter what a request has cost."""
        self._open.discard(bill)
        of_today = self._spent.setdefault(self._today, {})
        of_today[bill.name] = of_today.get(bill.name, 0.0) + cost
        if self.shared is not None and cost != bill.expected:
            self.shared.wake()
        self._write_soon()

    async def close(self) -> None:
        """Write a last time, if there is anything to write. Raises OSError."""
        await self._writing.stop()
        await self._write_down()

    @property
    def _today(self) -> int:
        return int(self._wall() // DAY_S)

    def _write_soon(self) -> None:
        self._is_stale = True
        self._writing.start()
        self._writing.wake()

    async def _write_down(self) -> None:
        if not self._is_stale or self.problem is not None:
            return
        self._is_stale = False
        try:
            await run_detached(partial(replace_file, self._path, self._text()), "write spending")
            self._unwritten = None
        except BaseException as error:
            self._is_stale = True
            self._unwritten = f"{self._path}: {getattr(error, 'strerror', None) or error}"
            raise

    def _text(self) -> str:
        today = self._today
        days = dict([one for one in self._spent.items() if one[0] != today][1 - DAYS_KEPT :])
        names = {*self._spent.get(today, {}), *(bill.name for bill in self._open)}
        days[today] = {name: self._own(name) for name in names}
        return json.dumps({"version": VERSION, "days": days})


def _read(path: Path) -> Days:
    """The sums of each day. Raises OSError, ValueError, KeyError, TypeError or RecursionError."""
    said = json.loads(read_plain(path, FILE_BYTES_MAX))
    if said["version"] != VERSION:
        raise ValueError("it is of another version of Greenroom")
    days = msgspec.convert(said["days"], Days, strict=False)
    if not all(0.0 <= cost < math.inf for sums in days.values() for cost in sums.values()):
        raise ValueError("a sum in it is no amount")
    return days


class SpendingMeter:
    """Counts the requests to one model of a provider."""

    def __init__(self, spending: Spending, name: str, cost: TokenCost, budget: float | None) -> None:
        self._spending = spending
        self._name = name
        self._cost = cost
        self._budget = budget

    def bill(self, payload: Payload, form_n: str | None = None) -> Bill:
        """What a request is expected to cost. `form_n` is the field `n` of a form. A long one is read in a thread."""
        prompt = -(-len(payload) // BYTES_PER_TOKEN)
        if isinstance(payload, bytes | Spliced):
            answer = _answer_tokens(payload if isinstance(payload, bytes) else payload.outline)
        else:
            answer = ANSWER_TOKENS * _count((form_n or "").encode(), 1)
        return Bill(self._spending, self._name, self._cost, prompt, min(answer, TOKENS_MAX))

    def begin(self, bill: Bill) -> Bill:
        """Enter a request that is about to be sent. Raises RemoteBudgetSpent."""
        self._spending.begin(bill, self._budget)
        return bill

    async def confirm(self, bill: Bill) -> None:
        """Enter it with the other gateways, where there are any. Raises RemoteBudgetSpent, and drops it."""
        try:
            await self._spending.confirm(bill, self._budget)
        except BaseException:
            bill.drop()
            raise


class Bill:
    """One request: what it is expected to cost, until it is settled, once."""

    __slots__ = ("_answer", "_cost", "_is_settled", "_prompt", "_spending", "expected", "name")

    def __init__(self, spending: Spending, name: str, cost: TokenCost, prompt: int, answer: int) -> None:
        self._spending = spending
        self._cost = cost
        self._prompt = prompt
        self._answer = answer
        self._is_settled = False
        self.name = name
        self.expected = cost.of(prompt, answer)

    def settle(self, prompt: int | None, answer: int | None, cached: int = 0) -> None:
        """It has ended and used so many tokens; None where that is not known: then what was expected counts."""
        if answer is None:
            self._end(self.expected)
        else:
            self._end(self._cost.of(self._prompt if prompt is None else prompt, answer, cached))

    def settle_part(self, answer: int, received: int) -> None:
        """It has ended, tells no tokens, and has at least so many: one for each event of a stream. An event may have
        more. By its length in bytes, which is much more than its text's, it counts up to what was expected."""
        self._end(self._cost.of(self._prompt, max(answer, min(received // BYTES_PER_TOKEN, self._answer))))

    def drop(self) -> None:
        """It has cost nothing: the provider did not answer it."""
        self._end(0.0)

    def _end(self, cost: float) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._spending.end(self, cost)


def _answer_tokens(payload: bytes) -> int:
    """The most tokens that the answers may have, as far as the request says."""
    try:
        asked = msgspec.json.decode(payload, type=_AnswerBounds)
    except msgspec.DecodeError:
        return ANSWER_TOKENS
    told = [bytes(said) for said in (asked.max_tokens, asked.max_completion_tokens) if said != _NULL]
    bounds = [_count(said, ANSWER_TOKENS) for said in told]
    answers = max(_count(bytes(asked.n), 1), _count(bytes(asked.best_of), 1))
    return max(bounds, default=ANSWER_TOKENS) * answers * _prompts(asked.prompt)


def _prompts(said: msgspec.Raw) -> int:
    """How many prompts a text completion has: each is answered. A list of numbers is one prompt."""
    try:
        prompts = msgspec.json.decode(said, type=list[msgspec.Raw])
    except msgspec.DecodeError:
        return 1
    return max(1, sum(bytes(prompt).lstrip()[:1] in (b'"', b"[") for prompt in prompts))


def _count(said: bytes, otherwise: int) -> int:
    """A whole number above 0, which some providers also read from 5.0 or "5"; `otherwise` for anything else."""
    if said[:1] in (b"[", b"{"):
        # The error of `float` would quote all of it.
        return otherwise
    try:
        number = float(said.strip(b'"'))
    except ValueError:
        return otherwise
    if number >= TOKENS_MAX:
        return TOKENS_MAX
    return int(number) if number >= 1 and number.is_integer() else otherwise


def settle(bill: Bill, record: Record, relay: Relay | None) -> None:
    """Enter the cost of a request that has ended."""
    if relay is None or not _has_worked(relay):
        bill.drop()
    elif record.estimated and record.completion_tokens is not None:
        bill.settle_part(record.completion_tokens, relay.total_bytes)
    else:
        bill.settle(record.prompt_tokens, record.completion_tokens, record.cached_tokens or 0)


def _has_worked(relay: Relay) -> bool:
    """True if the provider answered, or had the request and may have begun to when it was left or lost."""
    return relay.was_sent if relay.status == 0 else relay.status == 200
