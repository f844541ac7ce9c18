"""The embedded llama.cpp: a real engine, asked over a Unix socket and TCP, and told to go."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import xllamacpp

from greenroom.workers import llamacpp_server
from tests.models import tiny, tiny_embedding, tiny_reranker

from .llamacpp_worker import run_to_end, worker

CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, object] = {"prompt": "hi"}
USAGE: dict[str, object] = {"stream_options": {"include_usage": True}}

# A parent that ignores SIGTERM hands that on to its children.
DEAF_TO_TERM = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])",
)


@pytest.mark.parametrize("unix", [True, False], ids=["unix", "tcp"])
def test_it_answers_the_scripted_text(unix: bool) -> None:
    with worker(tiny("alpha"), "--alias", "alpha", unix=unix) as engine:
        assert engine.ask("/health") == (200, {"status": "ok"})
        status, answer = engine.ask("/v1/chat/completions", CHAT)
        assert (status, answer["model"]) == (200, "alpha")
        assert answer["choices"][0]["message"]["content"] == " alpha says hello"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == answer["timings"]["predicted_n"] == 4


def test_a_looping_model_follows_its_script_at_temperature_one_until_it_is_stopped() -> None:
    with worker(tiny("bravo", loop=True)) as engine:
        _, answer = engine.ask("/v1/chat/completions", CHAT | {"max_tokens": 23, "temperature": 1})
        words = answer["choices"][0]["message"]["content"].split()
        assert words[:3] == ["bravo", "one", "two"]
        assert words[20:] == ["twenty", "one", "two"]
        assert answer["choices"][0]["finish_reason"] == "length"


def test_streams_end_with_timings_and_with_usage_where_the_gateway_looks_for_them() -> None:
    with worker(tiny("alpha")) as engine:
        # A chat stream sends usage only if asked, but timings always, in the last chunk.
        *_, last, done = engine.stream("/v1/chat/completions", CHAT)
        assert done == "[DONE]"
        chunk = json.loads(last)
        assert chunk["choices"][0]["finish_reason"] == "stop"
        assert "usage" not in chunk
        assert chunk["timings"]["predicted_n"] == 4
        # Asked for usage, it adds one event without choices, and the timings move there.
        *_, finish, last, done = engine.stream("/v1/chat/completions", CHAT | USAGE)
        assert "timings" not in json.loads(finish)
        assert json.loads(last)["choices"] == []
        assert json.loads(last)["usage"]["completion_tokens"] == json.loads(last)["timings"]["predicted_n"] == 4
        # A completion stream tells both, asked or not, in the chunk that finishes.
        for body in (COMPLETION, COMPLETION | USAGE):
            *_, last, done = engine.stream("/v1/completions", body)
            assert done == "[DONE]"
            assert json.loads(last)["choices"][0]["finish_reason"] == "stop"
            assert json.loads(last)["usage"]["completion_tokens"] == json.loads(last)["timings"]["predicted_n"] == 4


def test_each_of_several_slots_may_use_the_whole_context() -> None:
    with worker(tiny("alpha")) as engine:
        prompt = "a" * 900
        assert engine.ask("/v1/completions", {"prompt": prompt})[0] == 200


def test_embeddings_are_near_where_words_are_shared() -> None:
    with worker(tiny_embedding(), "--embedding") as engine:
        status, answer = engine.ask("/v1/embeddings", {"input": ["red apple", "the apple is red", "blue ship"]})
        assert status == 200
        apple, same, ship = (entry["embedding"] for entry in answer["data"])
        assert dot(apple, apple) == pytest.approx(1, abs=1e-3)
        assert dot(apple, same) > dot(apple, ship) + 0.1


def test_a_chat_model_can_give_embeddings_too() -> None:
    with worker(tiny("alpha"), "--embedding", "--pooling", "mean") as engine:
        status, answer = engine.ask("/v1/embeddings", {"input": "hi"})
        assert (status, len(answer["data"][0]["embedding"])) == (200, 128)


def test_reranking_puts_the_document_that_says_good_first() -> None:
    with worker(tiny_reranker(), "--reranking") as engine:
        documents = ["red car", "the pear is good", "good good plum"]
        status, answer = engine.ask("/v1/rerank", {"query": "apple", "documents": documents})
        assert status == 200
        ranked = sorted(answer["results"], key=lambda result: -result["relevance_score"])
        assert [result["index"] for result in ranked] == [2, 1, 0]


@pytest.mark.parametrize("before", [(), DEAF_TO_TERM], ids=["plain", "parent ignores TERM"])
def test_sigterm_ends_it_in_the_middle_of_an_answer(before: tuple[str, ...]) -> None:
    with worker(tiny("bravo", loop=True), before=before) as engine:
        connection, response = engine.send("/v1/chat/completions", CHAT | {"stream": True})
        with contextlib.closing(connection):
            assert response.read(1)
            engine.process.terminate()
            assert engine.process.wait(timeout=30) == -signal.SIGTERM


def test_a_corrupt_model_ends_it_with_the_file_in_the_last_line(tmp_path: Path) -> None:
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(tiny("alpha").read_bytes()[:200_000])
    code, last = run_to_end("--model", str(corrupt), "--host", "127.0.0.1", "--port", "0")
    assert code == llamacpp_server.LOAD_FAILED
    assert "cannot serve" in last and str(corrupt) in last


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--model", "/nowhere/m.gguf"), 1, "there is no file /nowhere/m.gguf"),
        (("--model", "m.gguf", "--frobnicate", "3"), 2, "--frobnicate"),
        (("--model", "m.gguf", "--ctx", "3"), 2, "--ctx"),
        (("--model", "m.gguf", "--flash-attn", "maybe"), 2, "'maybe'"),
        (("--model", "m.gguf", "--ctx-size", "lots"), 2, "'lots'"),
        ((), 2, "--model is missing"),
    ],
)
def test_what_it_does_not_understand_it_refuses_by_name(options: tuple[str, ...], code: int, said: str) -> None:
    ended, last = run_to_end(*options)
    assert ended == code
    assert said in last


def test_without_xllamacpp_it_says_what_to_install() -> None:
    # Without the site module no installed package is found.
    code, last = run_to_end("--model", "m.gguf", interpreter=(sys.executable, "-I", "-S"))
    assert code == llamacpp_server.NOT_INSTALLED
    assert last.endswith("xllamacpp is not installed; pip install 'greenroom[llamacpp]' or put llama-server on PATH")


def test_defaults_keep_to_the_memory_that_was_planned() -> None:
    params = parameters("--model", "m.gguf")
    assert not params.fit_params
    assert params.cache_ram_mib == llamacpp_server.CACHE_RAM_MIB
    assert params.kv_unified
    assert not params.ui
    assert params.n_parallel == llamacpp_server.PARALLEL_AUTO


def test_options_win_over_defaults_and_later_ones_over_earlier() -> None:
    params = parameters("--cache-ram", "512", "--no-kv-unified", "--webui", "--fit", "on", "-c", "1", "--ctx-size", "2")
    assert params.cache_ram_mib == 512
    assert not params.kv_unified
    assert params.ui
    assert params.fit_params
    assert params.n_ctx == 2


def test_options_that_mean_more_than_one_parameter() -> None:
    params = parameters("--threads", "3", "--parallel", "-1", "--reranking", "--ubatch-size", "700")
    assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 3
    assert params.n_parallel == llamacpp_server.PARALLEL_AUTO
    assert params.embedding
    assert params.pooling_type == xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    assert params.n_batch == params.n_ubatch == 700
    assert parameters("--threads", "3", "--threads-batch", "2").cpuparams_batch.n_threads == 2
    assert parameters("--n-gpu-layers", "all").n_gpu_layers == -2
    assert parameters("--host", "a.sock,b.sock").hostnames == ["a.sock", "b.sock"]
    assert parameters("--no-kv-offload").no_kv_offload
    assert not parameters("--kv-offload").no_kv_offload
    scaled = parameters("--lora-scaled", "a.gguf:0.5,b.gguf:2").lora_adapters
    assert [(one.path, one.scale) for one in scaled] == [("a.gguf", 0.5), ("b.gguf", 2.0)]
    thinks = parameters("--reasoning", "off", "--chat-template-kwargs", '{"a": 1}')
    assert thinks.enable_reasoning == 0
    assert thinks.default_template_kwargs == {"enable_thinking": "false", "a": "1"}
    assert parameters("--reasoning", "auto").default_template_kwargs == {}


# A value for each option whose text is not a number.
SAMPLES = {
    "--flash-attn": "on",
    "--pooling": "mean",
    "--cache-type-k": "q8_0",
    "--cache-type-v": "f16",
    "--load-mode": "mmap+mlock",
    "--split-mode": "row",
    "--rope-scaling": "yarn",
    "--reasoning-format": "deepseek-legacy",
    "--numa": "distribute",
    "--lora-scaled": "a.gguf:0.5,b.gguf:2",
    "--spec-type": "draft-simple",
    "--reasoning": "off",
    "--fit": "off",
    "--chat-template-file": str(Path(__file__)),
    "--chat-template-kwargs": '{"enable_thinking": false}',
    "--tensor-split": "3,1",
    "--override-tensor": "exps=CPU",
}


@pytest.mark.parametrize("option", llamacpp_server.OPTIONS, ids=lambda option: option.names[0])
def test_every_option_sets_a_parameter_this_xllamacpp_has(option: llamacpp_server.ServerOption) -> None:
    for name in option.names:
        argument = [] if option.always is not None else [SAMPLES.get(option.names[0], "1")]
        params = parameters(name, *argument)
        for target in option.targets:
            value: Any = params
            for attribute in target.split("."):
                value = getattr(value, attribute)


def parameters(*options: str) -> Any:
    return llamacpp_server.parameters(llamacpp_server.parse(options))


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
