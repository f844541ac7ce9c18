"""The sums of a day and the switch: with clocks that jump, files that are broken, and a gateway that is killed."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.config.schema import Remote
from greenroom.config.sections.remotes import TokenCost
from greenroom.errors import ConfigError, ConfigNotKept, RemoteBudgetSpent, RemoteSpendingUnknown
from greenroom.http.limits import MIB
from greenroom.runtime.remote.fallback import FILE_NAME as SWITCH_FILE
from greenroom.runtime.remote.fallback import VARIABLE, CloudFallback
from greenroom.runtime.remote.spending import (
    ANSWER_TOKENS,
    DAY_S,
    DAYS_KEPT,
    FILE_NAME,
    TOKENS_MAX,
    Spending,
    SpendingMeter,
)
from tests.full_disk import full_disk

pytestmark = pytest.mark.asyncio

NOON = 20_000.5 * DAY_S
REMOTE = Remote(base_url="https://a", cost=TokenCost(input=0, output=1e6), budget_per_day=10)


class Clock:
    now = NOON

    def __call__(self) -> float:
        return self.now


class Form:
    """The body of a form, which is not read here."""

    is_spooled = True

    def __len__(self) -> int:
        return 100

    def read(self) -> bytes:
        raise AssertionError

    def chunks(self) -> Iterator[bytes]:
        raise AssertionError


def opened(folder: Path, clock: Clock) -> tuple[Spending, SpendingMeter]:
    spending = Spending(folder, clock)
    spending.open()
    meter = spending.meter("acme", REMOTE, "large")
    assert meter is not None
    return spending, meter


def body(tokens: int, **more: int) -> bytes:
    return json.dumps({"model": "large", "max_tokens": tokens, **more}).encode()


async def test_a_new_day_has_its_own_budget_and_a_clock_that_jumps_opens_no_second_one(tmp_path: Path) -> None:
    clock = Clock()
    spending, meter = opened(tmp_path, clock)
    meter.begin(meter.bill(body(10))).settle(0, 10)
    with pytest.raises(RemoteBudgetSpent) as refused:
        meter.begin(meter.bill(body(1)))
    assert refused.value.retry_after_s == DAY_S / 2 and "acme" not in refused.value.public
    clock.now = NOON + 400 * DAY_S
    meter.begin(meter.bill(body(1))).settle(0, 1)
    clock.now = NOON
    with pytest.raises(RemoteBudgetSpent):
        meter.begin(meter.bill(body(1)))
    clock.now += DAY_S
    meter.begin(meter.bill(body(9))).settle(0, 9)
    assert spending.spent("acme") == 9.0 and spending.spent("other") == 0.0
    await spending.close()
    again, _ = opened(tmp_path, clock)
    assert again.spent("acme") == 9.0


@pytest.mark.parametrize("jump_s", [400 * DAY_S, -400 * DAY_S])
async def test_a_restart_while_the_clock_is_wrong_opens_no_second_budget(tmp_path: Path, jump_s: int) -> None:
    clock = Clock()
    for now, tokens in ((NOON, 10), (NOON + jump_s, 1)):
        clock.now = now
        spending, meter = opened(tmp_path, clock)
        meter.begin(meter.bill(body(tokens))).settle(0, tokens)
        await spending.close()
    clock.now = NOON
    assert opened(tmp_path, clock)[0].spent("acme") == 10.0


async def test_the_file_holds_the_last_days_only(tmp_path: Path) -> None:
    clock = Clock()
    spending, meter = opened(tmp_path, clock)
    for _ in range(3 * DAYS_KEPT):
        clock.now += DAY_S
        meter.begin(meter.bill(body(1))).settle(0, 1)
    await spending.close()
    days = json.loads((tmp_path / FILE_NAME).read_text())["days"]
    assert list(days) == [str(int(clock.now // DAY_S) - age) for age in reversed(range(DAYS_KEPT))]


async def test_what_is_under_way_is_written_down_as_spent(tmp_path: Path) -> None:
    spending, meter = opened(tmp_path, Clock())
    bill = meter.begin(meter.bill(body(4, n=2)))
    assert spending.spent("acme") == 8.0
    await spending.close()
    # As if the gateway had been killed here.
    killed, _ = opened(tmp_path, Clock())
    assert killed.spent("acme") == 8.0
    bill.settle(None, None)
    bill.settle(0, 3)
    bill.drop()
    assert spending.spent("acme") == 8.0, "it is settled once"
    await spending.close()


@pytest.mark.parametrize(
    ("payload", "tokens"),
    [
        (b"{}", ANSWER_TOKENS),
        (b"no json", ANSWER_TOKENS),
        (b'{"max_tokens": "many"}', ANSWER_TOKENS),
        (b'{"max_tokens": 5, "max_completion_tokens": 7}', 7),
        (b'{"max_tokens": 9, "max_completion_tokens": 7}', 9),
        (b'{"max_tokens": 9, "max_completion_tokens": "few"}', ANSWER_TOKENS),
        (b'{"max_tokens": 9, "max_completion_tokens": null}', 9),
        (b'{"max_tokens": -5}', ANSWER_TOKENS),
        (b'{"max_tokens": 0}', ANSWER_TOKENS),
        (b'{"max_tokens": true}', ANSWER_TOKENS),
        (b'{"max_tokens": 1.5}', ANSWER_TOKENS),
        (b'{"max_tokens": 5000.0}', 5000),
        (b'{"max_tokens": 5e3}', 5000),
        (b'{"max_tokens": "5000"}', 5000),
        (b'{"max_tokens": 5000, "n": "two"}', 5000),
        (b'{"max_tokens": 5000, "n": 0}', 5000),
        (b'{"max_tokens": 5, "n": 3}', 15),
        (b'{"max_tokens": 5, "n": 3.0}', 15),
        (b'{"max_tokens": 5, "n": 2, "best_of": 4}', 20),
        (b'{"max_tokens": 5, "prompt": "one"}', 5),
        (b'{"max_tokens": 5, "prompt": ["one", "two", "three"], "n": 2}', 30),
        (b'{"max_tokens": 5, "prompt": [[1, 2], [3]]}', 10),
        (b'{"max_tokens": 5, "prompt": [1, 2, 3]}', 5),
        (b'{"max_tokens": 5, "prompt": []}', 5),
        (b'{"max_tokens": 5, "prompt": {"a": 1}}', 5),
        (b'{"max_tokens": 1e300}', TOKENS_MAX),
        (b'{"max_tokens": 1e300, "prompt": ["a", "b"], "n": 3}', TOKENS_MAX),
        (b'{"max_tokens": "' + b"9" * 5000 + b'"}', TOKENS_MAX),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", TOKENS_MAX),
    ],
)
async def test_what_a_request_may_cost_is_read_from_its_body(tmp_path: Path, payload: bytes, tokens: int) -> None:
    spending = Spending(tmp_path, Clock())
    cost = TokenCost(input=0, output=1e6)
    bill = SpendingMeter(spending, "acme", cost, None).bill(payload)
    assert bill.expected == tokens
    bill.drop()
    assert spending.spent("acme") == 0.0
    await spending.close()


async def test_what_is_no_number_is_not_quoted_by_its_error(tmp_path: Path) -> None:
    payload = b'{"n": {"a": "' + b"\xc3\xa9" * (2 * MIB) + b'"}}'
    spending = Spending(tmp_path, Clock())
    meter = SpendingMeter(spending, "acme", TokenCost(input=0, output=1e6), None)
    tracemalloc.start()
    assert meter.bill(payload).expected == ANSWER_TOKENS
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * len(payload)
    await spending.close()


@pytest.mark.parametrize(("n", "tokens"), [(None, 1), ("3", 3), ("", 1), ("many", 1), ("9" * 400, TOKENS_MAX)])
async def test_a_form_may_ask_for_several_answers(tmp_path: Path, n: str | None, tokens: int) -> None:
    spending = Spending(tmp_path, Clock())
    bill = SpendingMeter(spending, "acme", TokenCost(input=0, output=1e6), None).bill(Form(), n)
    assert bill.expected == min(tokens * ANSWER_TOKENS, TOKENS_MAX)
    bill.drop()
    await spending.close()


@pytest.mark.parametrize(("events", "received", "tokens"), [(3, 0, 3), (3, 40, 10), (3, 4_000, 50), (80, 4_000, 80)])
async def test_a_stream_that_was_left_counts_by_its_length_up_to_what_was_expected(
    tmp_path: Path, events: int, received: int, tokens: int
) -> None:
    spending = Spending(tmp_path, Clock())
    meter = SpendingMeter(spending, "acme", TokenCost(input=0, output=1e6), None)
    meter.begin(meter.bill(body(50))).settle_part(events, received)
    assert spending.spent("acme") == tokens
    await spending.close()


BROKEN = [
    *("", "{", "[]", '{"version": 1}', '{"version": 2, "days": {}}', '{"version": 1, "days": {"a": 5}}', "[" * 100_000),
    *('{"version": 1, "days": {"20000": {"acme": -5}}}', '{"version": 1, "days": {"20000": {"acme": NaN}}}'),
]


@pytest.mark.parametrize("text", BROKEN)
async def test_a_broken_file_opens_no_fresh_budget(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    spending, meter = opened(tmp_path, Clock())
    with pytest.raises(RemoteSpendingUnknown, match=FILE_NAME) as refused:
        meter.begin(meter.bill(body(1)))
    assert refused.value.status == 503 and refused.value.final and FILE_NAME not in refused.value.public
    without_budget = spending.meter("free", Remote(base_url="https://a", cost=TokenCost(input=0, output=1e6)), "large")
    assert without_budget is not None
    without_budget.begin(without_budget.bill(body(3))).settle(0, 3)
    await spending.close()
    assert (tmp_path / FILE_NAME).read_text() == text, "what is left of it is kept"
    (await spending.look_again())()
    with pytest.raises(RemoteSpendingUnknown):
        meter.begin(meter.bill(body(1)))
    (tmp_path / FILE_NAME).write_text('{"version": 1, "days": {"20000": {"acme": 8, "free": 1}}}')
    (await spending.look_again())()
    assert (spending.spent("acme"), spending.spent("free")) == (8.0, 4.0)
    meter.begin(meter.bill(body(2))).settle(0, 2)
    with pytest.raises(RemoteBudgetSpent):
        meter.begin(meter.bill(body(1)))
    await spending.close()
    assert opened(tmp_path, Clock())[0].spent("free") == 4.0


async def test_a_broken_file_that_is_removed_counts_from_0(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    spending, meter = opened(tmp_path, Clock())
    (tmp_path / FILE_NAME).unlink()
    (await spending.look_again())()
    meter.begin(meter.bill(body(1))).settle(0, 1)
    await spending.close()
    assert opened(tmp_path, Clock())[0].spent("acme") == 1.0


async def test_without_costs_nothing_is_counted(tmp_path: Path) -> None:
    spending, _ = opened(tmp_path, Clock())
    assert spending.meter("acme", Remote(base_url="https://a"), "large") is None


def switch(folder: Path, said: str | None = None) -> CloudFallback:
    fallback = CloudFallback(folder, {} if said is None else {VARIABLE: said})
    fallback.open()
    return fallback


@pytest.mark.parametrize(
    ("said", "is_allowed"), [(None, True), ("", True), ("true", True), ("False", False), ("0", False), (" off ", False)]
)
async def test_the_environment_says_it_first(tmp_path: Path, said: str | None, is_allowed: bool) -> None:
    assert switch(tmp_path, said).is_allowed is is_allowed


async def test_a_word_that_says_neither_prevents_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="true or false"):
        switch(tmp_path, "flase")


async def test_what_was_set_outlasts_a_restart_and_the_environment(tmp_path: Path) -> None:
    await switch(tmp_path).set(False)
    assert switch(tmp_path, "true").is_allowed is False
    await switch(tmp_path).set(True)
    assert switch(tmp_path, "false").is_allowed is True


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"allowCloudFallback": "yes"}', '{"allowCloudFallback": 1}', "[" * 9999]
)
async def test_a_broken_file_forbids(tmp_path: Path, text: str) -> None:
    (tmp_path / SWITCH_FILE).write_text(text)
    fallback = switch(tmp_path, "true")
    assert fallback.is_allowed is False
    await fallback.set(True)
    assert switch(tmp_path).is_allowed is True


async def test_what_cannot_be_kept_does_not_change(tmp_path: Path) -> None:
    fallback = CloudFallback(tmp_path, {})
    with full_disk(), pytest.raises(ConfigNotKept, match="File too large"):
        await fallback.set(False)
    assert fallback.is_allowed is True
