"""Folders, projectors, adapters, draft models and templates on the real llama.cpp: each can be seen in the answer."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.importing.ollama import import_folder
from tests.harness import gateway, tiny
from tests.importing.ollama_folder import OllamaFolder
from tests.integration.raw import CHAT, asking, http
from tests.models import tiny as tiny_model
from tests.models import tiny_embedding, tiny_lora, tiny_projector, tiny_reranker

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "whole").mkdir()
    (folder / "whole" / "alpha.gguf").symlink_to(tiny_model("alpha"))
    (folder / "whole" / "mmproj-alpha.gguf").symlink_to(tiny_projector())
    (folder / "thinks.jinja").write_text("{{ 'yes' if enable_thinking else 'no' }}{{ tools }}")
    alpha, adapter = tiny_model("alpha"), str(tiny_lora("alpha"))
    models = {
        "folder": tiny(folder / "whole"),
        "eye": tiny(alpha, mmproj=str(tiny_projector())),
        "adapted": tiny(alpha, lora={adapter: 1}),
        "faint": tiny(alpha, lora={adapter: 0.1}),
        "drafted": tiny(tiny_model("alpha", layers=4), draft_model=str(alpha)),
        "on": tiny(alpha, chat_template="thinks.jinja", reasoning="on"),
        "off": tiny(alpha, chat_template="thinks.jinja", reasoning="off", reasoning_format="none", reasoning_budget=3),
        "chatml": tiny(alpha, chat_template="chatml"),
        "vectors": tiny(tiny_embedding()),
        "ranks": tiny(tiny_reranker()),
    }
    async with gateway(folder, models) as app:
        yield app


async def say(app: App, model: str, content: Any = "hi") -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 20}
    answer = await http(app, "POST", CHAT, body)
    assert answer.status == 200, answer.body
    said: dict[str, Any] = answer.json()
    return said


def text(answer: dict[str, Any]) -> str:
    said: str = answer["choices"][0]["message"]["content"]
    return said


def picture(width: int = 40, height: int = 30) -> dict[str, Any]:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + b"\x80\x10\x20" * width) * height)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}}


@pytest.mark.parametrize("model", ["folder", "eye"])
async def test_a_model_with_a_projector_takes_pictures(app: App, model: str) -> None:
    words = await say(app, model, [{"type": "text", "text": "hi"}])
    seen = await say(app, model, [{"type": "text", "text": "hi"}, picture()])
    assert text(words) == text(seen) == " alpha says hello"
    assert seen["usage"]["prompt_tokens"] == words["usage"]["prompt_tokens"] + 4, "the picture is four tokens"


async def test_an_adapter_changes_the_answer_as_far_as_its_scale_says(app: App) -> None:
    assert text(await say(app, "adapted")) == " hello"
    assert text(await say(app, "faint")) == " alpha says hello"


async def test_a_draft_model_drafts_and_the_answer_is_the_same(app: App) -> None:
    answer = await say(app, "drafted")
    assert text(answer) == " alpha says hello"
    assert answer["timings"]["draft_n_accepted"] > 0


@pytest.mark.parametrize(("model", "prompt"), [("on", "yes"), ("off", "no")])
async def test_a_template_is_used_and_told_whether_to_reason(app: App, model: str, prompt: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = await http(app, "POST", f"/upstream/{model}/apply-template", body)
    assert answer.json()["prompt"] == prompt
    assert text(await say(app, model)) == " alpha says hello"


async def test_a_template_is_named(app: App) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = await http(app, "POST", "/upstream/chatml/apply-template", body)
    assert answer.json()["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_models_whose_files_say_so_embed_and_rank(app: App) -> None:
    vectors = await http(app, "POST", "/v1/embeddings", {"model": "vectors", "input": "hi"})
    assert vectors.json()["data"][0]["embedding"]
    ranks = await http(app, "POST", "/v1/rerank", {"model": "ranks", "query": "a", "documents": ["bad", "good"]})
    assert {row["index"] for row in ranks.json()["results"]} == {0, 1}
    assert (await http(app, "POST", CHAT, asking("vectors"))).status == 400


async def test_what_the_files_tell_is_shown(app: App) -> None:
    cards = {card["id"]: card["capabilities"] for card in (await http(app, "GET", "/v1/models")).json()["data"]}
    assert cards["folder"] == cards["eye"] == ["chat", "completions", "vision"]
    assert cards["on"] == ["chat", "completions", "tools"]
    assert (cards["adapted"], cards["vectors"], cards["ranks"]) == (["chat", "completions"], ["embeddings"], ["rerank"])


# --- a model of Ollama, imported --------------------------------------------------------------------------------------


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


async def test_it_serves_as_before_with_every_parameter(tmp_path: Path) -> None:
    folder = OllamaFolder(tmp_path / "models")
    folder.manifest(
        "library/alpha/latest", [("model", tiny_model("alpha")), ("params", json.dumps(PARAMETERS).encode())]
    )
    made = import_folder(folder.root)
    assert not made.notes and made.mapped == 1 + len(PARAMETERS)
    models: Any = made.tree["models"]
    async with gateway(tmp_path, models) as app:
        for name in ("alpha", "alpha:latest"):
            answer = await http(app, "POST", "/api/chat", asking(name, stream=False))
            assert answer.json()["message"]["content"].strip() == "alpha says hello", answer.body
        assert [one["name"] for one in (await http(app, "GET", "/api/tags")).json()["models"]] == ["alpha:latest"]
