"""A thousand bodies of each dialect that are almost right: each is answered, and none breaks the gateway."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import fake, gateway, tiny
from tests.integration.facts import at_rest
from tests.integration.raw import Raw, request_bytes
from tests.models import tiny as tiny_model

COUNT = 1_000
REAL_COUNT = 150
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}

SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/messages": [
        {"max_tokens": 8, "messages": [{"role": "user", "content": "hi"}], "stream": True, "stop_sequences": ["x"]},
        {
            "max_tokens": 8,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"town": "Ulm"}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]},
            ],
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "disabled"},
            "temperature": 0.5,
            "output_config": {"effort": "low"},
        },
        {
            "max_tokens": 8,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
                        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
                    ],
                }
            ],
        },
    ],
    "/api/chat": [
        {"messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 8, "stop": ["x"], "seed": 1}},
        {
            "stream": False,
            "think": False,
            "format": "json",
            "keep_alive": "5m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "weather?"},
                {
                    "role": "assistant",
                    "content": "",
                    "thinking": "hm",
                    "tool_calls": [{"function": {"name": "weather", "arguments": {"town": "Ulm"}}}],
                },
                {"role": "tool", "tool_name": "weather", "content": "rain"},
            ],
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
            "options": {"num_predict": 8, "temperature": 0.5},
        },
    ],
    "/v1/responses": [
        {"input": "hi", "instructions": "Be brief.", "max_output_tokens": 8, "stream": True, "store": False},
        {
            "max_output_tokens": 8,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            ],
            "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "text"}},
            "temperature": 0.5,
        },
    ],
    "/api/generate": [
        {"prompt": "hi", "system": "s", "options": {"num_predict": 8}, "stream": False},
        {"prompt": "hi", "images": [PNG], "keep_alive": 5, "format": SCHEMA, "options": {"num_predict": 8}},
    ],
    "/v1/messages/count_tokens": [{"messages": [{"role": "user", "content": "hi"}], "system": "s", "stream": False}],
}


@pytest.mark.slow
@pytest.mark.parametrize("path", SEEDS)
async def test_no_body_breaks_the_gateway(tmp_path: Path, path: str) -> None:
    async with gateway(tmp_path, {"a": fake("a")}) as app, await Raw.open(app) as raw:
        seeds = [{"model": "a", **seed} for seed in SEEDS[path]]
        statuses = []
        for body in mutations(seeds, COUNT):
            raw.send(request_bytes("POST", path, body))
            answer = await raw.answer()
            assert answer.status < 500, (body, answer)
            statuses.append(answer.status)
        # Enough of them get as far as the engine.
        assert statuses.count(200) > COUNT / 20 and statuses.count(400) > COUNT / 20
        await at_rest(app)


# Paths whose bodies are small: each dialect's share the thousand.
SHARED: dict[str, dict[str, list[dict[str, Any]]]] = {
    "llama.cpp and vLLM": {
        "/completion": [{"prompt": "hi", "n_predict": 8, "stream": True, "stop": ["x"], "cache_prompt": False}],
        "/infill": [{"input_prefix": "def f():", "input_suffix": "return 1", "n_predict": 8}],
        "/tokenize": [{"content": "hi", "add_special": True, "with_pieces": False}, {"prompt": "hi"}],
        "/detokenize": [{"tokens": [1, 2, 3]}],
        "/apply-template": [{"messages": [{"role": "user", "content": "hi"}]}],
        "/pooling": [{"input": ["hi", "ho"], "encoding_format": "float"}],
        "/score": [{"text_1": "hi", "text_2": ["ho", "hm"]}],
    },
    "Ollama's embeddings": {
        "/api/embed": [{"input": ["hi", "ho"], "truncate": True, "keep_alive": "5m", "options": {"num_ctx": 64}}],
        "/api/embeddings": [{"prompt": "hi", "options": {"num_ctx": 64}, "keep_alive": 5}],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("dialect", SHARED)
async def test_no_small_body_breaks_the_gateway(tmp_path: Path, dialect: str) -> None:
    async with gateway(tmp_path, {"a": fake("a")}) as app, await Raw.open(app) as raw:
        for path, bodies in SHARED[dialect].items():
            count, statuses = -(-COUNT // len(SHARED[dialect])), []
            for body in mutations([{"model": "a", **seed} for seed in bodies], count):
                raw.send(request_bytes("POST", path, body))
                answer = await raw.answer()
                assert answer.status < 500, (path, body, answer)
                statuses.append(answer.status)
            # Some are refused, and some get as far as the engine, which may not have the path.
            assert statuses.count(400) > count / 20, path
            assert any(status not in (400, 413) for status in statuses), path
        await at_rest(app)


@pytest.mark.slow
@pytest.mark.parametrize("path", SEEDS)
async def test_what_passes_is_understood_by_a_real_engine(tmp_path: Path, path: str) -> None:
    """An engine may refuse what it cannot do, in its own words, but never because the translation is broken."""
    models = {"a": tiny(tiny_model("alpha"))}
    async with gateway(tmp_path, models) as app, await Raw.open(app) as raw:
        seeds = [{"model": "a", **seed} for seed in SEEDS[path]]
        for body in mutations(seeds, REAL_COUNT, seed=1):
            raw.send(request_bytes("POST", path, body))
            answer = await raw.answer()
            assert answer.status < 500, (body, answer)


# --- bodies that are almost right -------------------------------------------------------------------------------------


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 1.5, 1e308, "", "x", "\x00", "\ud83d\ude00", "5m"),
    *(
        [],
        [[]],
        [None],
        {},
        {"type": "text"},
        {"type": "nothing"},
        {"": {}},
        [{"type": "text", "text": 7}],
        "a" * 5_000,
    ),
)


def mutations(seeds: list[dict[str, Any]], count: int, seed: int = 0) -> Iterator[bytes]:
    """`count` bodies, the same ones for the same seed. The model stays named more often than not."""
    source = random.Random(seed)
    for _ in range(count):
        body = copy.deepcopy(source.choice(seeds))
        for _ in range(source.randint(1, 3)):
            _change(source, body)
        if source.random() < 0.8:
            body["model"] = seeds[0]["model"]
        data = json.dumps(body).encode()
        if source.random() < 0.1:
            at = source.randrange(len(data))
            data = data[:at] + bytes([source.randrange(256)]) + data[at + 1 :] if source.random() < 0.5 else data[:at]
        yield data


def _change(source: random.Random, body: Any) -> None:
    places = list(_places(body))
    if not places:
        return
    holder, key = source.choice(places)
    way = source.random()
    if way < 0.6:
        holder[key] = copy.deepcopy(source.choice(ODD))
    elif way < 0.8:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[f"{key}x"] = copy.deepcopy(holder[key])


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield value, key
            yield from _places(inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield value, index
            yield from _places(inner)
