"""Many models in one worker process: each answers as itself, and a fault of one is over for all within a wake.

A device-side error poisons a worker's whole context, so it ends; to the gateway that looks like a kill.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import gateway, gateway_process
from tests.integration.facts import at_rest, order, pid_of, view
from tests.integration.faults import assert_ended_by, dial, first_events, is_alive, rest_of
from tests.integration.raw import Raw, asking
from tests.integration.transformers.facts import held, memfds, says
from tests.models import tiny_hf
from tests.torch_python import hosted
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHARING = ("alpha", "bravo", "charlie")
ALONE = "delta"
ENDLESS = "endless"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    models = {name: hosted(tiny_hf(name)) for name in SHARING}
    models[ALONE] = hosted(tiny_hf(ALONE), isolate=True)
    models[ENDLESS] = hosted(tiny_hf(ENDLESS, loop=True, hidden=512, layers=8), ctx_size=4096, cache_tokens=8192)
    before = memfds()
    async with gateway(tmp_path_factory.mktemp("hosted"), models) as app:
        yield app
    assert memfds() == before, "memory was left behind"


async def tiers(app: App, *models: str) -> list[str]:
    return [(await view(app, model))["tier"] for model in models]


async def test_models_share_a_process_and_each_answers_as_itself(app: App) -> None:
    await asyncio.gather(*(says(app, model) for model in SHARING * 3))
    pids = {model: await pid_of(app, model) for model in SHARING}
    assert len(set(pids.values())) == 1
    assert await tiers(app, *SHARING) == ["ready"] * len(SHARING)


async def test_one_sleeps_while_its_neighbours_serve(app: App) -> None:
    for model in SHARING:
        await says(app, model)
    assert (await order(app, "sleep", "bravo")).status == 200
    assert await tiers(app, *SHARING) == ["ready", "asleep", "ready"]
    await says(app, "alpha")
    await says(app, "charlie")
    assert await tiers(app, "bravo") == ["asleep"]
    await says(app, "bravo")


async def test_one_is_unloaded_and_its_neighbours_go_on_in_the_same_process(app: App) -> None:
    for model in SHARING:
        await says(app, model)
    pid = await pid_of(app, "alpha")
    before = memfds()
    assert (await order(app, "unload", "bravo")).status == 200
    assert len(before - memfds()) == 1, "its memory was given back, and no other's"
    await says(app, "alpha")
    assert await pid_of(app, "alpha") == pid
    await says(app, "bravo")
    assert await pid_of(app, "bravo") == pid


async def test_worker_lost_with_many_models_leaves_all_asleep_and_all_answer_again(app: App) -> None:
    for model in (*SHARING, ALONE):
        await says(app, model)
    pid, apart = await pid_of(app, "alpha"), await pid_of(app, ALONE)
    async with await Raw.open(app) as raw:
        raw.ask(asking(ENDLESS, stream=True, max_tokens=4000))
        await first_events(raw, 3)
        os.kill(pid, signal.SIGKILL)
        rest = await rest_of(raw)
    if rest.whole:
        assert_ended_by(rest, "engine_lost", 502)
    assert b"[DONE]" not in rest.body

    async def all_asleep() -> bool:
        return await tiers(app, *SHARING, ENDLESS) == ["asleep"] * (len(SHARING) + 1)

    await until(all_asleep, "their weights are still the gateway's")
    assert await tiers(app, ALONE) == ["ready"], "it lives in another process"
    await asyncio.gather(*(says(app, model) for model in (*SHARING, ALONE)))
    assert len({await pid_of(app, model) for model in SHARING} - {pid}) == 1
    assert await pid_of(app, ALONE) == apart
    assert not is_alive(pid)
    await at_rest(app)


async def test_an_isolated_model_that_dies_takes_no_other_with_it(app: App) -> None:
    for model in (*SHARING, ALONE):
        await says(app, model)
    pid, apart = await pid_of(app, "alpha"), await pid_of(app, ALONE)
    os.kill(apart, signal.SIGKILL)
    await until(lambda: not is_alive(apart), "it is gone")
    await says(app, "alpha")
    assert await pid_of(app, "alpha") == pid
    await says(app, ALONE)
    assert await pid_of(app, ALONE) not in (apart, pid)


async def test_all_unloaded_hold_nothing(app: App) -> None:
    models = (*SHARING, ALONE, ENDLESS)
    for model in models:
        assert (await order(app, "prepare", model)).status == 200
    before = memfds()
    for model in models:
        assert (await order(app, "unload", model, grace_s=0)).status == 200
    assert held(app) == {}
    assert len(before - memfds()) == len(models)


async def test_gateway_killed_leaves_no_worker_and_its_successor_serves(tmp_path: Path) -> None:
    models = {"alpha": hosted(tiny_hf("alpha")), "bravo": hosted(tiny_hf("bravo"))}
    options = {"memory": {"spare_worker": False}}
    for _ in range(2):
        with gateway_process(tmp_path, models, **options) as gate:
            for model in models:
                async with await dial(gate.port) as raw:
                    raw.ask(asking(model))
                    answer = await raw.answer()
                assert answer.status == 200 and model in answer.text
            gate.kill()
            assert gate.nothing_left()
