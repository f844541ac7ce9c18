from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.workers.torch_host.grammar import SCHEMA_BYTES_MAX, Grammars, JsonConstraint
from greenroom.workers.torch_host.refusals import Refused
from greenroom.workers.torch_host.text import Text
from tests.workers.torch_host import tokenizer_folders

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Köln"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def allowed(constraint: JsonConstraint, words: int) -> set[int]:
    row = torch.full((words,), -1, dtype=torch.int32)
    constraint.fill(row)
    return {token for token in range(words * 32) if int(row[token // 32]) >> (token % 32) & 1}


def follows(text: Text, constraint: JsonConstraint, said: str) -> bool:
    """Whether each token of this text was allowed when it came, whatever the width of the mask."""
    for token in text._encode(said, False):
        exact = allowed(constraint, (text.size + 31) // 32)
        assert allowed(constraint, 40) == exact
        assert allowed(constraint, 4) == {one for one in exact if one < 128}
        if token not in exact:
            return False
        constraint.accept(token)
    return constraint.is_done


async def test_only_what_the_schema_says_may_come(byte_text: Text) -> None:
    grammars = Grammars(byte_text)
    assert follows(byte_text, await grammars.constraint(CITY, True, "f"), '{"city": "Köln"}')
    assert not follows(byte_text, await grammars.constraint(CITY, True, "f"), '{"city": "Rome"}')
    assert not follows(byte_text, await grammars.constraint(CITY, True, "f"), "Sure: {")


async def test_a_vocabulary_that_fills_its_words_is_masked_too(byte_text: Text, tmp_path: Path) -> None:
    missing = tuple(f"<pad{number}>" for number in range(-byte_text.size % 32))
    full = Text.load(tokenizer_folders.byte_level(tmp_path / "full", special=missing))
    assert full.size % 32 == 0
    for extra_words in (0, 1):
        constraint = await Grammars(full).constraint(CITY, True, "f")
        assert allowed(constraint, full.size // 32 + extra_words) == allowed(constraint, 40) != set()


async def test_the_end_may_come_exactly_when_the_text_is_complete(byte_text: Text) -> None:
    constraint = await Grammars(byte_text).constraint({"type": "integer"}, True, "f")
    (end,) = byte_text.stop_tokens
    assert end not in allowed(constraint, 16)
    constraint.accept(byte_text._encode("4", False)[0])
    assert end in allowed(constraint, 16)
    constraint.accept(end)
    assert constraint.is_done and constraint.problem is None


async def test_a_token_out_of_turn_is_a_problem_that_is_told(byte_text: Text) -> None:
    constraint = await Grammars(byte_text).constraint(CITY, True, "f")
    constraint.accept(byte_text._encode("x", False)[0])
    assert constraint.is_done
    assert constraint.problem is not None and "\n" not in constraint.problem


async def test_copies_go_their_own_ways(byte_text: Text) -> None:
    first = await Grammars(byte_text).constraint(CITY, True, "f")
    second = first.again()
    first.accept(byte_text._encode("{", False)[0])
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
async def test_a_schema_that_cannot_be_held_to_is_refused_by_name(byte_text: Text, schema: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        await Grammars(byte_text).constraint(schema, True, "response_format")
    assert (refused.value.status, refused.value.param) == (400, "response_format")


async def test_without_strict_unknown_keywords_are_passed_over(byte_text: Text) -> None:
    schema = {"type": "boolean", "not": {"const": True}}
    assert follows(byte_text, await Grammars(byte_text).constraint(schema, False, "f"), "true")


async def test_a_schema_is_bounded(byte_text: Text) -> None:
    with pytest.raises(Refused, match="bytes"):
        await Grammars(byte_text).constraint({"enum": ["x" * SCHEMA_BYTES_MAX]}, True, "f")


async def test_without_the_library_the_answer_says_what_to_install(
    byte_text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Refused, match="pip install llguidance"):
        await Grammars(byte_text).constraint(json.loads('{"type": "object"}'), True, "f")
