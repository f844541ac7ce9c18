"""How far jobs are: engines that report it are asked, seldom and only if a caller looks; nonsense is no harm."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.config.schema import Model
from greenroom.engines.base import Launch, LaunchPlace, ProcessEngine, environment
from greenroom.process.spawn import Command
from tests.config.test_plugins import install
from tests.harness import fake, gateway
from tests.integration.facts import Journal
from tests.integration.jobs.test_jobs import ended, job, status_of, submit
from tests.integration.raw import Raw, http, request_bytes
from tests.waiting import until

GENERATIONS = "/v1/images/generations"


class Painter(ProcessEngine):
    """The fake engine, which tells how far its pictures are."""

    name = "painter"
    progress_path = "/progress"

    def launch(self, model_id: str, model: Model, place: LaunchPlace) -> Launch:
        switches = [str(word) for word in model.options["switches"]]  # type: ignore[union-attr]
        argv = tuple(word.replace("${PORT}", str(place.port)) for word in fake(model_id, *switches)["cmd"])
        return Launch(Command(argv, environment(model, place), model.cwd), "/health")


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path_factory.mktemp("site")
    monkeypatch.syspath_prepend(str(site))
    install(site, f"[greenroom.engines]\npainter = {__name__}:Painter\n")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


def painter(journal: Journal) -> dict[str, Any]:
    return {"engine": "painter", "memory_mib": 100, "options": {"switches": list(journal.switches)}}


def picture(seconds: float, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "a", "picture_s": seconds, **more}


def asked(journal: Journal) -> int:
    return sum(line["event"] == "request" and line["path"] == "/progress" for line in journal.lines())


async def running(app: App, body: dict[str, Any]) -> str:
    id = await submit(app, body, GENERATIONS)
    await until(lambda: is_running(app, id))
    return id


async def is_running(app: App, id: str) -> bool:
    return await status_of(app, id) == "running"


async def test_progress_is_the_engines(tmp_path: Path, journal: Journal) -> None:
    async with gateway(tmp_path, {"m": painter(journal)}) as app:
        id = await running(app, picture(3))

        async def is_halfway() -> bool:
            return ((await job(app, id))["progress"] or 0) >= 0.4

        await until(is_halfway)
        row = await job(app, id)
        assert 0.4 <= row["progress"] <= 0.99
        assert 0 <= row["eta_s"] <= 3
        assert (await ended(app, id))["progress"] == 1.0


async def test_the_engine_is_asked_once_a_second_and_only_if_progress_is_read(tmp_path: Path, journal: Journal) -> None:
    async with gateway(tmp_path, {"m": painter(journal)}) as app:
        id = await submit(app, picture(1.5), GENERATIONS)
        await until(lambda: journal.lines("done", path=GENERATIONS))
        # Its state was not asked for, and no client listens.
        assert asked(journal) == 0
        await ended(app, id)
        before, began = asked(journal), asyncio.get_running_loop().time()
        id = await running(app, picture(2))
        while (await job(app, id))["status"] == "running":
            pass
        took_s = asyncio.get_running_loop().time() - began
        assert 1 <= asked(journal) - before <= took_s + 1


NONSENSE = [
    ['{"progress": 0.5}', '{"progress": 0.1}'],
    ['{"progress": 0.5}', "<html>"],
    ['{"progress": 0.5}', '{"progress": 7}', '{"progress": -1}', '{"progress": NaN}'],
    ['{"progress": 0.5}', '{"progress": "most"}', '{"progress": null}', "[]", ""],
    ['{"progress": 0.5}', '{"progress": 1e999}'],
]


async def test_nonsense_is_no_progress_nor_a_step_back(tmp_path: Path, journal: Journal) -> None:
    async with gateway(tmp_path, {"m": painter(journal)}) as app:
        for says in NONSENSE:
            before, seen = asked(journal), list[float]()
            id = await running(app, picture(30, says=says))

            async def looked(
                id: str = id, seen: list[float] = seen, least: int = before + min(len(says) + 1, 3)
            ) -> bool:
                seen.append((await job(app, id))["progress"] or 0)
                return asked(journal) >= least

            await until(looked)
            assert set(seen) <= {0, 0.5} and seen == sorted(seen) and seen[-1] == 0.5, says
            await http(app, "DELETE", f"/v1/jobs/{id}")


async def test_estimate_serves_where_the_engine_reports_nothing(tmp_path: Path, journal: Journal) -> None:
    async with gateway(tmp_path, {"m": painter(journal)}) as app:
        await ended(app, await submit(app, picture(0.5, says=["?"]), GENERATIONS))
        id = await running(app, picture(2, says=["?"]))

        async def is_estimated() -> bool:
            return ((await job(app, id))["progress"] or 0) == 0.99

        await until(is_estimated)


async def test_listeners_are_told_how_far_a_job_is(tmp_path: Path, journal: Journal) -> None:
    async with gateway(tmp_path, {"m": painter(journal)}) as app, await Raw.open(app) as raw:
        raw.send(request_bytes("GET", "/api/v1/events", None))
        await raw.head()
        id = await submit(app, picture(2.5), GENERATIONS)
        told: list[dict[str, Any]] = []
        while not told or told[-1]["status"] not in ("done", "failed"):
            chunk = await raw.chunk()
            assert chunk is not None
            for line in chunk.decode().splitlines():
                if line.startswith("data: ") and f'"{id}"' in line:
                    told.append(json.loads(line[6:]))
        steps = [event["progress"] for event in told if event["progress"] is not None]
        assert len(steps) >= 1 and steps == sorted(set(steps))
        assert all(event["status"] == "running" for event in told if event["progress"] is not None)


async def test_engine_that_dies_meanwhile_is_no_harm(tmp_path: Path, journal: Journal) -> None:
    async with gateway(tmp_path, {"m": painter(journal)}) as app:
        id = await running(app, picture(30))
        await asyncio.gather(*(job(app, id) for _ in range(5)))
        [slot] = app.slots.live.values()
        slot.child.kill()
        assert (await ended(app, id))["status"] == "failed"
