"""Versions while something else changes: the configuration, the links that name them, what others ask for."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from greenroom.app import App
from greenroom.core.model import MoveKind
from greenroom.library.download_locks import FOLDER, DownloadLocks, close_all
from greenroom.library.roots import Roots
from tests.harness import GatewayProcess, gateway, tiny, write_config
from tests.integration.hosted_rig import Folder, move, nothing_left
from tests.integration.raw import Answer, chat, http
from tests.integration.versions import test_versions
from tests.integration.versions.test_version_fetch import files, has_first_version, is_fetching, models, options
from tests.integration.versions.test_versions import update
from tests.models import tiny_hf
from tests.standins.standin_hub import StandinHub
from tests.waiting import PATIENCE_S, until, until_now

__all__ = ["nothing_left"]


@pytest.mark.slow
async def test_a_reload_while_weights_are_fetched_leaves_them_to_their_update(hub: StandinHub, tmp_path: Path) -> None:
    hub.repos["org/charlie"]["second.gguf"] = hub.repos["org/bravo"]["model.gguf"]
    async with gateway(tmp_path, models(keep=1), **options(tmp_path)) as app:
        await has_first_version(app)
        # Another gateway fetches, so the first version is deleted later.
        fetching = DownloadLocks(lambda: Roots([str(tmp_path / "models")])).begin_fetch()
        try:
            await update(app, "org/bravo")
        finally:
            close_all(fetching)
        assert app.updates.of("m").leaving
        with hub.lock:
            order = {"model_repo_id": "org/charlie"}
            updating = asyncio.create_task(http(app, "POST", "/update-model?wait=true", order))
            await until(lambda: is_fetching(app), "it is being fetched")
            await app.reload()
            await asyncio.sleep(0.5)
        assert (await updating).error["code"] == "bad_model"
        assert not files(tmp_path, "charlie") and not files(tmp_path, "alpha") and files(tmp_path, "bravo")


async def test_of_two_updates_at_once_the_second_is_told_the_task_of_the_first(tmp_path: Path) -> None:
    served = test_versions.models(tmp_path)
    async with gateway(tmp_path, served, **options(tmp_path)) as app:
        order = {"model_repo_id": test_versions.weights(tmp_path, "bravo")}
        answers = await asyncio.gather(*(http(app, "POST", "/update-model", order) for _ in range(4)))
        (task,) = [answer.json()["taskId"] for answer in answers if answer.status == 202]
        assert [answer.error["taskId"] for answer in answers if answer.status == 409] == [task] * 3
        # What it wants is told at any time, also while its end is written.
        told, is_over = [], False
        while not is_over:
            is_over = app.updates.running("m") is None
            told.append((await http(app, "GET", f"/update-model/{task}")).json())
        assert {one["model_repo_id"] for one in told} == {order["model_repo_id"]}


async def test_weights_that_another_gateway_serves_are_deleted_only_by_force(hub: StandinHub, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    roots = options(tmp_path)
    async with gateway(tmp_path, models(), **roots) as app, gateway(other, {}, **roots) as second:
        await has_first_version(app)
        await second.library.refresh()
        (record,) = second.library.records
        name = f"/v1/models/inventory/{quote(record.id, safe='')}"
        refused = await http(second, "DELETE", name)
        assert (refused.status, refused.error["code"]) == (409, "model_in_use")
        assert "another gateway" in refused.error["message"] and files(tmp_path, "alpha")
        assert (await http(second, "DELETE", f"{name}?force=true")).status == 200
        assert not files(tmp_path, "alpha")


async def test_the_end_of_a_gateway_waits_for_uses_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink, asked, answers = os.unlink, threading.Event(), threading.Event()

    def hang(path: Any, **options: Any) -> None:
        if f"/{FOLDER}/" in str(path):
            asked.set()
            assert answers.wait(PATIENCE_S)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", hang)
    try:
        async with gateway(tmp_path, test_versions.models(tmp_path), **options(tmp_path)) as app:
            await until(asked.is_set, "the start looks for marks of what is configured")
            await app.reload()
            await app.reload()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "use weights"]
    finally:
        answers.set()


@pytest.mark.parametrize("is_folder", [False, True])
async def test_a_version_is_what_its_link_led_to_when_it_was_asked_for(tmp_path: Path, is_folder: bool) -> None:
    steps = {name: Path(test_versions.weights(tmp_path, name)) for name in ("alpha", "bravo", "charlie")}
    link = tmp_path / "models" / ("latest" if is_folder else "latest.gguf")

    def lead_to(name: str) -> None:
        link.unlink(missing_ok=True)
        if is_folder:
            folder = tmp_path / "models" / f"step-{name}"
            folder.mkdir()
            steps[name].rename(folder / "model.gguf")
            link.symlink_to(folder)
        else:
            link.symlink_to(steps[name])

    named = link / "model.gguf" if is_folder else link
    lead_to("alpha")
    served = {"m": tiny(named, versions={"keep": 3})}
    async with gateway(tmp_path, served, **options(tmp_path)) as app:
        for name in ("bravo", "charlie"):
            lead_to(name)
            await test_versions.update(app, str(named))
            assert test_versions.said(await test_versions.ask(app))[2] == name
        for number, name in ((2, "bravo"), (1, "alpha")):
            back = await http(app, "POST", "/api/v1/models/m/rollback?wait=true", {"version": number})
            assert back.status == 200, back.body
            assert test_versions.said(await test_versions.ask(app))[2] == name


# --- in workers: where the GPU holds one version, they change places by sleeping --------------------------------------


def roots_and_room(tmp_path: Path, budget_mib: int) -> dict[str, Any]:
    return {"memory": {"spare_worker": False}, "library": {"roots": [str(tmp_path)]}, "budget_mib": budget_mib}


def folder(tmp_path: Path, name: str, **conduct: Any) -> Folder:
    """A real model's files, which a new version is looked at for; a fake worker runs them."""
    made = Folder(tmp_path, name, **conduct)
    shutil.copytree(tiny_hf("alpha"), made.path, dirs_exist_ok=True)
    return made


