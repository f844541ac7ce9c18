"""The configurations of docs/vllm.md serve: each model of theirs, with stand-ins for the programs they name."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_guides import blocks
from tests.harness import FAKE_SERVER, gateway, served
from tests.integration.orders import view
from tests.integration.raw import chat

GPUS = [{"memory_mib": 81_920, "margin_mib": 512}] * 2


def configured() -> dict[str, dict[str, Any]]:
    return {
        name: model
        for block in blocks("docs/vllm.md", "yaml")
        for name, model in yaml.safe_load(block)["models"].items()
    }


async def test_models_of_the_guide_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = configured()
    assert {model.get("engine") for model in models.values()} == {"vllm", "sglang", None}
    launcher = tmp_path / "text-generation-launcher"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {FAKE_SERVER} tgi "$@"\n')
    launcher.chmod(0o700)
    for name, model in models.items():
        if "engine" in model:
            made = served(model["engine"], tmp_path / name)
            model |= {key: made[key] for key in ("path", "env", "program")}
            del model["python"]
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    async with gateway(tmp_path, models, gpus=GPUS) as app:
        for name in models:
            answer = await chat(app, name)
            assert answer.status == 200 and answer.text.startswith("tgi" if name == "zephyr" else name), answer.body
        assert (await view(app, "coder"))["capabilities"] == ["chat", "completions"]
        assert (await view(app, "zephyr"))["memory"] in ({"gpu0": 32_000}, {"gpu1": 32_000})
