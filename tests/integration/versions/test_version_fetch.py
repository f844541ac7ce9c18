"""Versions that are fetched from a hub: by an update, as the first one, with trouble on the way; and deleted again."""

from __future__ import annotations

import asyncio
import fcntl
import json
import shutil
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.features.versions import updates
from tests.harness import GatewayProcess, gateway, tiny, write_config
from tests.integration.raw import asking, http
from tests.integration.versions.test_versions import CHAT, PROGRAM, ask, said, says, update, version
from tests.models import tiny as tiny_file
from tests.models import tiny_projector
from tests.standins.standin_hub import StandinHub
from tests.waiting import PATIENCE_S, until, until_now


def models(**versions: Any) -> dict[str, Any]:
    keys = tiny(Path("nothing"))
    del keys["path"]
    return {"m": {**keys, "engine": "llamacpp", "versions": {"repo_id": "org/alpha", **versions}}}


def options(tmp_path: Path) -> dict[str, Any]:
    return {"library": {"roots": [str(tmp_path / "models")]}}


async def has_first_version(app: App) -> None:
    known = app.updates
    await until(lambda: known.of("m").current is not None and not known.running("m"), "it has its first version")


@asynccontextmanager
async def versioned(folder: Path, **versions: Any) -> AsyncIterator[App]:
    """A gateway with its first version."""
    async with gateway(folder, models(**versions), **options(folder)) as app:
        await has_first_version(app)
        yield app


async def reconfigure(app: App, folder: Path, changed: dict[str, Any]) -> None:
    write_config(folder, changed, **options(folder))
    await app.reload()


def is_fetching(app: App) -> bool:
    running = app.updates.running("m")
    return running is not None and running.step == "fetching"


async def test_two_versions_are_fetched_and_the_last_but_one_deleted(hub: StandinHub, tmp_path: Path) -> None:
    async with versioned(tmp_path) as app:
        assert (await http(app, "GET", "/readyz")).status == 200
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


def _serves(status: dict[str, Any], version: int) -> bool:
    return status["model_version"] == version and not status["updating"]