async def update_hosted(app: App, folder: Folder, **more: Any) -> Answer:
    return await http(app, "POST", "/update-model?wait=true", {"model_repo_id": str(folder.path), **more})


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("budget_mib", [150, 1_000])
async def test_a_version_takes_the_place_of_the_old_one(tmp_path: Path, budget_mib: int) -> None:
    old, new = folder(tmp_path, "old"), folder(tmp_path, "new")
    served = {"m": old.model(versions={"repo_id": "org/m"})}
    async with gateway(tmp_path, served, **roots_and_room(tmp_path, budget_mib)) as app:
        assert (await chat(app, "m")).headers["x-model-version"] == "1"
        changing = asyncio.create_task(update_hosted(app, new))
        answers = [await chat(app, "m") for _ in range(5)]
        done = await changing
        assert (done.status, done.json().get("model_version")) == (200, 2), done.body
        answer = await chat(app, "m")
        assert answer.headers["x-model-version"] == "2" and answer.text.startswith("m")
        assert all(one.status == 200 for one in answers)
        await until(lambda: old.events()[-1] == "close", "the old version has left")
        # Where both fit, the old one never slept.
        assert old.events() == ["open", "wake", *(["sleep"] if budget_mib == 150 else []), "close"]
        assert new.events() == ["open", "wake"]
        await move(app, MoveKind.SLEEP, "m")
        assert (await chat(app, "m")).status == 200 and new.events()[-2:] == ["sleep", "wake"]


@pytest.mark.usefixtures("nothing_left")
async def test_a_version_that_does_not_wake_gives_the_place_back(tmp_path: Path) -> None:
    old, new = folder(tmp_path, "old"), folder(tmp_path, "new", at={"wake": "fail failed"})
    served = {"m": old.model(versions={"repo_id": "org/m"})}
    async with gateway(tmp_path, served, **roots_and_room(tmp_path, 150)) as app:
        await chat(app, "m")
        changing = asyncio.create_task(update_hosted(app, new))
        answers = [await chat(app, "m") for _ in range(5)]
        assert (await changing).status >= 500
        answers.append(await chat(app, "m"))
        assert {(one.status, one.headers["x-model-version"]) for one in answers} == {(200, "1")}
        assert old.events()[:4] == ["open", "wake", "sleep", "wake"], "it was read again"


# --- killed at any step, it comes back with the old version or the new one, and no half -------------------------------


# An update writes less often than this.
POINTS_MAX = 60


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_killed_at_every_write_of_an_update(tmp_path: Path) -> None:
    config = write_config(tmp_path, test_versions.models(tmp_path), **test_versions.options(tmp_path))
    trigger, last, names = tmp_path / "armed", 1, {1: "alpha"}
    died_with, survived = set[int](), False
    for point in range(1, POINTS_MAX):
        trigger.unlink(missing_ok=True)
        gate = GatewayProcess(
            tmp_path, config, inside=(sys.executable, str(test_versions.PROGRAM), str(point), str(trigger))
        )
        try:
            # What the death before has left.
            number, said = test_versions.says(gate)
            assert number in (last, last + 1), "a version that was not asked for, or one that was promised is gone"
            assert names[number] == said, "weights of another version"
            _, _, told = gate.call("GET", "/status")
            assert (told["model_version"], told["updating"]) == (number, False)
            died_with.add(number - last)
            last = number
            if survived:
                break
            names = {last: said, last + 1: "bravo" if said == "alpha" else "alpha"}
            trigger.touch()
            try:
                body = {"model_repo_id": test_versions.weights(tmp_path, names[last + 1])}
                survived = gate.call("POST", "/update-model?wait=true", body)[0] == 200
            except (OSError, HTTPException):
                until_now(lambda gate=gate: gate.process.poll() is not None, "it is dead")
        finally:
            gate.kill()
            assert gate.nothing_left()
    assert survived, "an update never came to its end"
    assert died_with == {0, 1}, "no death was before the promise, or none after it"
