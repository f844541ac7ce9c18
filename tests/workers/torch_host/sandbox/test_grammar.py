from __future__ import annotations

import asyncio
import builtins
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.workers.serving.errors import ApiError
from greenroom.workers.torch_host.api.routes import ModelServer
from greenroom.workers.torch_host.sandbox.grammar import SCHEMA_BYTES_MAX, Grammars, JsonConstraint
from greenroom.workers.torch_host.sandbox.pool import JobKind, SandboxPool
from greenroom.workers.torch_host.sandbox.schema_trials import SCHEMAS, SchemaTrials
from greenroom.workers.torch_host.text.tokens import TextCodec
from tests.waiting import PATIENCE_S, until
from tests.workers.torch_host.fake_inference import FakeEngine
from tests.workers.torch_host.samples import tokenizer_folders

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Köln"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def grammars(byte_text: TextCodec) -> Iterator[Grammars]:
    with closing(grammars_of(byte_text)) as made:
        yield made


def grammars_of(text: TextCodec, kind: JobKind = SCHEMAS, **limits: int) -> Grammars:
    return Grammars(text, SchemaTrials(SandboxPool(kind)), **limits)


def allowed(constraint: JsonConstraint, words: int) -> set[int]:
    row = torch.full((words,), -1, dtype=torch.int32)
    constraint.fill(row)
    return {token for token in range(words * 32) if int(row[token // 32]) >> (token % 32) & 1}


def follows(text: TextCodec, constraint: JsonConstraint, said: str) -> bool:
    """Whether each token of this text was allowed when it came, whatever the width of the mask."""
    for token in text.tokens_of(said, False):
        exact = allowed(constraint, (text.size + 31) // 32)
        assert allowed(constraint, 40) == exact
        assert allowed(constraint, 4) == {one for one in exact if one < 128}
        if token not in exact:
            return False
        constraint.accept(token)
    return constraint.is_done


async def test_only_what_the_schema_says_may_come(byte_text: TextCodec, grammars: Grammars) -> None:
    assert follows(byte_text, await grammars.constraint(CITY, True, "f"), '{"city": "Köln"}')
    assert not follows(byte_text, await grammars.constraint(CITY, True, "f"), '{"city": "Rome"}')
    assert not follows(byte_text, await grammars.constraint(CITY, True, "f"), "Sure: {")


async def test_a_vocabulary_that_fills_its_words_is_masked_too(byte_text: TextCodec, tmp_path: Path) -> None:
    missing = tuple(f"<pad{number}>" for number in range(-byte_text.size % 32))
    full = TextCodec.load(tokenizer_folders.byte_level(tmp_path / "full", special=missing))
    assert full.size % 32 == 0
    own = Grammars(full, SchemaTrials(SandboxPool(SCHEMAS)))
    for extra_words in (0, 1):
        constraint = await own.constraint(CITY, True, "f")
        assert allowed(constraint, full.size // 32 + extra_words) == allowed(constraint, 40) != set()
    own.close()


async def test_the_end_may_come_exactly_when_the_text_is_complete(byte_text: TextCodec, grammars: Grammars) -> None:
    constraint = await grammars.constraint({"type": "integer"}, True, "f")
    (end,) = byte_text.stop_tokens
    assert end not in allowed(constraint, 16)
    constraint.accept(byte_text.tokens_of("4", False)[0])
    assert end in allowed(constraint, 16)
    constraint.accept(end)
    assert constraint.is_done and constraint.problem is None


async def test_a_token_out_of_turn_is_a_problem_that_is_told(byte_text: TextCodec, grammars: Grammars) -> None:
    constraint = await grammars.constraint(CITY, True, "f")
    constraint.accept(byte_text.tokens_of("x", False)[0])
    assert constraint.is_done
    assert constraint.problem is not None and "\n" not in constraint.problem


async def test_copies_go_their_own_ways(byte_text: TextCodec, grammars: Grammars) -> None:
    first = await grammars.constraint(CITY, True, "f")
    second = first.again()
    first.accept(byte_text.tokens_of("{", False)[0])
    assert allowed(first, 16) != allowed(second, 16)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"properties": 5},
        {"$ref": "http://elsewhere/schema"},
        {"type": "object", "not": {}},
        {"type": "string", "pattern": "("},
    ],
)
async def test_a_schema_that_cannot_be_held_to_is_refused_by_name(grammars: Grammars, schema: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        await grammars.constraint(schema, True, "response_format")
    assert (refused.value.status, refused.value.param) == (400, "response_format")


def chain(links: int) -> dict[str, Any]:
    """Definitions each of which refers to the next."""
    parts = {f"d{link}": {"properties": {"a": {"$ref": f"#/$defs/d{link + 1}"}}} for link in range(links)}
    return {"$defs": {**parts, f"d{links}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def nested(levels: int) -> dict[str, Any]:
    return {"type": "integer"} if levels == 0 else {"type": "object", "properties": {"a": nested(levels - 1)}}


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(chain(2_000), id="a chain that overruns the stack"),
        pytest.param({"allOf": [{"multipleOf": prime} for prime in (7, 11, 13, 997)]}, id="multiples without end"),
        pytest.param({"type": "string", "pattern": f"^{'a?' * 60_000}$"}, id="a pattern that takes hours"),
        pytest.param({"enum": ["x" * 200_000]}, id="a literal whose steps take seconds"),
    ],
)
async def test_a_schema_that_is_too_much_fails_by_itself_in_time(byte_text: TextCodec, schema: dict[str, Any]) -> None:
    # What never ends is ended sooner than in production.
    with (
        closing(grammars_of(byte_text, replace(SCHEMAS, cpu_s=1))) as grammars,
        pytest.raises(ApiError, match="too complex") as refused,
    ):
        await grammars.constraint(schema, True, "response_format")
    assert (refused.value.status, refused.value.code) == (422, "schema_too_complex")
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"$ref": "#"}, id="only itself"),
        pytest.param(
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, id="ring"
        ),
        pytest.param({"properties": {f"p{one}": {"type": "string"} for one in range(2_000)}}, id="too wide"),
        pytest.param(nested(200), id="too deep"),
        pytest.param({"type": "string", "minLength": 5, "maxLength": 2}, id="lengths"),
        pytest.param({"type": "integer", "minimum": 5, "maximum": 2}, id="bounds"),
        pytest.param({"allOf": [{"type": "string"}, {"type": "integer"}]}, id="types"),
        pytest.param({"enum": []}, id="no alternative"),
        pytest.param({"type": "object", "required": ["a"], "properties": {"a": False}}, id="impossible property"),
        pytest.param({"type": 5}, id="type is a number"),
        pytest.param({"type": "string", "minLength": -4}, id="negative"),
        pytest.param({"type": "string", "minLength": 1e400}, id="infinite"),
        pytest.param({"type": "array", "items": 7}, id="items is a number"),
        pytest.param({"type": "integer", "minimum": -(10**30), "maximum": 10**30}, id="more than 64 bits"),
        pytest.param({"type": "string", "pattern": "^(a)\\1$"}, id="a reference back"),
    ],
)
async def test_what_the_library_would_refuse_later_is_refused_first(grammars: Grammars, schema: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        await grammars.constraint(schema, True, "response_format")
    assert (refused.value.status, refused.value.param) == (400, "response_format")
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"enum": [f"v{one}" for one in range(10_000)]}, id="ten thousand words"),
        pytest.param({"type": "string", "minLength": 1_000_000_000}, id="a very long text"),
        pytest.param({"type": "array", "items": {"type": "string"}, "maxItems": 1_000_000}, id="a very long list"),
        pytest.param(nested(40), id="deep"),
        pytest.param(chain(30), id="a chain"),
        pytest.param({"$defs": {"n": {"properties": {"l": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}, id="a tree"),
        pytest.param({"type": "string", "pattern": "^(a+)+b{1,500}(c|d|e){100,2000}$"}, id="a heavy pattern"),
    ],
)
async def test_what_is_large_and_can_be_done_is_done(grammars: Grammars, schema: dict[str, Any]) -> None:
    constraint = await grammars.constraint(schema, True, "response_format")
    assert allowed(constraint, 16) and constraint.problem is None


class Compiling:
    """Compilations, each of which waits until it may go on."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.go = threading.Event()


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiling]:
    made = Compiling()
    # The library compiles in machine code, which can be neither held back nor counted from outside.
    real = Grammars._compile

    def compile(own: Grammars, schema: str, overrides: Mapping[str, Any]) -> Any:
        made.began.append(schema)
        assert made.go.wait(PATIENCE_S)
        return real(own, schema, overrides)

    monkeypatch.setattr(Grammars, "_compile", compile)
    yield made
    made.go.set()


async def test_a_schema_is_compiled_once_and_kept(
    byte_text: TextCodec, grammars: Grammars, compiling: Compiling
) -> None:
    asking = [asyncio.create_task(grammars.constraint(CITY, True, f"f{number}")) for number in range(5)]
    await until(lambda: bool(compiling.began))
    asking[0].cancel()
    await asyncio.wait(asking[:1])
    compiling.go.set()
    made = await asyncio.gather(*asking[1:])
    made.append(await grammars.constraint(CITY, True, "f5"))
    assert [one.param for one in made] == ["f1", "f2", "f3", "f4", "f5"]
    # Each goes its own way, and none goes a step of what is kept.
    assert all(follows(byte_text, one, '{"city": "Paris"}') for one in made)
    assert compiling.began == [json.dumps(CITY)]
    # What another sends less strictly is another schema.
    await grammars.constraint(CITY, False, "f")
    assert len(compiling.began) == 2


async def test_the_last_few_compiled_schemas_are_kept(byte_text: TextCodec, compiling: Compiling) -> None:
    compiling.go.set()
    with closing(grammars_of(byte_text, compiled_max=2)) as grammars:
        for size in (1, 1, 2, 1, 3, 1, 2):
            await grammars.constraint({"type": "string", "maxLength": size}, True, "f")
    # The third pushed the second out, which had been asked for the longest ago.
    assert [json.loads(schema)["maxLength"] for schema in compiling.began] == [1, 2, 3, 2]


async def test_compiling_needs_no_thread_that_all_models_share(byte_text: TextCodec, grammars: Grammars) -> None:
    go = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        threads.submit(go.wait, PATIENCE_S)
        try:
            async with asyncio.timeout(PATIENCE_S / 2):
                constraint = await grammars.constraint(CITY, True, "f")
        finally:
            go.set()
    assert follows(byte_text, constraint, '{"city": "Paris"}')


async def test_no_more_compilations_wait_than_may(byte_text: TextCodec, compiling: Compiling) -> None:
    with closing(grammars_of(byte_text, compiling_max=1)) as grammars:
        first = asyncio.create_task(grammars.constraint(CITY, True, "f"))
        await until(lambda: bool(compiling.began))
        with pytest.raises(ApiError) as refused:
            await grammars.constraint({"type": "integer"}, True, "f")
        assert refused.value.status == 503
        compiling.go.set()
        await first
        await grammars.constraint({"type": "integer"}, True, "f")


async def test_threads_that_compile_end_with_the_model(
    byte_text: TextCodec, grammars: Grammars, socket_folder: Path, templates: SandboxPool
) -> None:
    engine = FakeEngine(lambda ask: [])
    before = set(threading.enumerate())
    served = ModelServer(byte_text, engine, "tiny", templates=templates, trials=SchemaTrials(SandboxPool(SCHEMAS)))
    await served.open(socket_folder / "s")
    await served.model.grammars.constraint(CITY, True, "f")
    own = [one for one in threading.enumerate() if one.name.startswith("compile") and one not in before]
    assert own
    await served.close()
    await until(lambda: not any(one.is_alive() for one in own))


async def test_without_strict_unknown_keywords_are_passed_over(byte_text: TextCodec, grammars: Grammars) -> None:
    schema = {"type": "boolean", "not": {"const": True}}
    assert follows(byte_text, await grammars.constraint(schema, False, "f"), "true")


async def test_a_schema_is_bounded(grammars: Grammars) -> None:
    with pytest.raises(ApiError, match="bytes"):
        await grammars.constraint({"enum": ["x" * SCHEMA_BYTES_MAX]}, True, "f")


async def test_without_the_library_it_says_what_to_install(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ApiError, match="pip install llguidance"):
        await grammars.constraint(json.loads('{"type": "object"}'), True, "f")
