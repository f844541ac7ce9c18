"""The ladder as a table: position, warm, full, failing, pinned, guard and remote, each against a running gateway.

`expected` says again what docs/routing.md promises. The provider speaks TLS and counts its calls: one where a row says
that the remote model answers, none in every other row.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from greenroom.app import App
from tests.harness import fake, gateway
from tests.integration.facts import Journal, at_rest, counters, is_ready
from tests.integration.raw import Raw, asking, chat, http
from tests.standins.standin_provider import KEY, Provider, provider
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

# Breaking engines are ready and answer 500, refusing ones 503; failing ones do not start.
STATES = ("ready", "cold", "full", "failing", "breaking", "refusing")
WAITS, ERROR, CLOUD = "waits", "error", "cloud"


class Row(NamedTuple):
    first: str
    second: str
    is_pinned: bool
    cloud_at: int
    """The position of the remote model among the candidates."""

    @property
    def task(self) -> str:
        return f"{self.first}-{self.second}-{'pinned' if self.is_pinned else 'free'}-{self.cloud_at}"

    @property
    def candidates(self) -> list[str]:
        names = [f"first-{self.first}", f"second-{self.second}"]
        names.insert(self.cloud_at, CLOUD)
        return names


ROWS = [Row(*row) for row in product(STATES, STATES, (False, True), (1, 2))]
ROWS += [Row(first, second, False, 0) for first, second in product(STATES, STATES)]


def expected(row: Row, may_fall: bool) -> set[str]:
    """What may come of it: a model that answers, a wait, or an error."""
    if row.cloud_at == 0:
        return {CLOUD}
    left = {f"first-{row.first}": row.first, f"second-{row.second}": row.second}
    left = {name: state for name, state in left.items() if state != "failing"}
    while left:
        (name, state), *later = left.items()
        for other, how in later if not row.is_pinned else ():
            if state in ("cold", "full") and how in ("ready", "breaking", "refusing"):
                name, state = other, how
            elif (state, how) == ("cold", "full"):
                # What has been learned about loads and answers decides.
                return {name, WAITS}
        if state not in ("breaking", "refusing"):
            return {WAITS} if state == "full" else {name}
        may_fall = may_fall and state != "refusing"
        del left[name]
    return {CLOUD} if may_fall else {ERROR}


def models(journal: Journal) -> dict[str, Any]:
    found: dict[str, Any] = {CLOUD: {"engine": "remote", "remote": "acme", "use_model_name": "acme-large"}}
    switches = {
        "failing": ("--exit-before-bind",),
        "breaking": ("--sse-weird", "error-500"),
        "refusing": ("--sse-weird", "error-503"),
    }
    for place, state in product(("first", "second"), STATES):
        keys = {"concurrency": 1} if state == "full" else {}
        name = f"{place}-{state}"
        found[name] = fake(name, *journal.switches, *switches.get(state, ()), **keys)
    return found


@asynccontextmanager
async def running(folder: Path, there: Provider) -> AsyncIterator[App]:
    """A gateway whose models are in the states that they are named after."""
    journal = Journal(folder)
    tasks = {
        row.task: {"candidates": row.candidates, "pin_primary": row.is_pinned, "prefer_first_s": 0} for row in ROWS
    }
    options: dict[str, Any] = {"tasks": tasks, "remotes": {"acme": there.remote()}}
    # One that has failed stays so.
    options["scheduler"] = {"backoff_s": 3_600, "backoff_max_s": 3_600}
    options["server"] = {"answer_idle_max_s": 36_000}
    async with gateway(folder, models(journal), **options) as app, AsyncExitStack() as stack:
        await until(lambda: is_ready(app, CLOUD), "the remote model is ready")
        for place in ("first", "second"):
            for state in ("ready", "breaking", "refusing"):
                assert (await chat(app, f"{place}-{state}")).status == 200
            assert (await chat(app, f"{place}-failing")).status == 503
            await stack.enter_async_context(_held(app, f"{place}-full"))
        yield app


@asynccontextmanager
async def _held(app: App, model: str) -> AsyncIterator[None]:
    """A request that the model is busy with until this is left, however long that takes."""
    before = counters(app)["in flight"]
    async with await Raw.open(app) as raw:
        raw.ask(asking(model, token_s=36_000))
        await until(lambda: is_ready(app, model) and counters(app)["in flight"] > before, f"{model} is full")
        yield


async def outcome(app: App, row: Row) -> str:
    """Ask for the task of this row, and see what comes of it. Models are left as they were."""
    for name in row.candidates:
        if name.endswith("-refusing"):
            # Streams alone are refused. One that answers nothing else for a minute counts as failed.
            assert (await chat(app, name)).status == 200
    answering = asyncio.create_task(chat(app, row.task, stream=True))
    names = [name for name in row.candidates if name.endswith("-cold")]
    await until(lambda: answering.done() or _only_waits(app, names), f"{row} is answered, or waits for a full model")
    if not answering.done():
        answering.cancel()
        await asyncio.wait((answering,))
        await until(lambda: not counters(app)["waiting"], "it has left")
        return WAITS
    answer = answering.result()
    for name in names:
        if is_ready(app, name):
            assert (await http(app, "POST", f"/api/models/unload/{name}")).status == 200
            await until(lambda name=name: not is_ready(app, name), f"{name} is cold")
    return answer.headers["x-model"] if answer.status == 200 else ERROR


def _only_waits(app: App, cold: list[str]) -> bool:
    """True if its request waits for a model that is ready, and so full."""
    (waiter, *_) = [*app.loop.scheduler.state.waitlist, None]
    return waiter is not None and waiter.model not in cold and is_ready(app, waiter.model)


async def test_every_row_of_the_ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_KEY", KEY)
    wrong = []
    async with provider(tmp_path) as there, running(tmp_path, there) as app:
        for may_fall in (True, False):
            assert (await http(app, "PUT", "/api/v1/config", {"allowCloudFallback": may_fall})).status == 200
            for row in ROWS:
                allowed = expected(row, may_fall)
                if any(name.endswith("-cold") for name in allowed) and not (may_fall and row.cloud_at == 1):
                    # Loads take long: one is enough for each pair of states.
                    continue
                calls = len(there.calls)
                came = await outcome(app, row)
                called = len(there.calls) - calls
                if came not in allowed or called != (allowed == {CLOUD}):
                    wrong.append((row.task, may_fall, allowed, came, called))
        assert not wrong
    await at_rest(app)