def test_the_variable_alone_controls_versions(hub: StandinHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/alpha-GGUF"] = {"model.gguf": tiny_file("alpha").read_bytes()}
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("MODEL_REPO_ID", "org/alpha-GGUF")
    gate = GatewayProcess(tmp_path, None)
    try:
        # The first version serves a moment before its update has ended, and another one is refused until then.
        until_now(lambda: _serves(gate.call("GET", "/status")[2], 1), gate.log.read_text)
        told = gate.call("GET", "/status")[2]
        assert (told["model"], told["model_repo_id"]) == ("org/alpha-GGUF", "org/alpha-GGUF")
        status, headers, answer = gate.call("POST", "/generate", {"prompt": "hi", "max_tokens": 8})
        assert (status, headers["x-model-version"]) == (200, "1")
        assert answer["choices"][0]["text"].split()[0] == "alpha"
        assert (tmp_path / ".cache/huggingface/hub/models--org--alpha-GGUF").is_dir()
        done = gate.call("POST", "/update-model?wait=true", {"model_repo_id": "org/bravo"})[2]
        assert (done.get("model_version"), done.get("model_repo_id")) == (2, "org/bravo"), done
    finally:
        gate.stop()
        assert gate.nothing_left()


async def test_a_repository_that_is_not_there_changes_nothing(hub: StandinHub, tmp_path: Path) -> None:
    async with versioned(tmp_path) as app:
        answer = await http(app, "POST", "/update-model?wait=true", {"model_repo_id": "org/nothing"})
        assert (answer.status, answer.error["code"]) == (502, "fetch_failed")
        assert said(await ask(app)) == ("1", "org/alpha", "alpha")
        assert (await version(app))["error"]["code"] == "fetch_failed"


@pytest.mark.slow
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


@pytest.mark.slow
async def test_a_name_that_was_corrected_is_fetched_after_a_reload(hub: StandinHub, tmp_path: Path) -> None:
    async with gateway(tmp_path, models(repo_id="org/typo"), **options(tmp_path)) as app:

        async def has_failed() -> bool:
            now = await version(app)
            return now["error"] is not None and not now["updating"]

        await until(has_failed, "the first try has failed")
        await reconfigure(app, tmp_path, models())

        async def has_version() -> bool:
            return (await version(app))["model_repo_id"] == "org/alpha"

        await until(has_version, "it has its first version")


@pytest.mark.slow
async def test_a_name_that_is_corrected_while_the_wrong_one_is_fetched_comes_right_after_it(
    hub: StandinHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "FIRST_PAUSE_S", 10 * PATIENCE_S)
    with ExitStack() as fetching:
        fetching.enter_context(hub.lock)
        async with gateway(tmp_path, models(repo_id="org/bravo"), **options(tmp_path)) as app:
            await until(lambda: is_fetching(app), "the wrong one is being fetched")
            await reconfigure(app, tmp_path, models())
            fetching.close()
            await has_first_version(app)
            assert said(await ask(app)) == ("1", "org/alpha", "alpha")
            assert not files(tmp_path, "bravo")


async def test_an_alias_is_told_that_there_is_no_version_yet(hub: StandinHub, tmp_path: Path) -> None:
    served = models(repo_id="org/nothing")
    served["m"]["aliases"] = ["latest"]
    async with gateway(tmp_path, served, **options(tmp_path)) as app:
        answer = await http(app, "POST", CHAT, asking("latest"))
        assert (answer.status, answer.error["code"]) == (503, "no_version")


def files(folder: Path, name: str) -> list[Path]:
    return list((folder / "models").glob(f"models--org--{name}/snapshots/*/model.gguf"))


@pytest.mark.slow
async def test_a_version_that_was_asked_for_twice_is_deleted_too(hub: StandinHub, tmp_path: Path) -> None:
    async with versioned(tmp_path, keep=1) as app:
        await update(app, "org/alpha")
        await update(app, "org/bravo")
        assert not files(tmp_path, "alpha") and files(tmp_path, "bravo")


@pytest.mark.slow
async def test_files_that_another_model_needs_beside_its_weights_stay(hub: StandinHub, tmp_path: Path) -> None:
    hub.repos["org/alpha"]["mmproj.gguf"] = tiny_projector().read_bytes()
    async with versioned(tmp_path, keep=1) as app:
        (path,) = files(tmp_path, "alpha")
        projector = path.with_name("mmproj.gguf")
        other = {**tiny(tiny_file("charlie")), "mmproj": str(projector)}
        await reconfigure(app, tmp_path, {**models(keep=1), "other": other})
        await update(app, "org/bravo")
        assert projector.exists()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["two models", "no warm-up"])
async def test_what_an_update_that_fails_has_fetched_is_deleted(hub: StandinHub, tmp_path: Path, what: str) -> None:
    served = models()
    if what == "two models":
        hub.repos["org/bravo"]["other.gguf"] = tiny_file("charlie").read_bytes()
    async with gateway(tmp_path, served, **options(tmp_path)) as app:
        await has_first_version(app)
        if what == "no warm-up":
            served = models(warm_up_timeout_s=0.001)
            await reconfigure(app, tmp_path, served)
        failed = await http(app, "POST", "/update-model?wait=true", {"model_repo_id": "org/bravo"})
        assert failed.error["code"] == ("bad_model" if what == "two models" else "warm_up_failed")
        assert not files(tmp_path, "bravo") and files(tmp_path, "alpha")
        # What serves stays, also if an update to it fails; and so does what was there before.
        again = await http(app, "POST", "/update-model?wait=true", {"model_repo_id": "org/alpha", "revision": "gone"})
        assert again.status >= 400 and files(tmp_path, "alpha")
        assert said(await ask(app)) == ("1", "org/alpha", "alpha")


