"""A trainer with real replicas, by calls and by the file: all take a version or none does, and they catch up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.features.governance.signing import signer
from greenroom.features.versions import state_watcher as state_watcher
from greenroom.features.versions.desired import DesiredState, read_state, write_state
from greenroom.features.versions.state_watcher import FileWatch
from greenroom.trainer import Outcome, Patience, Report, Trainer
from tests.harness import gateway, url, write_config
from tests.integration.governance.test_governance import with_key
from tests.integration.raw import http
from tests.integration.versions.test_version_fetch import is_fetching
from tests.integration.versions.test_versions import models, options, update, version, weights
from tests.standins.standin_hub import StandinHub
from tests.waiting import PATIENCE_S, until

PATIENCE = Patience(answer_s=PATIENCE_S, away_s=PATIENCE_S, poll_s=0.05)


@asynccontextmanager
async def replicas(tmp_path: Path) -> AsyncIterator[tuple[list[App], Trainer]]:
    """Two gateways with state of their own, which serve models of one folder."""
    async with AsyncExitStack() as stack:
        apps = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            open_gateway = gateway(tmp_path / name, models(tmp_path), **options(tmp_path))
            apps.append(await stack.enter_async_context(open_gateway))
        yield apps, Trainer([url(app) for app in apps], patience=PATIENCE)


def told(report: Report) -> list[tuple[Outcome, int | None, str | None]]:
    return [(result.outcome, result.model_version, result.model_repo_id) for result in report.results]


async def test_two_replicas_take_a_version_or_none_does(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (apps, trainer):
        bravo = Path(weights(tmp_path, "bravo")).name
        report = await asyncio.to_thread(trainer.update, bravo)
        assert report.ok and told(report) == [(Outcome.SERVES, 2, bravo)] * 2, report
        answers = await asyncio.to_thread(trainer.prompt, "hi")
        assert [(one.text or "").split()[0] for one in answers] == ["bravo"] * 2
        assert {one.model_version for one in answers} == {2}
        # One of them is updated behind the trainer's back, and then cannot have the next version.
        charlie = Path(weights(tmp_path, "charlie")).name
        alone = Trainer([url(apps[0])], patience=PATIENCE)
        assert (await asyncio.to_thread(alone.update, charlie)).ok
        assert not (await asyncio.to_thread(trainer.verify)).ok
        assert (await asyncio.to_thread(trainer.reconcile, charlie)).ok
        assert (await asyncio.to_thread(trainer.verify)).ok
        assert [(await version(app))["model_version"] for app in apps] == [3, 3]


async def test_updates_and_rollbacks_are_signed_where_replicas_want_tokens(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        apps = []
        for name, roots in (("one", "models"), ("two", "two")):
            (tmp_path / name).mkdir()
            governed = {**options(tmp_path), "library": {"roots": [str(tmp_path / roots)]}}
            governed["governance"] = with_key(tmp_path / name)
            apps.append(await stack.enter_async_context(gateway(tmp_path / name, models(tmp_path), **governed)))
        addresses, sign = [url(app) for app in apps], signer(str(apps[0].config.governance.key_path), "trainer")
        unsigned = Trainer(addresses, patience=PATIENCE)
        delta = weights(tmp_path, "delta")
        report = await asyncio.to_thread(unsigned.update, delta)
        assert [result.code for result in report.results] == ["token_missing"] * 2, report
        # The second one cannot load it, so that the first one goes back: two signed calls.
        for model in (None, "m"):
            signed = Trainer(addresses, patience=PATIENCE, sign=sign, model=model)
            report = await asyncio.to_thread(signed.update, delta)
            outcomes = [result.outcome for result in report.results]
            assert outcomes == [Outcome.ROLLED_BACK, Outcome.FAILED], report
            assert report.results[1].code == "not_found"


def following(tmp_path: Path, **library: Any) -> dict[str, Any]:
    return {**options(tmp_path), **library, "versions": {"state_file": str(tmp_path / "sync_state.json")}}


async def serves(app: App, number: int) -> None:
    async def does() -> bool:
        return bool((await version(app))["model_version"] == number)

    await until(does, f"version {number} serves")


async def is_ready(app: App) -> bool:
    probe = await http(app, "GET", "/readyz")
    assert probe.status == 200 or probe.json()["status"] in ("no_version", "catching_up")
    return probe.status == 200


class Looks:
    """Counts how often followers begin to read the file, which they do all the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.numbers: list[int] = []
        monkeypatch.setattr(state_watcher, "LOOK_EVERY_S", 0.05)
        monkeypatch.setattr(state_watcher, "read_state", self._read)

    def _read(self, path: str) -> DesiredState | None:
        self.begun += 1
        state = read_state(path)
        self.numbers += [] if state is None else [state.number]
        return state

    async def over(self) -> None:
        """What the file says now was read, and what follows from it is done: a look begins when the last has ended."""
        before = self.begun
        await until(lambda: self.begun >= before + 2, "two looks")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


