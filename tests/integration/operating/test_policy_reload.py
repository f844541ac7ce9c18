"""Another policy is a matter of a reload; a name that is not registered changes nothing."""

from __future__ import annotations

from pathlib import Path

from greenroom.core.policy.default import BoundedFirstCome
from greenroom.core.policy.fifo import FirstCome
from tests.harness import fake, gateway
from tests.integration.facts import pids
from tests.integration.operating.test_reload import edit, put
from tests.integration.raw import chat, http


async def test_a_policy_that_is_not_there_changes_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"model": fake("model")}) as app:
        assert (await chat(app, "model")).status == 200
        config, policy, before = app.config, app.loop.scheduler.state.policy, pids(app, "model")
        edit(tmp_path, put("new", fake("new")))
        for section, word in (({"policy": "lifo"}, "policy 'lifo'"), ({"swapper": "coin"}, "swapper 'coin'")):
            edit(tmp_path, lambda said, section=section: said.update(scheduler=section))  # type: ignore[misc]
            answer = await http(app, "POST", "/api/v1/reload")
            assert (answer.status, answer.error["code"]) == (422, "invalid_config")
            assert f"there is no {word}; there are " in answer.error["message"]
            assert app.config is config and app.loop.scheduler.state.policy is policy
            assert (await chat(app, "new")).status == 404
        assert pids(app, "model") == before


async def test_a_policy_is_changed_under_the_models_feet(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"model": fake("model")}) as app:
        assert (await chat(app, "model")).status == 200
        before = pids(app, "model")
        assert isinstance(app.loop.scheduler.state.policy, BoundedFirstCome)
        edit(tmp_path, lambda said: said.update(scheduler={"policy": "fifo"}))
        await app.reload()
        assert isinstance(app.loop.scheduler.state.policy, FirstCome)
        assert (await chat(app, "model")).status == 200
        assert pids(app, "model") == before
