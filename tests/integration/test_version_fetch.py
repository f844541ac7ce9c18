"""Versions that are fetched from a hub: by an update, as the first one, with trouble on the way; and deleted again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import gateway, tiny, write_config
from tests.integration.raw import http
from tests.integration.test_versions import CHAT, ask, said, update, version
from tests.models import tiny as tiny_file
from tests.standin_hub import StandinHub, standin_hub
from tests.waiting import until


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandinHub]:
    with standin_hub() as hub:
        for name in ("alpha", "bravo", "charlie"):
            hub.repos[f"org/{name}"] = {"model.gguf": tiny_file(name).read_bytes()}
        for name in [name for name in os.environ if name.startswith("HF_")] + ["TRANSFORMERS_CACHE"]:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
        (tmp_path / "models").mkdir()
        yield hub


def models(**versions: Any) -> dict[str, Any]:
    keys = tiny(Path("nothing"))
    del keys["path"]
    return {"m": {**keys, "engine": "llamacpp", "versions": {"repo_id": "org/alpha", **versions}}}


def options(tmp_path: Path) -> dict[str, Any]:
    return {"library": {"roots": [str(tmp_path / "models")]}}


async def test_the_first_version_and_the_next_are_fetched_and_the_last_but_one_deleted(
    hub: StandinHub, tmp_path: Path
) -> None:
    async with gateway(tmp_path, models(), **options(tmp_path)) as app:

        async def is_ready() -> bool:
            return (await http(app, "GET", "/readyz")).status == 200

        await until(is_ready, "it has its first version")
        assert said(await ask(app)) == ("1", "org/alpha", "alpha")
        hub.faults.refuse = 1
        done = await update(app, "org/bravo")
        assert (done["model_version"], done["commit"]) == (2, hub.commit("org/bravo"))
        assert said(await ask(app)) == ("2", "org/bravo", "bravo")
        files = lambda name: list((tmp_path / "models").glob(f"models--org--{name}/snapshots/*/model.gguf"))  # noqa: E731
        assert files("alpha") and files("bravo")
        await update(app, "org/charlie")
        assert said(await ask(app)) == ("3", "org/charlie", "charlie")
        await until(lambda: not files("alpha"), "the first version is deleted")
        assert files("bravo") and files("charlie")


async def test_a_repository_that_is_not_there_changes_nothing(hub: StandinHub, tmp_path: Path) -> None:
    async with gateway(tmp_path, models(), **options(tmp_path)) as app:

        async def has_version() -> bool:
            return (await version(app))["model_version"] == 1

        await until(has_version, "it has its first version")
        answer = await http(app, "POST", "/update-model?wait=true", {"model_repo_id": "org/nothing"})
        assert (answer.status, answer.error["code"]) == (502, "fetch_failed")
        assert said(await ask(app)) == ("1", "org/alpha", "alpha")
        assert (await version(app))["error"]["code"] == "fetch_failed"


async def test_requests_are_told_that_there_is_no_version_yet(hub: StandinHub, tmp_path: Path) -> None:
    del hub.repos["org/alpha"]
    async with gateway(tmp_path, models(), **options(tmp_path)) as app:
        answer = await ask(app)
        assert (answer.status, answer.error["code"]) == (503, "no_version")
        assert (await http(app, "GET", "/readyz")).status == 503
        assert (await version(app))["model_version"] is None

        # An update is as good as what was configured.
        async def is_free() -> bool:
            return not (await version(app))["updating"]

        await until(is_free, "the first try has ended")
        await update(app, "org/bravo")
        assert said(await ask(app)) == ("1", "org/bravo", "bravo")


async def test_a_name_that_was_corrected_is_fetched_after_a_reload(hub: StandinHub, tmp_path: Path) -> None:
    async with gateway(tmp_path, models(repo_id="org/typo"), **options(tmp_path)) as app:

        async def has_failed() -> bool:
            now = await version(app)
            return now["error"] is not None and not now["updating"]

        await until(has_failed, "the first try has failed")
        write_config(tmp_path, models(), **options(tmp_path))
        await app.reload()

        async def has_version() -> bool:
            return (await version(app))["model_repo_id"] == "org/alpha"

        await until(has_version, "it has its first version")


async def test_an_alias_is_told_that_there_is_no_version_yet(hub: StandinHub, tmp_path: Path) -> None:
    served = models(repo_id="org/nothing")
    served["m"]["aliases"] = ["latest"]
    async with gateway(tmp_path, served, **options(tmp_path)) as app:
        answer = await http(app, "POST", CHAT, {"model": "latest", "messages": []})
        assert (answer.status, answer.error["code"]) == (503, "no_version")


def files(folder: Path, name: str) -> list[Path]:
    return list((folder / "models").glob(f"models--org--{name}/snapshots/*/model.gguf"))


async def test_a_version_that_was_asked_for_twice_is_deleted_too(hub: StandinHub, tmp_path: Path) -> None:
    async with gateway(tmp_path, models(keep=1), **options(tmp_path)) as app:
        await until(lambda: app.updates.of("m").current is not None, "it has its first version")
        await update(app, "org/alpha")
        await update(app, "org/bravo")
        assert not files(tmp_path, "alpha") and files(tmp_path, "bravo")


async def test_files_that_another_model_needs_by_another_path_stay(hub: StandinHub, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "models")
    async with gateway(tmp_path, models(keep=1), **options(tmp_path)) as app:
        await until(lambda: app.updates.of("m").current is not None, "it has its first version")
        (path,) = files(tmp_path, "alpha")
        other = tiny(tmp_path / "link" / path.relative_to(tmp_path / "models"))
        write_config(tmp_path, {**models(keep=1), "other": other}, **options(tmp_path))
        await app.reload()
        await update(app, "org/bravo")
        assert files(tmp_path, "alpha")
