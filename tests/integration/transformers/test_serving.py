"""What callers get from hosted models beyond plain text, through the gateway: vectors, JSON, choices, a cache."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError

from greenroom.app import App
from tests.harness import gateway
from tests.integration.facts import order
from tests.integration.raw import CHAT, chat, http
from tests.models import tiny_torch
from tests.samples.smollm2 import smollm2_gguf, smollm2_hf
from tests.torch_python import hosted

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "is_large": {"type": "boolean"}},
    "required": ["colour", "is_large"],
    "additionalProperties": False,
}
# Many blocks of any size a cache may have.
LONG = "one two three four five six seven eight nine ten " * 8


def with_modules(model: Path, folder: Path) -> Path:
    """The same model with files of sentence-transformers that ask for unit vectors and have a prompt."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "max"}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "find: "}}))
    return folder


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    made = tiny_torch("qwen2", "gemma2", "bert")
    models = {
        "qwen": hosted(made / "qwen2"),
        "gemma": hosted(made / "gemma2"),
        "bert": hosted(made / "bert"),
        "sentences": hosted(with_modules(made / "bert", tmp_path_factory.mktemp("sentences"))),
    }
    async with gateway(tmp_path_factory.mktemp("serving"), models, memory={"spare_worker": False}) as app:
        yield app


async def test_embeddings_follow_the_files_of_sentence_transformers(client: AsyncOpenAI) -> None:
    async def vector(text: str, **more: Any) -> list[float]:
        answer = await client.embeddings.create(model="sentences", input=text, extra_body=more)
        return answer.data[0].embedding

    plain, asked, spelled = await vector("dog"), await vector("dog", prompt_name="query"), await vector("find: dog")
    assert math.hypot(*plain) == pytest.approx(1, rel=1e-3)
    assert math.dist(asked, spelled) < 1e-4 < 1e-3 < math.dist(asked, plain)
    with pytest.raises(BadRequestError, match="no prompt 'title'"):
        await vector("dog", prompt_name="title")


async def test_answer_obeys_a_schema_whatever_the_weights_say(client: AsyncOpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    answer = await client.chat.completions.create(
        model="qwen", messages=[{"role": "user", "content": "hi"}], response_format=form, max_tokens=200, seed=1
    )
    said = json.loads(answer.choices[0].message.content or "")
    assert said["colour"] in ("red", "green") and isinstance(said["is_large"], bool) and len(said) == 2
    assert answer.choices[0].finish_reason == "stop"


async def test_seed_and_choices_and_logprobs(client: AsyncOpenAI) -> None:
    async def drawn(seed: int) -> list[str | None]:
        answer = await client.chat.completions.create(
            model="gemma",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=12,
            n=3,
            seed=seed,
            temperature=1,
            logprobs=True,
            top_logprobs=2,
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content and len(logprobs.content[0].top_logprobs) == 2
        return [choice.message.content for choice in answer.choices]

    said = await drawn(1)
    assert len(set(said)) == 3
    assert await drawn(1) == said
    assert await drawn(2) != said


# --- the prefix cache -----------------------------------------------------------------------------------------------


async def test_a_template_of_the_operators_takes_the_place_of_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[-1].content }}")
    model = tiny_torch("qwen2", "gemma2", "bert") / "qwen2"
    models = {"mine": hosted(model, chat_template="mine.jinja"), "gone": hosted(model, chat_template="gone.jinja")}
    async with gateway(tmp_path, models, memory={"spare_worker": False}) as app:
        asked = {"model": "mine", "max_tokens": 1}
        chatted = await chat(app, "mine", messages=[{"role": "user", "content": LONG}], max_tokens=1)
        plain = await http(app, "POST", "/v1/completions", {**asked, "prompt": LONG})
        assert chatted.status == plain.status == 200, chatted.body
        # The prompt is what was said, and nothing beside it.
        assert chatted.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"]
        refused = await chat(app, "gone")
        assert (refused.status, refused.error["code"]) == (503, "bad_model")
        assert "gone.jinja" in refused.error["message"]


# --- a real model's weights through both engines ----------------------------------------------------------------------


COUNT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."
# The engines round differently: llama.cpp multiplies by weights of four bits and rounds what it multiplies them with to
# eight, Transformers computes at 32 bits. Where a model hesitates between two words that decides, so it is asked what
# it does not hesitate about: here each token is more than e^4 times as likely as any other.
TALK = [
    {"role": "user", "content": "What is the capital of Italy? Then count to ten."},
    {"role": "assistant", "content": f"The capital of Italy is Rome. {COUNT}"},
    {"role": "user", "content": "What is the capital of Japan? Then count to ten."},
    {"role": "assistant", "content": f"The capital of Japan is Tokyo. {COUNT}"},
    {"role": "user", "content": "What is the capital of France? Then count to ten."},
]
SAID = f"The capital of France is Paris. {COUNT}"
TOKENS_LEAST = 24


# The first time, the model is fetched and converted.
@pytest.mark.timeout(900)
async def test_both_engines_give_the_same_greedy_answer_and_again_after_sleep(tmp_path: Path) -> None:
    models = {
        "gguf": {"path": str(smollm2_gguf()), "threads": 1, "ctx_size": 1024},
        "hf": hosted(smollm2_hf(), ctx_size=1024, cache_tokens=1024, memory_mib=None),
    }
    async with gateway(tmp_path, models, memory={"spare_worker": False}) as app:

        async def answer(model: str) -> tuple[str, int]:
            asked = {"model": model, "messages": TALK, "temperature": 0, "max_tokens": 64}
            answer = await http(app, "POST", CHAT, asked)
            assert answer.status == 200, answer.body
            assert answer.json()["choices"][0]["finish_reason"] == "stop"
            return answer.text, answer.json()["usage"]["completion_tokens"]

        assert (await order(app, "load", "hf")).status == 200
        said, tokens = await answer("hf")
        assert said == SAID
        assert tokens >= TOKENS_LEAST
        assert (await answer("gguf"))[0] == said
        assert (await order(app, "sleep", "hf")).json()["tier"] == "asleep"
        assert (await answer("hf")) == (said, tokens)
