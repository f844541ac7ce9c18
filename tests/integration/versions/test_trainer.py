"""A trainer with two real replicas: all take a version, or none does, and the report says why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from greenroom.app import App
from greenroom.features.governance.signing import signer
from greenroom.trainer import Outcome, Patience, Report, Trainer
from tests.harness import gateway, url
from tests.integration.governance.test_governance import with_key
from tests.integration.versions.test_versions import models, options, version, weights
from tests.waiting import PATIENCE_S

PATIENCE = Patience(answer_s=PATIENCE_S, away_s=PATIENCE_S, poll_s=0.05)


@asynccontextmanager
async def replicas(tmp_path: Path, **second: Any) -> AsyncIterator[tuple[list[App], Trainer]]:
    """Two gateways with state of their own, which serve models of one folder; `second` is for the second one alone."""
    async with AsyncExitStack() as stack:
        apps = []
        for name, sections in (("one", {}), ("two", second)):
            (tmp_path / name).mkdir()
            open_gateway = gateway(tmp_path / name, models(tmp_path), **{**options(tmp_path), **sections})
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
