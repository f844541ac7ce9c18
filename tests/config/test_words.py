"""Every mistake is told in our own words: whatever is written for any key, none of the validator's reach a user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from greenroom.config.mistakes import problems_of
from greenroom.config.reader import Where
from greenroom.config.schema import Config

from .conftest import Complaints

SCHEMA = Config.model_json_schema()
WRONG = ([], "", None, True, -1, float("nan"), "a\nb", [[]], {"": ""})
THE_VALIDATORS = re.compile(r"Input|Value error|should (be [a-z]|have|match)|[Tt]uple|[Ss]tring|must match")


def keys_of(schema: dict[str, Any], where: Where = ()) -> Iterator[Where]:
    """Every key of the configuration; `name` stands for names that users choose."""
    while "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    below = {**schema.get("properties", {})}
    if isinstance(named := schema.get("additionalProperties"), dict):
        below["name"] = named
    if isinstance(items := schema.get("items"), dict):
        below[0] = items
    for key, inner in below.items():
        yield (*where, key)
        yield from keys_of(inner, (*where, key))
    for shape in schema.get("anyOf", ()):
        yield from keys_of(shape, where)


def written(where: Where, value: Any) -> Any:
    for step in reversed(where):
        value = [value] if isinstance(step, int) else {step: value}
    return value


def places(value: Any, where: Where = ()) -> Iterator[Where]:
    yield where
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in entries:
        yield from places(below, (*where, key))


def test_no_words_of_the_validator_reach_a_user() -> None:
    keys, told = list(dict.fromkeys(keys_of(SCHEMA))), set()
    for where in keys:
        for value in WRONG:
            tree = written(where, value)
            try:
                Config.model_validate(tree)
            except ValidationError as error:
                told |= {problem.message for problem in problems_of(error, dict.fromkeys(places(tree), 1))}
    assert len(keys) > 300 and len(told) > 100
    assert not [words for words in told if THE_VALIDATORS.search(words)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tasks:\n  t: {candidates: []}\n", "2: tasks.t.candidates: may not be empty"),
        ("tasks:\n  t: {candidates: [[]]}\n", "2: tasks.t.candidates[0]: text is wanted, not []"),
        (
            "server:\n  api_keys:\n    - {name: a, sha256: b}\n",
            "3: server.api_keys[0].sha256: must be 64 hexadecimal digits in lower case, "
            "as `greenroom key new` prints them",
        ),
        (f"tasks:\n  t: {{candidates: {['a'] * 99}}}\n", "2: tasks.t.candidates: may have at most 16 entries"),
        ("governance:\n  signers: {a: b}\n", "2: governance.signers.a: must be 64 hexadecimal digits in lower case"),
        ("model_roots:\n  - ''\n", "2: model_roots[0]: an empty text is no folder; name one, such as /srv/models"),
    ],
)
def test_a_mistake_is_told_once_and_plainly(complaints: Complaints, text: str, told: str) -> None:
    assert complaints(text) == [f"my.yaml:{told}"]
