"""Any engine may carry out sleep and wake: here one with a process for each model, which is told by HTTP calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.config.schema import Model
from greenroom.core.model import DeviceId, ModelId, MoveKind
from greenroom.engines.base import CallEngine, EngineFacts, Launch, LaunchPlace, ProcessEngine, environment
from greenroom.engines.estimates.estimate import Estimate, EstimatePart
from greenroom.errors import LoadFailed
from greenroom.process.spawn import Command
from tests.config.test_plugins import install
from tests.harness import fake, gateway
from tests.integration.facts import Journal, at_rest
from tests.integration.raw import chat, http
from tests.standins import fake_gpu
from tests.waiting import until


class Sleeper(ProcessEngine):
    """The fake engine, with the calls of vLLM."""

    name = "sleeper"

    def facts(self, model: Model) -> EngineFacts:
        return EngineFacts(can_sleep=True)

    def estimate_asleep(self, model: Model, gpus: int) -> Estimate:
        return Estimate((EstimatePart("weights", 0, 50), EstimatePart("context", 10, 0)), "test")

    def launch(self, model_id: str, model: Model, place: LaunchPlace) -> Launch:
        switches = [str(word) for word in model.options["switches"]]  # type: ignore[union-attr]
        argv = tuple(word.replace("${PORT}", str(place.port)) for word in fake(model_id, *switches)["cmd"])
        return Launch(Command(argv, environment(model, place), model.cwd), "/health")

    async def sleep(self, model: Model, call: CallEngine) -> None:
        await self._tell(call, "/sleep?level=1")

    async def wake(self, model: Model, call: CallEngine) -> None:
        await self._tell(call, "/wake_up")

    async def _tell(self, call: CallEngine, target: str) -> None:
        status, body = await call("POST", target)
        if status != 200:
            raise LoadFailed(f"it answered {status}: {body.decode()}")


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path_factory.mktemp("site")
    monkeypatch.syspath_prepend(str(site))
    install(site, f"[greenroom.engines]\nsleeper = {__name__}:Sleeper\n")


@contextlib.asynccontextmanager
async def serving(folder: Path, *switches: str, **keys: Any) -> AsyncIterator[tuple[App, Journal]]:
    """Two models and room for one."""
    journal = Journal(folder)
    model = {"engine": "sleeper", "memory_mib": 100, "stop_timeout_s": 2, **keys}
    words = [*journal.switches, *switches]
    models = {name: {**model, "options": {"switches": words}} for name in ("alpha", "bravo")}
    async with gateway(folder, models, budget_mib=150, scheduler={"backoff_s": 0.01}) as app:
        yield app, journal


async def view(app: App, model: str) -> dict[str, Any]:
    found: dict[str, Any] = (await http(app, "GET", f"/api/v1/models/{model}")).json()
    return found


async def test_models_change_places_without_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as (app, journal):
        for name in ("alpha", "bravo", "alpha", "bravo"):
            assert (await chat(app, name)).text.startswith(name)
        assert journal.count("start") == 2, "each was started once"
        assert (journal.count("sleep"), journal.count("wake")) == (3, 2)
        asleep, ready = await view(app, "alpha"), await view(app, "bravo")
        assert (asleep["tier"], ready["tier"]) == ("asleep", "ready")
        assert asleep["memory"]["gpu0"] == 10 and asleep["memory"]["host"] > 0
        assert asleep["pid"] is not None and asleep["pid"] != ready["pid"]
        await at_rest(app)


async def test_one_that_ends_in_its_sleep_is_cold(tmp_path: Path) -> None:
    async with serving(tmp_path) as (app, journal):
        await chat(app, "alpha")
        await app.operations.move(MoveKind.SLEEP, ModelId("alpha"))
        (live,) = app.slots.live.values()
        await live.child.stop(2)
        await until(lambda: not app.slots.live, "its end was seen")
        assert (await view(app, "alpha"))["tier"] == "cold"
        assert (await chat(app, "alpha")).text.startswith("alpha")
        assert journal.count("start") == 2


async def test_a_shutdown_ends_sleepers(tmp_path: Path) -> None:
    async with serving(tmp_path) as (app, _):
        await chat(app, "alpha")
        await asyncio.gather(chat(app, "bravo"), chat(app, "alpha"))


async def test_memory_of_a_gpu_is_back_before_another_takes_it(tmp_path: Path) -> None:
    """The fake GPU refuses what does not fit, and an engine that is refused crashes."""
    file = fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu("GPU-a", 10_000))
    journal = Journal(tmp_path)
    words = [*journal.switches, "--gpu-file", str(file), "--gpu-mib", "6000"]
    model = {"engine": "sleeper", "memory_mib": 6_000, "stop_timeout_s": 2, "options": {"switches": words}}
    memory = {"probe": "file", "file": str(file), "look_every_s": 0.1}
    async with gateway(tmp_path, {"alpha": model, "bravo": model}, gpus=[], memory=memory) as app:
        for name in ("alpha", "bravo") * 4:
            assert (await chat(app, name)).text.startswith(name)
        assert (journal.count("start"), journal.count("sleep"), journal.count("wake")) == (2, 7, 6)
        assert app.loop.scheduler.state.ledger.foreign.get(DeviceId("GPU-a"), 0) == 0
        assert not any([(await view(app, name))["failures"] for name in ("alpha", "bravo")])
