"""How long the whole answer may take, by the caller's word: refused when that cannot be, cut when it is over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import fake, gateway
from tests.integration.facts import Journal, at_rest
from tests.integration.raw import Answer, Raw, asking, chat, http
from tests.samples.sounds import FORM, form
from tests.waiting import until

QUICK = {"heartbeat_after_s": 0.2, "heartbeat_every_s": 0.2}
HEADER = "X-Request-Timeout-S"
ENDLESS = 1_000_000


async def cut(ask: Callable[[float], Awaitable[Answer]], is_late_enough: Callable[[Answer], object]) -> Answer:
    """The answer within the first of ever longer budgets that lasted until this was so: the machine may be busy."""
    for budget_s in (0.6, 2.4, 9.6, 38.4):
        answer = await ask(budget_s)
        if is_late_enough(answer):
            break
    return answer


async def test_budget_that_is_no_time_is_refused_by_name(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}) as app:
        for said in ("0", "-1", "nan", "inf", "soon", ""):
            answer = await chat(app, "a", headers={HEADER: said})
            assert (answer.status, answer.error["param"]) == (400, HEADER), said
        # Both must be times, whichever is the smaller.
        answer = await chat(app, "a", headers={HEADER: "5"}, x_budget_s=-2)
        assert (answer.status, answer.error["param"]) == (400, "x_budget_s")


# Ways to say it; where both are said, the smaller counts.
SAID: tuple[Callable[[float], dict[str, Any]], ...] = (
    lambda budget_s: {"headers": {HEADER: str(budget_s)}},
    lambda budget_s: {"x_budget_s": budget_s},
    lambda budget_s: {"headers": {HEADER: str(budget_s)}, "x_budget_s": 60},
    lambda budget_s: {"headers": {HEADER: "60"}, "x_budget_s": budget_s},
)


async def test_answer_is_cut_when_the_smaller_budget_is_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    async with gateway(tmp_path, {"a": fake("a", "--token-s", "0.05", *journal.switches)}) as app:
        await chat(app, "a", tokens=0)
        for more in SAID:
            asked, stopped = journal.count("request"), journal.count("cancelled")
            answer = await cut(
                lambda budget_s, more=more: chat(app, "a", tokens=ENDLESS, **more(budget_s)),  # type: ignore[misc]
                lambda _, asked=asked: journal.count("request") > asked,  # type: ignore[misc]
            )
            assert (answer.status, answer.error["code"], answer.error["type"]) == (
                504,
                "budget_passed",
                "timeout_error",
            )
            await until(lambda stopped=stopped: journal.count("cancelled") > stopped, "the engine was told to stop")
            await at_rest(app)
            decision = next(told for told in reversed(app.observer.decisions) if told["what"] == "cut")
            assert (decision["why"], decision["model"]) == ("budget", "a")
            assert decision["request"] == answer.headers["x-request-id"]


async def test_stream_is_cut_with_an_error_event(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a", "--token-s", "0.05")}) as app:
        await chat(app, "a", tokens=0)
        answer = await cut(
            lambda budget_s: chat(app, "a", stream=True, tokens=ENDLESS, x_budget_s=budget_s),
            lambda answer: len(answer.data) > 1,
        )
    assert_cut(answer)
    assert len(answer.data) > 1, "what was answered in time was sent"


async def test_stream_that_only_heard_heartbeats_is_cut_with_an_error_event(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a", "--token-s", "300")}, server=QUICK) as app:
        await chat(app, "a", tokens=0)
        answer = await cut(
            lambda budget_s: chat(app, "a", stream=True, x_budget_s=budget_s),
            lambda answer: answer.events[0].startswith(":"),
        )
    assert answer.events[0].startswith(":")
    assert_cut(answer)


def assert_cut(answer: Answer) -> None:
    error = answer.data[-1]["error"]
    assert (answer.status, answer.whole) == (200, True)
    assert (error["status"], error["code"], error["type"]) == (504, "budget_passed", "timeout_error")
    assert "[DONE]" not in answer.data


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_budget_that_is_over_while_the_model_loads_is_told_as_such(tmp_path: Path, stream: bool) -> None:
    async with gateway(tmp_path, {"a": fake("a", "--load-s", "3")}, server=QUICK) as app:
        answer = await chat(app, "a", stream=stream, x_budget_s=0.8)
        if stream:
            assert_cut(answer)
        else:
            assert (answer.status, answer.error["code"], answer.error["type"]) == (
                504,
                "budget_passed",
                "timeout_error",
            )
            assert answer.error["loading"]["state"] == "loading"
        (record,) = app.activity.recent(1)
        assert (record.status, record.error_code) == (504, "budget_passed")
        assert (await chat(app, "a")).status == 200, "the load went on"


async def test_answer_that_usually_takes_longer_is_refused_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    models = {"a": fake("a", "--token-s", "0.4", "--tokens", "4", *journal.switches)}
    async with gateway(tmp_path, models) as app:
        for _ in range(2):
            assert (await chat(app, "a")).status == 200
        answer = await chat(app, "a", x_budget_s=0.5)
        assert (answer.status, answer.error["code"]) == (503, "model_loading")
        assert "ready" in answer.error["message"]
        assert int(answer.headers["retry-after"]) >= 1
        assert journal.count("request") == 2, "the engine was not bothered"
        assert (await chat(app, "a", x_budget_s=60)).status == 200


async def test_answer_within_its_budget_is_whole(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a", "--record", *(journal := Journal(tmp_path)).switches)}) as app:
        answer = await chat(app, "a", x_budget_s=60, headers={HEADER: "50"})
        assert answer.status == 200
        await at_rest(app)
    (request,) = journal.lines("request")
    assert "budget" not in str(request).lower() and "timeout" not in str(request).lower(), "it is between us"


async def test_form_has_its_budget_in_a_field_or_the_header(tmp_path: Path) -> None:
    models = {"ear": fake("ear", "--hang", "serve")}
    async with gateway(tmp_path, models) as app:
        for budget, headers in (
            ([("x_budget_s", "0.4")], {}),
            ([("x_budget_s", "60")], {HEADER: "0.4"}),
            ([], {HEADER: "0.4"}),
        ):
            body = form([("model", "ear"), *budget], b"RIFF" * 10)
            answer = await http(app, "POST", "/v1/audio/transcriptions", body=body, headers=FORM | headers)
            # The first may still be loading when its time is over; later ones are being answered.
            assert answer.status in (503, 504), answer.body
            await until(lambda: bool(app.slots.live), "loaded")
        assert answer.error["code"] == "budget_passed"


async def test_client_that_leaves_before_its_budget_is_over_leaves_no_timer(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a", "--token-s", "0.05")}) as app:
        async with await Raw.open(app) as raw:
            raw.ask(asking("a", stream=True, tokens=ENDLESS, x_budget_s=30))
            await raw.head()
        await at_rest(app)
        assert not [timer for timer in app.effects._timers if timer.kind.value == "budget"]
