"""Arguments that let tenants share prompts are refused by name, unless the operator lets tenants share."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from greenroom.config.schema import Model

SHARING: list[tuple[str, list[str]]] = [
    ("llamacpp", ["--cache-ram", "1024"]),
    ("llamacpp", ["--cache-ram=-1"]),
    ("llamacpp", ["-cram", "64"]),
    ("llamacpp", ["--cache_ram", "64"]),
    ("llamacpp", ["--slot-save-path", "/tmp/slots"]),
    ("llamacpp", ["--lookup-cache-dynamic", "/tmp/lookup"]),
    ("llamacpp", ["-lcd", "/tmp/lookup"]),
    ("llamacpp", ["--spec-type", "draft-simple,ngram-mod"]),
    ("llamacpp", ["--spec-type", "ngram-cache"]),
    ("llamacpp", ["--spec-default"]),
    ("vllm", ["--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1"}']),
    ("vllm", ["--kv-transfer-config.kv_connector", "LMCacheConnectorV1"]),
    ("vllm", ["--kv_transfer_config={}"]),
    ("vllm", ["--kv-offloading-backend", "lmcache"]),
    ("vllm", ["--prefix-caching-hash-algo", "xxhash"]),
    ("vllm", ["--speculative-config", '{"method": "suffix"}']),
    ("sglang", ["--hicache-storage-backend", "file"]),
    ("sglang", ["--enable-lmcache"]),
    ("sglang", ["--speculative-algorithm", "NGRAM"]),
]
HARMLESS: list[tuple[str, list[str]]] = [
    ("llamacpp", ["--cache-ram", "0"]),
    ("llamacpp", ["--cache-reuse", "256", "--slot-prompt-similarity", "0.1", "--kv-unified"]),
    ("llamacpp", ["--spec-type", "ngram-simple"]),
    ("llamacpp", ["--lookup-cache-static", "/tmp/lookup"]),
    ("vllm", ["--no-enable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor"]),
    ("vllm", ["--speculative-config", '{"method": "ngram"}']),
    ("sglang", ["--enable-hierarchical-cache", "--speculative-algorithm", "EAGLE"]),
    ("comfyui", ["--cache-ram", "8"]),
]
PATHS = {"llamacpp": {"path": "/m/a.gguf"}, "comfyui": {"path": "/c", "workflow": "w", "inputs": {"prompt": "6.text"}}}


def model(engine: str, **keys: Any) -> Model:
    return Model.model_validate({"engine": engine, **PATHS.get(engine, {"path": "/m/a"}), **keys})


@pytest.mark.parametrize(("engine", "args"), SHARING)
def test_an_argument_that_shares_is_refused_with_what_to_do(engine: str, args: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        model(engine, args=["--verbose", *args])
    (problem,) = refused.value.errors()[0]["ctx"]["problems"]
    assert problem.where == ("args", 1) and problem.message.startswith(args[0].partition("=")[0])
    assert "isolate_tenants: off" in problem.message
    for word in ("off", "process"):
        assert model(engine, args=args, isolate_tenants=word).args == tuple(args)


@pytest.mark.parametrize(("engine", "args"), HARMLESS)
def test_other_arguments_are_the_operators_business(engine: str, args: list[str]) -> None:
    assert model(engine, args=args).args == tuple(args)


def test_a_variable_that_says_the_same_is_refused_too() -> None:
    with pytest.raises(ValidationError) as refused:
        model("llamacpp", env={"LLAMA_ARG_SPEC_TYPE": "ngram-mod", "LLAMA_ARG_CACHE_RAM": "0"})
    (problem,) = refused.value.errors()[0]["ctx"]["problems"]
    assert problem.where == ("env", "LLAMA_ARG_SPEC_TYPE")
