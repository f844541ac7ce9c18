"""What is told of a model before anybody asked it: what it can do, and how its files are quantized."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from greenroom.app import App
from tests.harness import fake, gateway, tiny
from tests.integration.raw import chat, http
from tests.models import tiny as tiny_model
from tests.models import tiny_embedding, tiny_hf, tiny_projector
from tests.waiting import until

AWQ = {"quant_method": "awq", "bits": 4}


def packed(folder: Path) -> Path:
    """A folder of Transformers whose config says that its weights are quantized."""
    shutil.copytree(tiny_hf("alpha"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": AWQ}))
    return folder


async def told(app: App, path: str = "/v1/capabilities") -> Any:
    return (await http(app, "GET", path)).json()


async def test_a_gateway_says_what_models_on_disk_can_do_before_their_first_use(tmp_path: Path) -> None:
    (tmp_path / "shelf" / "eyes").mkdir(parents=True)
    shutil.copy(tiny_model("alpha"), tmp_path / "shelf" / "eyes" / "alpha.gguf")
    shutil.copy(tiny_projector(), tmp_path / "shelf" / "eyes" / "mmproj.gguf")
    shutil.copy(tiny_embedding(), tmp_path / "shelf" / "bag.gguf")
    packed(tmp_path / "shelf" / "packed")
    async with gateway(tmp_path, {}, library={"roots": [str(tmp_path / "shelf")]}) as app:
        await until(lambda: len(app.library.records) == 3, "the disk was looked at")
        answer = await told(app)
        assert answer["models"]["loaded"] == [] and len(answer["models"]["available"]) == 3
        can = answer["capabilities"]
        assert can["byModel"] == {
            "bag.gguf": ["embeddings"],
            "eyes/alpha.gguf": ["chat", "completions", "vision"],
            "packed": ["chat", "completions"],
        }
        assert (can["streaming"], can["prefixCaching"], can["visionInput"]) == (True, True, True)
        assert (can["audioInput"], can["functionCalling"]) == (False, False), "none of them hears, or calls tools"
        cards = {card["id"]: card for card in (await told(app, "/v1/models"))["data"]}
        assert {name: card["capabilities"] for name, card in cards.items()} == can["byModel"]
        kinds = {name: card["meta"]["quantization"] for name, card in cards.items()}
        assert kinds == {"bag.gguf": "F16", "eyes/alpha.gguf": "F16", "packed": "awq-4bit"}
    # The next run knows it from the last one.
    async with gateway(tmp_path, {}, library={"roots": [str(tmp_path / "shelf")]}) as app:
        await until(lambda: len(app.library.records) == 3, "the disk was looked at")
        assert app.library.work_done[1] == 0 and (await told(app))["capabilities"] == can


async def test_quantization_is_told_where_files_tell_it(tmp_path: Path) -> None:
    models = {
        "gguf": tiny(tiny_model("alpha")),
        "folder": {"engine": "transformers", "path": str(packed(tmp_path / "packed"))},
        "plain": {"engine": "transformers", "path": str(tiny_hf("alpha")), "dtype": "bfloat16"},
        "command": fake("command"),
    }
    expected = {"gguf": "F16", "folder": "awq-4bit", "plain": "bf16", "command": None}
    async with gateway(tmp_path, models) as app:
        cards = (await told(app, "/v1/models"))["data"]
        assert {card["id"]: card["meta"]["quantization"] for card in cards} == expected
        views = (await told(app, "/api/v1/models"))["models"]
        assert {view["id"]: view["quantization"] for view in views} == expected
        assert (await chat(app, "gguf", max_tokens=1)).status == 200
        (loaded,) = (await told(app))["models"]["loaded"]
        assert (loaded["id"], loaded["quantization"]) == ("gguf", "F16")
