"""Versions while something else changes: the configuration, the links that name them, what others ask for."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from greenroom.library.download_locks import FOLDER, DownloadLocks, close_all
from greenroom.library.roots import Roots
from tests.harness import gateway, tiny
from tests.integration.raw import http
from tests.integration.versions import test_versions
from tests.integration.versions.test_version_fetch import files, has_first_version, hub, is_fetching, models, options
from tests.integration.versions.test_versions import update
from tests.standins.standin_hub import StandinHub
from tests.waiting import PATIENCE_S, until

__all__ = ["hub"]


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
