"""Two tenants with one prompt on llama.cpp and a stand-in of vLLM: neither counters nor time tell of the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.app import App
from greenroom.core.model import MoveKind
from tests.harness import gateway, served, tiny
from tests.integration.facts import Journal
from tests.integration.tenants.timed_tenants import (
    KEYS,
    ask,
    assert_nothing_is_left,
    assert_time_tells_nothing,
    prompt_of,
)
from tests.models import tiny as tiny_gguf


@pytest.mark.slow
async def test_time_to_the_first_token_tells_nothing_on_llama_cpp(tmp_path: Path) -> None:
    models = {"alpha": tiny(tiny_gguf("timed", hidden=256, layers=4), ctx_size=8_192)}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        await assert_time_tells_nothing(app, words=400)


async def test_nothing_is_left_on_llama_cpp_after_an_unload(tmp_path: Path) -> None:
    models = {"alpha": tiny(tiny_gguf("alpha"), ctx_size=4_096)}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        await assert_nothing_is_left(app, prompt_of(7, 50), MoveKind.UNLOAD)


@pytest.mark.parametrize("leave", [MoveKind.SLEEP, MoveKind.UNLOAD])
async def test_nothing_is_left_on_vllm(tmp_path: Path, leave: MoveKind) -> None:
    journal = Journal(tmp_path)

    async def is_cached(app: App, who: str, prompt: str) -> int:
        await ask(app, who, prompt)
        return int(journal.lines("asked")[-1]["is_cached"])

    models = {"alpha": served("vllm", tmp_path / "vllm", *journal.switches)}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        await assert_nothing_is_left(app, prompt_of(7, 50), leave, is_cached)
