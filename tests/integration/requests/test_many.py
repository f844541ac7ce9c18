"""Two hundred requests at once over four models of which two fit: each answered once, by the right one; no traces."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind
from tests.harness import fake, gateway, tiny, url
from tests.integration.facts import Journal, at_rest
from tests.integration.raw import chat
from tests.later import Later
from tests.models import tiny as tiny_model
from tests.waiting import until

openai = Later("openai")

pytestmark = pytest.mark.slow

REQUESTS = 200
NAMES = ("alpha", "bravo", "charlie", "delta")
# Each model claims 100 MiB, so that two are in memory at once.
BUDGET_MIB = 250


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def shuffled(seed: int) -> list[tuple[str, bool]]:
    """Which model each request asks for, and whether as a stream: the same for the same seed."""
    requests = [(NAMES[number % len(NAMES)], number % 8 < 4) for number in range(REQUESTS)]
    random.Random(seed).shuffle(requests)
    return requests


async def test_200_mixed_requests_over_4_real_models_with_memory_for_2(tmp_path: Path) -> None:
    models = {name: tiny(tiny_model(name)) for name in NAMES}
    async with gateway(tmp_path, models, budget_mib=BUDGET_MIB) as app:
        files, tasks = open_files(), len(asyncio.all_tasks())
        async with openai.AsyncOpenAI(base_url=url(app) + "/v1", api_key="none", max_retries=0) as client:
            said = await asyncio.gather(*(ask(client, *request) for request in shuffled(seed=1)))
        assert said == [f" {name} says hello" for name, _ in shuffled(seed=1)]
        await at_rest(app)
        served_as_often_as_asked(app)
        await unload_all(app)
        await until(lambda: open_files() <= files, f"open files back to {files}: {open_files()}")
        await until(lambda: len(asyncio.all_tasks()) <= tasks, f"tasks back to {tasks}: {asyncio.all_tasks()}")
        state = app.loop.scheduler.state
        assert state.counters.ignored == 0
        assert state.counters.grants == state.counters.dones == REQUESTS


async def ask(client: openai.AsyncOpenAI, model: str, stream: bool) -> str | None:
    question: Any = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
    if not stream:
        answer: openai.types.chat.ChatCompletion = await client.chat.completions.create(**question)
        return answer.choices[0].message.content
    pieces = [chunk async for chunk in await client.chat.completions.create(**question, stream=True)]
    return "".join(choice.delta.content or "" for piece in pieces for choice in piece.choices)


def served_as_often_as_asked(app: App) -> None:
    """By what the engines said of their answers: each generated the four tokens of its one sentence."""
    records = app.activity.recent(10 * REQUESTS)
    assert len(records) == REQUESTS
    assert {record.status for record in records} == {200}
    assert Counter(record.model for record in records) == dict.fromkeys(NAMES, REQUESTS // len(NAMES))
    assert all(record.completion_tokens == 4 for record in records)


async def unload_all(app: App) -> None:
    """Connections to engines and their logs are files too."""
    await asyncio.gather(*(app.operations.move(MoveKind.UNLOAD, ModelId(name)) for name in NAMES))
    assert not app.loop.scheduler.state.slots
    assert not app.slots.live


async def test_200_mixed_requests_are_answered_once_and_never_by_an_engine_that_is_stopped(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    models = {name: fake(name, *journal.switches, "--token-s", "0.003") for name in NAMES}
    async with gateway(tmp_path, models, budget_mib=BUDGET_MIB) as app:
        answers = await asyncio.gather(*(chat(app, model, stream=stream) for model, stream in shuffled(seed=2)))
        assert {answer.status for answer in answers} == {200}
        assert [answer.text for answer in answers] == [f"{model} 1 2 3" for model, _ in shuffled(seed=2)]
        await at_rest(app)
        await unload_all(app)
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == REQUESTS
    for event in ("request", "done"):
        assert Counter(line["id"] for line in journal.lines(event)) == dict.fromkeys(ids, 1), event
    assert journal.count("cancelled") == 0
    # Every stop was seen, and no answer was running at any of them.
    assert journal.count("term") == journal.count("start") >= len(NAMES)
    assert {line["answering"] for line in journal.lines("term")} == {0}
    assert most_at_once(journal) <= 2


def most_at_once(journal: Journal) -> int:
    """How many engines lived at once, by what they wrote down themselves."""
    alive = most = 0
    for line in sorted(journal.lines("start", "term"), key=lambda line: line["t"]):
        alive += 1 if line["event"] == "start" else -1
        most = max(most, alive)
    return most