@pytest.mark.slow
async def test_files_that_were_there_before_an_update_that_fails_stay(hub: StandinHub, tmp_path: Path) -> None:
    own = tmp_path / "models" / "own.gguf"
    own.write_bytes(tiny_file("bravo").read_bytes())
    async with versioned(tmp_path) as app:
        fetched = await http(app, "POST", "/v1/models/download", {"model": "org/charlie"})
        assert fetched.status < 300, fetched.body
        await until(lambda: files(tmp_path, "charlie"), "an operator has fetched it")
        await reconfigure(app, tmp_path, models(warm_up_timeout_s=0.001))
        for name in (str(own), "org/charlie"):
            failed = await http(app, "POST", "/update-model?wait=true", {"model_repo_id": name})
            assert failed.error["code"] == "warm_up_failed"
        assert own.exists() and files(tmp_path, "charlie")


@pytest.mark.slow
async def test_files_that_an_operator_orders_during_an_update_are_not_its_own(hub: StandinHub, tmp_path: Path) -> None:
    async with versioned(tmp_path) as app:
        await reconfigure(app, tmp_path, models(warm_up_timeout_s=0.001))
        # Both are ordered before either has begun.
        both = [
            ("/v1/models/download", {"model": "org/bravo"}),
            ("/update-model?wait=true", {"model_repo_id": "org/bravo"}),
        ]
        ordered, failed = await asyncio.gather(*(http(app, "POST", path, body) for path, body in both))
        assert (ordered.status, failed.error["code"]) == (202, "warm_up_failed")
        await until(lambda: set(_states(app)) == {"done"}, "the operator has it")
        assert files(tmp_path, "bravo")


@pytest.mark.slow
async def test_files_that_an_operator_orders_are_no_longer_an_updates(hub: StandinHub, tmp_path: Path) -> None:
    # By its name the key could be the gateway's own.
    keys, sent = [{"name": "versions", "key": "k-1", "admin": True}], {"Authorization": "Bearer k-1"}
    async with gateway(tmp_path, models(keep=1), server={"api_keys": keys}, **options(tmp_path)) as app:
        await has_first_version(app)
        ordered = await http(app, "POST", "/v1/models/download", {"model": "org/alpha"}, headers=sent)
        assert ordered.status < 300, ordered.body
        await until(lambda: _states(app) == ["done", "done"], "the operator has it")
        for name in ("org/bravo", "org/charlie"):
            done = await http(app, "POST", "/update-model?wait=true", {"model_repo_id": name}, headers=sent)
            assert done.status == 200, done.body
        assert files(tmp_path, "alpha") and not files(tmp_path, "bravo")


@pytest.mark.slow
async def test_files_that_others_put_beside_what_an_update_fetches_stay(hub: StandinHub, tmp_path: Path) -> None:
    ours, theirs = "bravo-Q4_K_M.gguf", "bravo-Q8_0.gguf"
    hub.repos["org/bravo"] = {ours: tiny_file("bravo").read_bytes(), theirs: tiny_file("charlie").read_bytes()}
    folder = tmp_path / "models" / "models--org--bravo" / "snapshots" / hub.commit("org/bravo")
    async with versioned(tmp_path, keep=1) as app:
        with hub.lock:
            updating = asyncio.create_task(update(app, "org/bravo:Q4_K_M"))
            await until(lambda: len(_states(app)) == 2, "it is being fetched")
            folder.mkdir(parents=True)
            (folder / theirs).write_bytes(hub.repos["org/bravo"][theirs])
        await updating
        assert {path.name for path in folder.iterdir()} == {ours, theirs}
        await update(app, "org/charlie")
        assert {path.name for path in folder.iterdir()} == {theirs}


