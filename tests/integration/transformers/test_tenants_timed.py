"""Two tenants with the same prompt on a hosted model: neither counters nor time tell of the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.core.model import MoveKind
from tests.harness import gateway
from tests.integration.raw import http
from tests.integration.tenants.timed_tenants import (
    KEYS,
    ask,
    assert_nothing_is_left,
    assert_time_tells_nothing,
    prompt_of,
)
from tests.models import tiny_hf
from tests.torch_python import hosted
from tests.waiting import until


async def test_time_to_the_first_token_tells_nothing_and_the_worker_tells_its_cache(tmp_path: Path) -> None:
    models = {"alpha": hosted(tiny_hf("timed", hidden=256, layers=4), ctx_size=4_096, cache_tokens=16_384)}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        await assert_time_tells_nothing(app, words=400)
        await ask(app, "lab", "once more")
        live = next(iter(app.slots.live.values()))
        await until(lambda: live.figures is not None, "its worker was asked")
        assert live.figures is not None and live.figures.kv_bytes is not None
        resources = (await http(app, "GET", "/v1/capabilities", headers={"Authorization": "Bearer ops-key"})).json()
        shown = resources["resources"]["kvCacheSizeMB"]
        assert shown == -(-live.figures.kv_bytes // 2**20) and shown > 0


@pytest.mark.parametrize("leave", [MoveKind.SLEEP, MoveKind.UNLOAD])
async def test_nothing_is_left(tmp_path: Path, leave: MoveKind) -> None:
    async with gateway(tmp_path, {"alpha": hosted(tiny_hf("alpha"))}, server={"api_keys": KEYS}) as app:
        await assert_nothing_is_left(app, prompt_of(7, 50), leave)
