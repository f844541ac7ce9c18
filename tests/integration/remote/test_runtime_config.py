"""What operators change and see while the gateway runs: the switch for fallbacks, and what providers cost today."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import gateway
from tests.integration.raw import chat, http
from tests.standins.standin_provider import KEY, long_before_midnight, provider
from tests.waiting import until

pytestmark = pytest.mark.asyncio

CONFIG, REMOTES = "/api/v1/config", "/api/v1/remotes"


async def test_the_switch_is_told_set_and_kept_and_never_blocks_a_model_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_KEY", KEY)
    await long_before_midnight()
    monkeypatch.delenv("MODEL_BOSS_ALLOW_CLOUD_FALLBACK", raising=False)
    async with provider(tmp_path) as there:
        models = {"cloud": {"remote": "acme", "use_model_name": "large"}}
        remotes = {"acme": there.remote(cost={"input": 1000, "output": 5000}, budget_per_day=50)}
        async with gateway(tmp_path, models, remotes=remotes) as app:
            assert (await http(app, "GET", CONFIG)).json() == {"allowCloudFallback": True}
            for wrong in ({"allowCloudFallback": "false"}, {"allowCloudFallback": 0}, {}, {"allow": False}, [False]):
                assert (await http(app, "PUT", CONFIG, wrong)).status == 400
            more = {"allowCloudFallback": False, "port": 1}
            assert (await http(app, "PUT", CONFIG, more)).status == 400
            answer = await http(app, "PUT", CONFIG, {"allowCloudFallback": False})
            assert (answer.status, answer.json()) == (200, {"allowCloudFallback": False})
        monkeypatch.setenv("MODEL_BOSS_ALLOW_CLOUD_FALLBACK", "true")
        async with gateway(tmp_path, models, remotes=remotes) as app:
            assert (await http(app, "GET", CONFIG)).json() == {"allowCloudFallback": False}
            for name in ("cloud", "acme:large"):
                assert (await chat(app, name, max_tokens=1)).status == 200
            await until(lambda: round(app.spending.spent("acme"), 6) == 4.0, "both are settled")
            (told,) = (await http(app, "GET", REMOTES)).json()["remotes"]
            spent = {"spent_today": 4.0, "budget_per_day": 50.0, "problem": None}
            assert told == {"name": "acme", "provider": "compatible", **spent}