@pytest.mark.slow
async def test_files_that_were_fetched_by_hand_in_the_meantime_stay(hub: StandinHub, tmp_path: Path) -> None:
    async with versioned(tmp_path) as app:
        await update(app, "org/bravo")
    # As if it had been killed before it deleted what it no longer keeps, which was then done by hand.
    store = tmp_path / "state" / "versions.json"
    written = json.loads(store.read_text())
    now = written["models"]["m"]
    now |= {"kept": [], "leaving": [now["kept"][0]["path"]]}
    store.write_text(json.dumps(written))
    alpha = tmp_path / "models" / "models--org--alpha"
    aside = alpha.rename(tmp_path / "aside")
    shutil.copytree(aside, alpha, symlinks=True, copy_function=shutil.copyfile)
    async with gateway(tmp_path, models(), **options(tmp_path)) as app:
        await until(lambda: not app.updates.of("m").leaving, "it has looked at what it meant to delete")
        assert files(tmp_path, "alpha")


@pytest.mark.slow
async def test_a_disk_that_hangs_fails_an_update_in_time_and_the_next_one_succeeds(
    hub: StandinHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with versioned(tmp_path):
        pass
    monkeypatch.setattr(updates, "USING_MAX_S", 0.1)
    lock, answers = fcntl.flock, threading.Event()

    def hang(fd: int, how: int) -> None:
        if how & fcntl.LOCK_SH:
            assert answers.wait(PATIENCE_S)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", hang)
    try:
        async with gateway(tmp_path, models(), **options(tmp_path)) as app:
            assert said(await ask(app)) == ("1", "org/alpha", "alpha")
            failed = await http(app, "POST", "/update-model?wait=true", {"model_repo_id": "org/bravo"})
            assert (failed.status, failed.error["code"]) == (502, "fetch_failed")
            answers.set()
            monkeypatch.setattr(updates, "USING_MAX_S", PATIENCE_S)
            await update(app, "org/bravo")
            assert said(await ask(app)) == ("2", "org/bravo", "bravo")
    finally:
        answers.set()


async def test_files_that_the_configuration_of_another_gateway_names_stay(hub: StandinHub, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    async with gateway(tmp_path, models(keep=1), **options(tmp_path)) as app, gateway(other, {}) as second:
        await has_first_version(app)
        (alpha,) = files(tmp_path, "alpha")
        link = other / "current.gguf"
        link.symlink_to(alpha)
        write_config(other, {"plain": tiny(link)})
        await second.reload()
        marks = tmp_path / "models" / ".greenroom"
        await until(
            lambda: [file.name for file in marks.iterdir()] == ["fetching"], "it has no mark that lets it be deleted"
        )
        await update(app, "org/bravo")
        assert alpha.exists()
        # What no configuration names is deleted as ever.
        await update(app, "org/charlie")
        assert not files(tmp_path, "bravo")


@pytest.mark.slow
async def test_replicas_that_share_a_folder_never_delete_what_another_serves(hub: StandinHub, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    async with (
        gateway(one, models(keep=1), **options(tmp_path)) as first,
        gateway(two, models(keep=1), **options(tmp_path)) as second,
    ):
        await asyncio.gather(has_first_version(first), has_first_version(second))
        await update(first, "org/bravo")
        assert files(tmp_path, "alpha"), "the second one serves it"
        await update(second, "org/bravo")
        assert not files(tmp_path, "alpha"), "none needs it any more"
        # Both fetch it, and the second one cannot serve it.
        write_config(two, models(keep=1, warm_up_timeout_s=0.001), **options(tmp_path))
        await second.reload()
        order = {"model_repo_id": "org/charlie"}
        done, failed = await asyncio.gather(
            *(http(app, "POST", "/update-model?wait=true", order) for app in (first, second))
        )
        assert (done.status, failed.error["code"]) == (200, "warm_up_failed")
        assert files(tmp_path, "charlie") and files(tmp_path, "bravo")
        for app, said_by in ((first, "charlie"), (second, "bravo")):
            assert (await http(app, "POST", "/api/v1/models/m/unload", {})).status == 200
            assert said(await ask(app))[2] == said_by


@pytest.mark.slow
async def test_files_that_came_just_before_an_update_are_not_its_own(hub: StandinHub, tmp_path: Path) -> None:
    async with versioned(tmp_path) as app:
        await update(app, "org/bravo")
    # From here on both count as files from elsewhere, one before the start and one after it.
    (tmp_path / "state" / "versions.json").unlink()
    shutil.rmtree(tmp_path / "models" / ".greenroom")
    aside = (tmp_path / "models" / "models--org--bravo").rename(tmp_path / "aside")
    async with versioned(tmp_path, keep=1) as app:
        aside.rename(tmp_path / "models" / "models--org--bravo")
        await update(app, "org/bravo")
        await update(app, "org/charlie")
        assert files(tmp_path, "alpha") and files(tmp_path, "bravo")


@pytest.mark.slow
async def test_what_a_broken_update_fetched_is_deleted_by_the_next(hub: StandinHub, tmp_path: Path) -> None:
    async with versioned(tmp_path) as app:
        await update(app, "org/bravo")
    # As if it had been killed before the second version was promised.
    store = tmp_path / "state" / "versions.json"
    written = json.loads(store.read_text())
    now = written["models"]["m"]
    written["models"]["m"] = {"current": now["kept"][0], "prepared": now["current"]}
    store.write_text(json.dumps(written))
    async with gateway(tmp_path, models(), **options(tmp_path)) as app:
        assert (await version(app))["error"]["code"] == "restarted"
        await update(app, "org/charlie")
        assert files(tmp_path, "alpha") and files(tmp_path, "charlie") and not files(tmp_path, "bravo")


@pytest.mark.slow
async def test_what_an_update_was_fetching_when_the_gateway_ended_is_fetched_by_the_next_one_and_is_its_own(
    hub: StandinHub, tmp_path: Path
) -> None:
    async with versioned(tmp_path, keep=1):
        pass
    with hub.lock:
        async with gateway(tmp_path, models(keep=1), **options(tmp_path)) as app:
            await http(app, "POST", "/update-model", {"model_repo_id": "org/bravo"})
            await until(lambda: _states(app) == ["done", "running"], "it is being fetched")
    async with gateway(tmp_path, models(keep=1), **options(tmp_path)) as app:
        # No call waits for it any more: it does not go on by itself.
        assert _states(app) == ["done", "failed"]
        await update(app, "org/bravo")
        assert files(tmp_path, "bravo") and not files(tmp_path, "alpha")
        await update(app, "org/charlie")
        assert not files(tmp_path, "bravo")


def _states(app: App) -> list[str]:
    return [row.status.value for row in reversed(list(app.downloads.newest_first()))]


@pytest.mark.slow
def test_what_a_killed_gateway_did_not_delete_is_deleted_by_the_next(hub: StandinHub, tmp_path: Path) -> None:
    """Killed between the promise of a version and the deletion of the one that is kept no more."""
    own = tmp_path / "models" / "own.gguf"
    own.write_bytes(tiny_file("bravo").read_bytes())
    config = write_config(tmp_path, models(keep=1), **options(tmp_path))
    armed = tmp_path / "armed"
    armed.touch()
    gate = GatewayProcess(tmp_path, config, inside=(sys.executable, str(PROGRAM), "model.gguf", str(armed)))
    try:
        until_now(lambda: _rests_with(gate, 1), "it has its first version")
        with pytest.raises((OSError, HTTPException)):
            gate.call("POST", "/update-model?wait=true", {"model_repo_id": "org/bravo"})
        until_now(lambda: gate.process.poll() is not None, "it is dead")
    finally:
        gate.kill()
    assert files(tmp_path, "alpha") and files(tmp_path, "bravo")
    gate = GatewayProcess(tmp_path, config)
    try:
        until_now(lambda: not files(tmp_path, "alpha"), "what is kept no more is deleted")
        assert says(gate) == (2, "bravo")
        assert files(tmp_path, "bravo") and own.exists()
    finally:
        gate.kill()


def _rests_with(gate: GatewayProcess, number: int) -> bool:
    now = gate.call("GET", "/status")[2]
    return (now["model_version"], now["updating"]) == (number, False)
