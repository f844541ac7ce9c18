"""Versions of a model that lives in a worker: where the GPU holds only one of them, they change places by sleeping."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import MoveKind
from tests.harness import gateway
from tests.integration.hosted_rig import Folder, move, nothing_left
from tests.integration.raw import Answer, chat, http
from tests.models import tiny_hf
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left")
__all__ = ["nothing_left"]


def options(tmp_path: Path, budget_mib: int) -> dict[str, Any]:
    return {"memory": {"spare_worker": False}, "library": {"roots": [str(tmp_path)]}, "budget_mib": budget_mib}


def folder(tmp_path: Path, name: str, **conduct: Any) -> Folder:
    """A real model's files, which a new version is looked at for; a fake worker runs them."""
    made = Folder(tmp_path, name, **conduct)
    shutil.copytree(tiny_hf("alpha"), made.path, dirs_exist_ok=True)
    return made


async def update(app: App, folder: Folder, **more: Any) -> Answer:
    return await http(app, "POST", "/update-model?wait=true", {"model_repo_id": str(folder.path), **more})


@pytest.mark.parametrize("budget_mib", [150, 1_000])
async def test_a_version_takes_the_place_of_the_old_one(tmp_path: Path, budget_mib: int) -> None:
    old, new = folder(tmp_path, "old"), folder(tmp_path, "new")
    models = {"m": old.model(versions={"repo_id": "org/m"})}
    async with gateway(tmp_path, models, **options(tmp_path, budget_mib)) as app:
        assert (await chat(app, "m")).headers["x-model-version"] == "1"
        changing = asyncio.create_task(update(app, new))
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


async def test_a_version_that_does_not_wake_gives_the_place_back(tmp_path: Path) -> None:
    old, new = folder(tmp_path, "old"), folder(tmp_path, "new", at={"wake": "fail failed"})
    models = {"m": old.model(versions={"repo_id": "org/m"})}
    async with gateway(tmp_path, models, **options(tmp_path, 150)) as app:
        await chat(app, "m")
        changing = asyncio.create_task(update(app, new))
        answers = [await chat(app, "m") for _ in range(5)]
        assert (await changing).status >= 500
        answers.append(await chat(app, "m"))
        assert {(one.status, one.headers["x-model-version"]) for one in answers} == {(200, "1")}
        assert old.events()[:4] == ["open", "wake", "sleep", "wake"], "it was read again"
