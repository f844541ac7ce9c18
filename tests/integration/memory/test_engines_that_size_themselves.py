"""Engines that take whatever GPU memory is free: two of them never load on one GPU at the same time."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import FAKE_ENGINE, fake, gateway
from tests.integration.facts import Journal, is_loading
from tests.integration.raw import chat
from tests.waiting import until

NAMES = ("alpha", "bravo")
LOADS_S = ("--load-s", "0.5")


def vllm(folder: Path) -> Path:
    """A program called `vllm`: the fake engine behind `vllm serve`."""
    path = folder / "vllm"
    path.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -I -S {FAKE_ENGINE} "$@"\n')
    path.chmod(0o700)
    return path


def said(folder: Path, journal: Journal) -> dict[str, Any]:
    """Models of an unknown program, with the key."""
    return {name: fake(name, *LOADS_S, *journal.switches, sizes_itself=True) for name in NAMES}


def recognised(folder: Path, journal: Journal) -> dict[str, Any]:
    """Models of `vllm serve`, without the key."""
    models = {name: fake(name, *LOADS_S, *journal.switches) for name in NAMES}
    program = str(vllm(folder))
    return {
        name: {**model, "cmd": [program, "serve", *model["cmd"][model["cmd"].index("--port") :]]}
        for name, model in models.items()
    }


@pytest.mark.parametrize("models_of", [said, recognised])
async def test_two_that_start_at_once_on_one_gpu_load_one_after_the_other(tmp_path: Path, models_of: Any) -> None:
    journal = Journal(tmp_path)
    async with gateway(tmp_path, models_of(tmp_path, journal)) as app:
        answers = await asyncio.gather(*(chat(app, name) for name in NAMES))
    assert [answer.status for answer in answers] == [200, 200]
    lines = [(line["event"], line["name"]) for line in journal.lines("start", "ready")]
    assert [event for event, _ in lines] == ["start", "ready", "start", "ready"]
    assert {name for _, name in lines} == set(NAMES)


async def test_each_has_a_gpu_of_its_own_so_both_load_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    models = said(tmp_path, journal)
    for number, model in enumerate(models.values()):
        model["devices"] = [f"gpu{number}"]
    await both_load_at_once(tmp_path, models, gpus=[{"memory_mib": 1_000}] * 2)


async def test_operator_says_that_vllm_does_not_size_itself(tmp_path: Path) -> None:
    models = recognised(tmp_path, Journal(tmp_path))
    await both_load_at_once(tmp_path, {name: {**model, "sizes_itself": False} for name, model in models.items()})


async def both_load_at_once(folder: Path, models: dict[str, Any], **sections: Any) -> None:
    async with gateway(folder, models, **sections) as app:
        asked = [asyncio.create_task(chat(app, name)) for name in NAMES]
        await until(lambda: all(is_loading(app, name) for name in NAMES), "both load")
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200, 200]