async def test_replicas_take_newer_states_and_ignore_all_else(tmp_path: Path, looks: Looks) -> None:
    path = tmp_path / "sync_state.json"
    async with gateway(tmp_path, models(tmp_path), **following(tmp_path)) as app:
        weights(tmp_path, "bravo"), weights(tmp_path, "charlie")
        write_state(str(path), DesiredState(5, "bravo.gguf"))
        await serves(app, 5)
        whole = path.read_bytes()
        # Half a state, an equal one and an older one, each with other weights.
        for content in (
            whole[:-9],
            whole.replace(b"bravo", b"alpha"),
            json.dumps({**json.loads(whole), "model_version": 4, "model_repo_id": "alpha.gguf"}).encode(),
        ):
            path.write_bytes(content)
            await looks.over()
            now = await version(app)
            assert (now["model_version"], now["updating"]) == (5, False)
        # Its own number may be beyond that of the state, which is taken all the same.
        await update(app, "alpha.gguf", model_version=9)
        write_state(str(path), DesiredState(6, "charlie.gguf"))
        await serves(app, 10)
        assert (await version(app))["model_repo_id"] == "charlie.gguf"


async def test_a_replica_that_was_away_catches_up_and_takes_nothing_twice(tmp_path: Path, looks: Looks) -> None:
    weights(tmp_path, "bravo")
    write_state(str(tmp_path / "sync_state.json"), DesiredState(11, "bravo.gguf"))
    async with gateway(tmp_path, models(tmp_path), **following(tmp_path)) as app:
        # No requests are sent to a new pod that does not serve what the others do.
        await until(lambda: is_ready(app), "it is ready")
        assert (await version(app))["model_version"] == 11
    async with gateway(tmp_path, models(tmp_path), **following(tmp_path)) as app:
        await looks.over()
        now = await version(app)
        assert (now["model_version"], now["updating"], now["error"]) == (11, False, None)


@pytest.mark.slow
async def test_a_state_that_cannot_be_taken_is_tried_again(tmp_path: Path) -> None:
    async with gateway(tmp_path, models(tmp_path), **following(tmp_path)) as app:
        write_state(str(tmp_path / "sync_state.json"), DesiredState(2, str(tmp_path / "models" / "bravo.gguf")))

        async def is_told() -> bool:
            now = await version(app)
            return now["error"] is not None and now["desired"]["model_version"] == 2

        await until(is_told, "the error is told")
        await until(lambda: is_ready(app), "it is ready with what it has")
        weights(tmp_path, "bravo")
        await serves(app, 2)

        async def is_well() -> bool:
            return (await version(app))["error"] is None

        await until(is_well, "the error is over")


async def test_a_reload_names_the_file_and_one_for_another_model_is_ignored(tmp_path: Path) -> None:
    served = models(tmp_path)
    weights(tmp_path, "bravo")
    write_state(str(tmp_path / "sync_state.json"), DesiredState(2, "bravo.gguf", model="other"))
    async with gateway(tmp_path, served, **options(tmp_path)) as app:
        write_config(tmp_path, served, **following(tmp_path))
        await app.reload()
        write_state(str(tmp_path / "sync_state.json"), DesiredState(3, "bravo.gguf", model="m"))
        await serves(app, 3)


async def test_a_trainer_writes_the_file_and_all_go_back_where_one_fails(tmp_path: Path) -> None:
    state_file, two = str(tmp_path / "sync_state.json"), tmp_path / "two"
    two.mkdir()
    only_there = {"library": {"roots": [str(two)]}}
    async with (
        gateway(tmp_path, models(tmp_path), **following(tmp_path)) as first,
        gateway(two, models(tmp_path), **following(tmp_path, **only_there)) as second,
    ):
        trainer = Trainer([url(first), url(second)], state_file=state_file, patience=PATIENCE)
        delta = weights(tmp_path, "delta")
        report = await asyncio.to_thread(trainer.update, delta)
        assert not report.ok, report
        assert told(report) == [(Outcome.ROLLED_BACK, 3, "org/first"), (Outcome.FAILED, 1, "org/first")], report
        assert (report.results[1].code, str(delta) in str(report.results[1].message)) == ("not_found", True)
        assert (await asyncio.to_thread(trainer.verify)).ok
        # The one that failed is told by the file that it serves what it shall.
        await until(lambda: second.updates.of("m").state == 3, "the second one has settled")
        assert (await version(second))["model_version"] == 1


