from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import pytest

from greenroom.workers.torch_host.engine.requests import PromptTooLong
from greenroom.workers.torch_host.text.tokens import TextCodec
from greenroom.workers.torch_host.weights.sentence_config import SentenceConfig
from tests.workers.torch_host.conftest import Opener
from tests.workers.torch_host.samples import tokenizer_folders


async def test_each_input_has_its_vector_as_numbers_or_base64(open_api: Opener) -> None:
    async with open_api(embeds=True) as rig:
        rig.engine.vectors = [[0.5, -0.25], [1.0, 0.0]]
        numbers = await rig.openai.embeddings.create(model="tiny", input=["the cat", "hi"], encoding_format="float")
        # The client asks for base64 unless told otherwise, and decodes it.
        decoded = await rig.openai.embeddings.create(model="tiny", input=["the cat", "hi"])
        raw = await rig.http.post("/v1/embeddings", json={"input": ["a", "b"], "encoding_format": "base64"})
    assert [one.embedding for one in numbers.data] == [[0.5, -0.25], [1.0, 0.0]]
    assert [one.embedding for one in decoded.data] == [[0.5, -0.25], [1.0, 0.0]]
    assert [one.index for one in numbers.data] == [0, 1]
    assert base64.b64decode(raw.json()["data"][0]["embedding"]) == struct.pack("<2f", 0.5, -0.25)
    tokens = sum(len(rig.text.tokens_of(text, True)) for text in ("the cat", "hi"))
    assert numbers.usage.prompt_tokens == numbers.usage.total_tokens == tokens


async def test_inputs_come_as_texts_tokens_or_lists_of_either(open_api: Opener) -> None:
    async with open_api(embeds=True) as rig:
        for given in ("hi", [5, 6], ["hi", "hi"], [[5], [6]]):
            assert (await rig.http.post("/v1/embeddings", json={"input": given})).status_code == 200
    hi = rig.text.tokens_of("hi", True)
    assert rig.engine.embedded == [[hi], [[5, 6]], [hi, hi], [[5], [6]]]


async def test_shorter_vectors_only_where_the_model_was_trained_for_them(open_api: Opener, tmp_path: Any) -> None:
    folder = tokenizer_folders.byte_level(tmp_path / "matryoshka")
    (folder / "config.json").write_text(json.dumps({"matryoshka_dimensions": [2, 3]}))
    async with open_api(embeds=True) as rig:
        refused = await rig.http.post("/v1/embeddings", json={"input": "a", "dimensions": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")
    unit = SentenceConfig(steps=("normalize",))
    async with open_api(embeds=True, text=TextCodec.load(folder), sentence=unit) as rig:
        rig.engine.vectors = [[3.0, 4.0, 5.0, 6.0]]
        short = await rig.http.post("/v1/embeddings", json={"input": "a", "dimensions": 2})
        other = await rig.http.post("/v1/embeddings", json={"input": "a", "dimensions": 4})
    vector = short.json()["data"][0]["embedding"]
    assert vector == pytest.approx([0.6, 0.8]) and math.hypot(*vector) == pytest.approx(1)
    assert other.status_code == 400 and "2, 3" in other.json()["error"]["message"]


async def test_a_model_that_fails_is_told(open_api: Opener) -> None:
    async with open_api(embeds=True) as rig:
        rig.engine.vectors = RuntimeError("no luck")
        failed = await rig.http.post("/v1/embeddings", json={"input": "a"})
        rig.engine.vectors = PromptTooLong("too long for it")
        long = await rig.http.post("/v1/embeddings", json={"input": "a"})
    message = failed.json()["error"]["message"]
    assert failed.status_code == 500 and "inside the worker" in message and "no luck" not in message
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "encoding_format": 5}, "encoding_format"),
        ({"input": "a", "dimensions": "two"}, "dimensions"),
    ],
)
async def test_what_is_wrong_is_400_and_named(open_api: Opener, body: dict[str, Any], param: str) -> None:
    async with open_api(embeds=True) as rig:
        response = await rig.http.post("/v1/embeddings", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_text_longer_than_the_context_is_refused_not_cut(open_api: Opener) -> None:
    async with open_api(embeds=True, context=16) as rig:
        response = await rig.http.post("/v1/embeddings", json={"input": "x y " * 40})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert not rig.engine.embedded
