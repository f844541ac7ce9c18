"""A real model's weights through both engines: the same greedy answer, and the same after it has slept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import gateway
from tests.integration.orders import order
from tests.integration.raw import CHAT, http
from tests.samples.smollm2 import smollm2_gguf, smollm2_hf
from tests.torch_python import hosted

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
