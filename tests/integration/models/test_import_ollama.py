"""A model of Ollama, imported and served by llama.cpp from the file where it lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from greenroom.importing.ollama import import_folder
from tests.harness import gateway
from tests.importing.ollama_folder import OllamaFolder
from tests.integration.raw import asking, http
from tests.models import tiny

PARAMETERS = {
    "num_ctx": 512,
    "num_thread": 1,
    "num_gpu": 0,
    "num_batch": 64,
    "num_predict": 20,
    "temperature": 0.0,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "repeat_last_n": 64,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": 7,
}


@pytest.mark.asyncio
async def test_it_serves_as_before_with_every_parameter(tmp_path: Path) -> None:
    folder = OllamaFolder(tmp_path / "models")
    folder.manifest("library/alpha/latest", [("model", tiny("alpha")), ("params", json.dumps(PARAMETERS).encode())])
    made = import_folder(folder.root)
    assert not made.notes and made.mapped == 1 + len(PARAMETERS)
    models: Any = made.tree["models"]
    async with gateway(tmp_path, models) as app:
        for name in ("alpha", "alpha:latest"):
            answer = await http(app, "POST", "/api/chat", asking(name, stream=False))
            assert answer.json()["message"]["content"].strip() == "alpha says hello", answer.body
        assert [one["name"] for one in (await http(app, "GET", "/api/tags")).json()["models"]] == ["alpha:latest"]
