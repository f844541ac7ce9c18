"""The older completions endpoint and that of embeddings, through the OpenAI client."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import pytest

from greenroom.workers.torch_host.engine.requests import GenerationRequest, PromptTooLong
from greenroom.workers.torch_host.text.tokens import TextCodec
from greenroom.workers.torch_host.weights.sentence_config import SentenceConfig
from tests.workers.torch_host.conftest import Opener, Rig
from tests.workers.torch_host.samples import tokenizer_folders


async def ask(rig: Rig, prompt: Any = "the cat", **body: Any) -> Any:
    return await rig.openai.completions.create(model="tiny", prompt=prompt, **body)


async def test_a_text_is_continued(open_api: Opener) -> None:
    async with open_api(" sat on") as rig:
        answer = await ask(rig)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" sat on", "stop")
    assert rig.engine.asks[0].tokens == rig.text.tokens_of("the cat", True)
    assert answer.usage.completion_tokens == len(rig.text.tokens_of(" sat on", False))
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_sentencepiece_continuation_keeps_its_space(open_api: Opener, sentence_text: TextCodec) -> None:
    async with open_api("cat", text=sentence_text) as rig:
        answer = await ask(rig, "the", echo=True)
    assert rig.engine.asks[0].tokens[0] == 1, "the text begins with its mark"
    assert answer.choices[0].text == "the cat"


async def test_prompts_come_as_texts_tokens_or_lists_of_either(open_api: Opener) -> None:
    async with open_api("x") as rig:
        tokens = rig.text.tokens_of("the cat", False)
        for prompt in ("the cat", tokens, ["the cat", "the dog"], [tokens, [5, 6]]):
            await ask(rig, prompt)
    asked = [one.tokens for one in rig.engine.asks]
    assert asked == [tokens, tokens, tokens, rig.text.tokens_of("the dog", False), tokens, [5, 6]]


async def test_choices_of_several_prompts_are_numbered_in_order(open_api: Opener) -> None:
    def script(ask: GenerationRequest) -> list[int]:
        return ask.tokens[:1]

    async with open_api(script) as rig:
        rig.engine.cached_tokens = 2
        answer = await ask(rig, [[70], [71, 72]], n=2)
    letters = [rig.text.decode([token]) for token in (70, 70, 71, 71)]
    assert [choice.text for choice in answer.choices] == letters
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert (answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (3, 4)


@pytest.mark.parametrize("streams", [True, False])
async def test_echo_says_the_prompt_first_and_looks_for_no_stop_in_it(open_api: Opener, streams: bool) -> None:
    async with open_api(" sat on the cat") as rig:
        answer = await ask(rig, echo=True, stop="cat", stream=streams)
        texts = [chunk.choices[0].text async for chunk in answer] if streams else [answer.choices[0].text]
    assert "".join(texts) == "the cat sat on the "


async def test_a_stream_ends_with_its_reason_its_usage_and_done(open_api: Opener) -> None:
    async with open_api(" sat on", context=512) as rig:
        body = {"prompt": "the cat", "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
        response = await rig.http.post("/v1/completions", json=body)
    lines = [line[6:] for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 2
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert all(event["object"] == "text_completion" and event["usage"] is None for event in events[:-1])


@pytest.mark.parametrize("streams", [True, False])
async def test_log_probabilities_are_four_lists(open_api: Opener, streams: bool) -> None:
    async with open_api(" sat on") as rig:
        answer = await ask(rig, logprobs=2, stream=streams)
        if streams:
            parts = [chunk.choices[0].logprobs async for chunk in answer]
            tokens = [token for part in parts if part for token in part.tokens]
            offsets = [offset for part in parts if part for offset in part.text_offset]
            tops = [top for part in parts if part for top in part.top_logprobs]
        else:
            had = answer.choices[0].logprobs
            tokens, offsets, tops = had.tokens, had.text_offset, had.top_logprobs
            assert had.token_logprobs == [-0.5] * len(tokens)
    assert "".join(tokens) == " sat on"
    assert offsets == [len("".join(tokens[:place])) for place in range(len(tokens))]
    assert [len(top) for top in tops] == [2] * len(tokens)
    assert tops[0][tokens[0]] == -0.5


async def test_tokens_that_are_no_whole_letter_are_spelled_in_bytes(open_api: Opener) -> None:
    async with open_api("\U0001f9ff") as rig:
        tokens = (await ask(rig, logprobs=0)).choices[0].logprobs.tokens
    assert all(token.startswith("bytes:\\x") for token in tokens)
    assert "".join(token.removeprefix("bytes:") for token in tokens) == "\\xf0\\x9f\\xa7\\xbf"


async def test_headers_tell_what_the_cache_and_the_model_did(open_api: Opener) -> None:
    async with open_api("x") as rig:
        rig.engine.cached_tokens = 16
        hit = await rig.http.post("/v1/completions", json={"prompt": "the cat"})
        rig.engine.cached_tokens = 0
        miss = await rig.http.post("/v1/completions", json={"prompt": "the cat"})
    assert (hit.headers["x-cache-hit"], hit.headers["x-cache-tokens-reused"]) == ("true", "16")
    assert (miss.headers["x-cache-hit"], miss.headers["x-cache-tokens-reused"]) == ("false", "0")
    assert hit.headers["x-gpu-time-ms"] == "250"


@pytest.mark.parametrize("says", ["x", ""], ids=["a token", "only its end"])
async def test_the_head_of_a_stream_tells_what_was_reused(open_api: Opener, says: str) -> None:
    async with open_api(says) as rig:
        rig.engine.cached_tokens = 16
        hit = await rig.http.post("/v1/completions", json={"prompt": "the cat", "stream": True})
        rig.engine.cached_tokens = 0
        miss = await rig.http.post("/v1/completions", json={"prompt": "the cat", "stream": True})
    assert (hit.headers["x-cache-hit"], hit.headers["x-cache-tokens-reused"]) == ("true", "16")
    assert (miss.headers["x-cache-hit"], miss.headers["x-cache-tokens-reused"]) == ("false", "0")
    assert "x-gpu-time-ms" not in hit.headers, "what is only known at the end"


@pytest.mark.parametrize("streams", [True, False])
async def test_what_was_reused_is_the_sum_over_all_prompts_each_counted_once(open_api: Opener, streams: bool) -> None:
    async with open_api("x") as rig:
        rig.engine.cached_tokens = 16
        body = {"prompt": ["the cat", "the dog"], "n": 3, "stream": streams}
        response = await rig.http.post("/v1/completions", json=body)
    assert len(rig.engine.asks) == 6
    assert response.headers["x-cache-tokens-reused"] == "32"


async def test_a_stream_does_not_wait_for_a_prompt_without_a_place_and_says_nothing_wrong(open_api: Opener) -> None:
    body = {"prompt": ["the cat", "the dog"], "stream": True, "stream_options": {"include_usage": True}}
    async with open_api("x") as rig:
        rig.engine.cached_tokens, rig.engine.places = 16, 1
        async with rig.http.stream("POST", "/v1/completions", json=body) as response:
            assert rig.engine.asks[1].cached_tokens is None, "the head came before the second prompt had its place"
            rig.engine.go.set()
            lines = (await response.aread()).decode().split()
    assert not {"x-cache-hit", "x-cache-tokens-reused"} & set(response.headers)
    assert '"cached_tokens":32' in "".join(lines).replace(" ", "")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [99_999_999]}, "prompt"),
        ({"prompt": ["a"] * 200}, "prompt"),
        ({"prompt": ["a"] * 20, "n": 10}, "n"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": 100}, "logprobs"),
        ({"prompt": "a", "echo": "yes"}, "echo"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "suffix": "z"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
    ],
)
async def test_what_is_wrong_is_400_and_named(open_api: Opener, body: dict[str, Any], param: str) -> None:
    async with open_api() as rig:
        response = await rig.http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not rig.engine.asks


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
async def test_what_is_wrong_with_inputs_is_400_and_named(open_api: Opener, body: dict[str, Any], param: str) -> None:
    async with open_api(embeds=True) as rig:
        response = await rig.http.post("/v1/embeddings", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_text_longer_than_the_context_is_refused_not_cut(open_api: Opener) -> None:
    async with open_api(embeds=True, context=16) as rig:
        response = await rig.http.post("/v1/embeddings", json={"input": "x y " * 40})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert not rig.engine.embedded