async def test_a_file_is_told_of_at_once_and_others_beside_it_are_not(tmp_path: Path) -> None:
    told = asyncio.Event()
    watch, path = FileWatch(told.set), tmp_path / "later" / "state.json"
    watch.watch(str(path))
    path.parent.mkdir()
    watch.watch(str(path))
    (path.parent / "other").write_text("x")
    await asyncio.sleep(0.2)
    assert not told.is_set()
    write_state(str(path), DesiredState(1, "org/a"))
    await until(told.is_set, "it is told")
    watch.close()


async def test_without_notices_of_the_kernel_the_file_is_polled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a volume that other machines write, or where too many watches are in use."""
    monkeypatch.setattr(FileWatch, "watch", lambda self, path: None)
    monkeypatch.setattr(state_watcher, "LOOK_EVERY_S", 0.1)
    async with gateway(tmp_path, models(tmp_path), **following(tmp_path)) as app:
        await until(lambda: is_ready(app), "it has looked once")
        weights(tmp_path, "bravo")
        write_state(str(tmp_path / "sync_state.json"), DesiredState(5, "bravo.gguf"))
        await serves(app, 5)


async def test_a_state_that_goes_back_is_taken_after_an_update_that_runs(tmp_path: Path) -> None:
    """What serves now is what it wants; when the update has ended it is not."""
    async with gateway(tmp_path, models(tmp_path), **following(tmp_path)) as app:
        weights(tmp_path, "bravo"), weights(tmp_path, "charlie")
        await update(app, "bravo.gguf")
        order = http(app, "POST", "/update-model?wait=true", {"model_repo_id": "charlie.gguf"})
        ordered = asyncio.create_task(order)
        await until(lambda: app.updates.running("m") is not None, "it is being updated", every_s=0)
        write_state(str(tmp_path / "sync_state.json"), DesiredState(9, "bravo.gguf", rollback=True))
        assert (await ordered).status == 200
        await serves(app, 9)
        assert (await version(app))["model_repo_id"] == "bravo.gguf"


async def numbers(app: App) -> list[int]:
    kept = (await http(app, "GET", "/api/v1/models/m/versions")).json()["data"]
    return [one["model_version"] for one in kept]


@pytest.mark.slow
async def test_after_an_update_the_newest_state_is_taken_at_once_and_those_between_are_not(
    hub: StandinHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also on a volume that tells nothing of what others write."""
    monkeypatch.setattr(FileWatch, "watch", lambda self, path: None)
    monkeypatch.setattr(state_watcher, "LOOK_EVERY_S", 10 * PATIENCE_S)
    path = str(tmp_path / "sync_state.json")
    weights(tmp_path, "charlie"), weights(tmp_path, "delta")
    write_state(path, DesiredState(5, "org/bravo"))
    with ExitStack() as fetching:
        fetching.enter_context(hub.lock)
        async with gateway(tmp_path, models(tmp_path), **following(tmp_path)) as app:
            await until(lambda: is_fetching(app), "it is being updated")
            write_state(path, DesiredState(6, "charlie.gguf"))
            write_state(path, DesiredState(7, "delta.gguf"))
            fetching.close()
            await serves(app, 7)
            assert await numbers(app) == [7, 5]


@pytest.mark.slow
async def test_a_state_that_waits_for_another_update_gives_way_to_a_newer_one(
    hub: StandinHub,
    tmp_path: Path,
    looks: Looks,
) -> None:
    path = str(tmp_path / "sync_state.json")
    with ExitStack() as fetching:
        async with gateway(tmp_path, models(tmp_path), **following(tmp_path)) as app:
            weights(tmp_path, "charlie"), weights(tmp_path, "delta")
            fetching.enter_context(hub.lock)
            order = http(app, "POST", "/update-model?wait=true", {"model_repo_id": "org/bravo"})
            ordered = asyncio.create_task(order)
            await until(lambda: is_fetching(app), "it is being updated")
            write_state(path, DesiredState(5, "charlie.gguf"))
            await until(lambda: 5 in looks.numbers, "the state was read")
            write_state(path, DesiredState(6, "delta.gguf"))
            fetching.close()
            assert (await ordered).status == 200
            await serves(app, 6)
            assert await numbers(app) == [6, 2]


@pytest.mark.slow
async def test_a_replica_that_was_changed_by_its_api_is_brought_back_by_the_file(tmp_path: Path) -> None:
    state_file, two = str(tmp_path / "sync_state.json"), tmp_path / "two"
    two.mkdir()
    async with (
        gateway(tmp_path, models(tmp_path), **following(tmp_path)) as first,
        gateway(two, models(tmp_path), **following(tmp_path)) as second,
    ):
        weights(tmp_path, "bravo"), weights(tmp_path, "charlie")
        trainer = Trainer([url(first), url(second)], state_file=state_file, patience=PATIENCE)
        assert (await asyncio.to_thread(trainer.update, "bravo.gguf")).ok
        await update(first, "charlie.gguf")
        report = await asyncio.to_thread(trainer.reconcile, "bravo.gguf")
        assert report.ok, report
