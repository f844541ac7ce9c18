"""Arguments that let tenants share prompts are refused by name, unless the operator lets tenants share."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from greenroom.config.schema import Model
from greenroom.config.sections.engine_keys import ARGUMENTS

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
    ("vllm", ["--speculative-config.method", "suffix"]),
    ("vllm", ["-sc", '{"method": "suffix"}']),
    ("vllm", ["--spec-method", "suffix"]),
    ("vllm", ["-sc.method", "suffix"]),
    ("vllm", ["-sc.method=suffix"]),
    # Their parsers take the beginning of a name for the whole.
    ("vllm", ["-s", '{"method": "suffix"}']),
    ("vllm", ["--kv-transfer", "{}"]),
    ("vllm", ["--prefix-caching-hash=xxhash"]),
    ("sglang", ["--speculative-algo", "NGRAM"]),
    ("sglang", ["--enable_lm"]),
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
    ("vllm", ["--spec-method", "mtp", "--spec-model", "/m/suffix"]),
    ("vllm", ["--kv-events-config", "{}", "--kv-cache-dtype", "fp8"]),
    ("sglang", ["--enable-hierarchical-cache", "--speculative-algorithm", "EAGLE"]),
    ("sglang", ["--speculative-algo", "EAGLE", "--hicache-ratio", "2"]),
    ("llamacpp", ["--cache", "64"]),
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


def test_every_argument_of_the_table_is_tried() -> None:
    """Words are compared with the table as they are written there: one of each row is above."""
    tried = {(engine, args[0].partition("=")[0]) for engine, args in SHARING}
    for engine, rows in ARGUMENTS.items():
        for names in rows:
            assert {(engine, name) for name in names.split()} & tried, (engine, names)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("args", [["--config", "a.yaml"], ["--config=a.yaml"], ["--conf", "a.yaml"]])
def test_a_file_of_arguments_is_refused_because_it_may_hold_any(engine: str, args: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        model(engine, args=args)
    (problem,) = refused.value.errors()[0]["ctx"]["problems"]
    assert problem.where == ("args", 0) and "Write them in args" in problem.message
    assert model(engine, args=args, isolate_tenants="off").args == tuple(args)


def test_a_variable_that_says_the_same_is_refused_too() -> None:
    with pytest.raises(ValidationError) as refused:
        model("llamacpp", env={"LLAMA_ARG_SPEC_TYPE": "ngram-mod", "LLAMA_ARG_CACHE_RAM": "0"})
    (problem,) = refused.value.errors()[0]["ctx"]["problems"]
    assert problem.where == ("env", "LLAMA_ARG_SPEC_TYPE")
