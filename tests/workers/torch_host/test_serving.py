"""The whole of it: a tiny model with random weights, its real batch, its real tokenizer, and the OpenAI client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch

from greenroom.workers.torch_host.api.routes import ModelServer
from greenroom.workers.torch_host.engine.engine_loop import EngineLoop
from greenroom.workers.torch_host.sandbox.pool import SandboxPool
from greenroom.workers.torch_host.sandbox.schema_trials import SCHEMAS, SchemaTrials
from greenroom.workers.torch_host.text.tokens import TextCodec
from tests.waiting import until
from tests.workers.torch_host.engine_rig import random_model, running
from tests.workers.torch_host.samples.tiny import save_tokenizer

PROMPT = "the capital of France is"
HI: Any = [{"role": "user", "content": "one two three"}]


class House:
    """A served model, the same weights as Transformers runs them, and clients."""

    def __init__(self, engine: EngineLoop, text: TextCodec, socket: Path) -> None:
        self.engine = engine
        self.text = text
        self.reference = random_model("llama")
        http = httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(socket), verify=False), timeout=90)
        self.client = openai.AsyncOpenAI(api_key="none", base_url="http://model/v1", http_client=http, max_retries=0)

    def expected(self, prompt: str, tokens: int) -> str:
        """What Transformers itself says, likeliest token by likeliest token."""
        inputs = torch.tensor([self.text.tokens_of(prompt, True)])
        with torch.no_grad():
            said = self.reference.generate(inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=2)
        new = [token for token in said[0, inputs.shape[1] :].tolist() if token not in self.text.special]
        return self.text.decode(new)


@pytest.fixture
async def house(tmp_path: Path, socket_folder: Path, templates: SandboxPool) -> AsyncIterator[House]:
    save_tokenizer(tmp_path / "tiny")
    text = TextCodec.load(tmp_path / "tiny")
    with running(random_model("llama")) as engine:
        trials = SchemaTrials(SandboxPool(SCHEMAS))
        served = ModelServer(text, engine, "tiny", templates=templates, trials=trials)
        await served.open(socket_folder / "s")
        made = House(engine, text, socket_folder / "s")
        yield made
        await made.client.close()
        await served.close()
    text.close()


async def test_the_likeliest_answer_is_the_one_transformers_gives(house: House) -> None:
    answer = await house.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == house.expected(PROMPT, 24)


async def test_an_answer_is_held_to_its_schema(house: House) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Madrid"]}, "sure": {"type": "boolean"}},
        "required": ["city", "sure"],
        "additionalProperties": False,
    }
    answer = await house.client.chat.completions.create(
        model="tiny",
        messages=HI,
        n=4,
        temperature=2,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    )
    for choice in answer.choices:
        said = json.loads(choice.message.content or "")
        assert said["city"] in ("Paris", "Madrid") and isinstance(said["sure"], bool)
        assert choice.finish_reason == "stop"


async def test_log_probabilities_are_those_of_the_model(house: House) -> None:
    answer = await house.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, temperature=0, logprobs=3)
    with torch.no_grad():
        scores = house.reference(torch.tensor([house.text.tokens_of(PROMPT, True)])).logits[0, -1]
    best = torch.topk(torch.log_softmax(scores.float(), -1), 3).values.tolist()
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs and logprobs.token_logprobs
    assert logprobs.token_logprobs[0] == pytest.approx(best[0], abs=1e-3)
    assert sorted(logprobs.top_logprobs[0].values(), reverse=True) == pytest.approx(best, abs=1e-3)


async def test_a_client_that_leaves_frees_its_place(house: House) -> None:
    stream = await house.client.completions.create(
        model="tiny", prompt=PROMPT, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    assert house.engine.in_flight == 1
    await stream.close()
    await until(lambda: house.engine.in_flight == 0)
