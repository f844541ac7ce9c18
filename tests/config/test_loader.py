"""Files that are wrong, with the exact line and words an operator sees; and how a file is found."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from greenroom.config.loader import find, load
from greenroom.config.mistakes import problems_of
from greenroom.config.reader import PROBLEMS_MAX, Where
from greenroom.config.schema import Config
from greenroom.errors import ConfigError

from .conftest import Complaints, Loads

ONE_PROBLEM = [
    ("models:\n  q:\n    path: q.gguf\n    ctx_sise: 4\n", "4: models.q.ctx_sise: unknown key, did you mean ctx_size?"),
    ("models:\n  q:\n    path: q.gguf\n    ctxSize: 4\n", "4: models.q.ctxSize: unknown key, did you mean ctx_size?"),
    ("models:\n  q:\n    path: q.gguf\n    ttl-s: 4\n", "4: models.q.ttl-s: unknown key, did you mean ttl_s?"),
    ("modells: {}\n", "1: modells: unknown key, did you mean models?"),
    ("server:\n  prot: 1\n", "2: server.prot: unknown key, did you mean port?"),
    ("log: {}\nport: 1\n", "2: port: unknown key here; port belongs under server"),
    ("server:\n  ttl_s: 1\n", "2: server.ttl_s: unknown key here; ttl_s belongs to a model, under models"),
    ("server:\n  models: {}\n", "2: server.models: unknown key here; models belongs to the top level"),
    ("server:\n  zzzzzzzz: 1\n", "2: server.zzzzzzzz: unknown key"),
    ("gpus:\n  - memory_mib: 1\n  - memori_mib: 1\n    memory_mib: 1\n", "3: gpus[1].memori_mib: unknown key, did"),
    ('models:\n  "a.b":\n    pat: x\n    path: x.gguf\n', '3: models."a.b".pat: unknown key, did you mean path?'),
    ("server:\n  port: high\n", '2: server.port: a whole number is wanted, not "high"'),
    ("server:\n  port: 1.5\n", "2: server.port: a whole number is wanted, not 1.5"),
    ("server:\n  port: true\n", "2: server.port: a number is wanted, not true"),
    ("server:\n  port:\n", "2: server.port: a whole number is wanted, but nothing is given"),
    ("server:\n  port: 70000\n", "2: server.port: must be at most 65,535, not 70000"),
    ("server:\n  drain_s: -1\n", "2: server.drain_s: must be at least 0, not -1"),
    ("server:\n  drain_s: true\n", "2: server.drain_s: a number is wanted, not true"),
    ("server:\n  drain_s: .inf\n", '2: server.drain_s: a number is wanted, not ".inf"'),
    ("server:\n  drain_s: inf\n", '2: server.drain_s: a finite number is wanted, not "inf"'),
    ("server:\n  drain_s: 1e30\n", "2: server.drain_s: must be at most 31,536,000, not 1e+30"),
    ("server:\n  heartbeat_every_s: 0\n", "2: server.heartbeat_every_s: must be more than 0, not 0"),
    ("server:\n  docs: maybe\n", '2: server.docs: true or false is wanted, not "maybe"'),
    ("server:\n  host: 1\n", "2: server.host: text is wanted, not 1; put it in quotes"),
    ("server:\n  heartbeat: loud\n", '2: server.heartbeat: one of comment, chunk, off is wanted, not "loud"'),
    ("server:\n  allowed_hosts: a\n", '2: server.allowed_hosts: a list is wanted, not "a"'),
    ("server:\n  forward_headers: ['a b']\n", "2: server.forward_headers[0]: is no name of a header"),
    ("server:\n", "1: server: a mapping (key: value) is wanted, but nothing is given"),
    ("models:\n", "1: models: a mapping (key: value) is wanted, but nothing is given"),
    ("models: [a]\n", '1: models: a mapping (key: value) is wanted, not ["a"]'),
    ("models:\n  q:\n", "2: models.q: a mapping (key: value) is wanted, but nothing is given"),
    ("models:\n  q:\n    cmd: 5\n", "3: models.q.cmd: text or a list is wanted, not 5"),
    ("models:\n  q:\n    cmd:\n    - a\n    - 5\n", "5: models.q.cmd[1]: text is wanted, not 5; put it in quotes"),
    (
        "models:\n  q:\n    path: q.gguf\n    priority: urgent\n",
        '4: models.q.priority: one of high, normal, low or a whole number is wanted, not "urgent"',
    ),
    ("models:\n  q:\n    path: q.gguf\n    env: {A: 5}\n", "4: models.q.env.A: text is wanted; put it in quotes"),
    ("server:\n  host: {" + "a: 1, " * 20 + "}\n", "2: server.host.a: is given twice, first on line 2"),
    ("gpus:\n  - margin_mib: 5\n", "2: gpus[0].memory_mib: is needed"),
    ("ports:\n  first: 9\n  last: 8\n", "2: ports.first: may not be more than last (8)"),
    (
        "scheduler:\n  backoff_s: 9\n  backoff_max_s: 8\n",
        "2: scheduler.backoff_s: may not be more than backoff_max_s (8)",
    ),
    (
        "scheduler:\n  deadline_normal_s: 90\n  deadline_low_s: 30\n",
        "2: scheduler.deadline_normal_s: may not be more than deadline_low_s (30)",
    ),
    (
        "scheduler:\n  deadline_high_s: 241\n",
        "2: scheduler.deadline_high_s: may not be more than deadline_normal_s (240)",
    ),
]


@pytest.mark.parametrize(("text", "told"), ONE_PROBLEM)
def test_problem_is_told_with_its_line(complaints: Complaints, text: str, told: str) -> None:
    assert complaints(text)[0].startswith(f"my.yaml:{told}")


def test_long_value_is_shown_shortened(complaints: Complaints) -> None:
    (told,) = complaints(f"server:\n  port: {'x' * 500}\n")
    assert told == f'my.yaml:2: server.port: a whole number is wanted, not "{"x" * 38}…'


def test_all_problems_are_told_together_in_the_order_of_lines(complaints: Complaints) -> None:
    told = complaints("""\
        ports: {first: 9, last: 8}
        server:
          prot: 1
          port: x
          port: 2
        models:
          load:
            path: a.gguf
            name: ${nowhere}
          b:
            path: b.gguf
            aliases: [load]
          c:
            path: c.gguf
            cmd: c
        """)
    assert told == [
        "my.yaml:1: ports.first: may not be more than last (8)",
        "my.yaml:3: server.prot: unknown key, did you mean port?",
        'my.yaml:4: server.port: a whole number is wanted, not "x"',
        "my.yaml:5: server.port: is given twice, first on line 4",
        "my.yaml:7: models.load: load is a word of the management API and cannot be an id",
        "my.yaml:9: models.load.name: ${nowhere} is not known; macros are defined under macros, before their first use",
        "my.yaml:12: models.b.aliases[0]: load is a word of the management API and cannot be an id",
        "my.yaml:12: models.b.aliases[0]: load is already a model's id",
        "my.yaml:13: models.c: give path (engine llamacpp or transformers) or cmd (engine command), not both",
    ]


def test_problems_beyond_the_limit_are_counted(complaints: Complaints) -> None:
    told = complaints("server:\n" + "".join(f"  zzz{n}: 1\n" for n in range(PROBLEMS_MAX + 7)))
    assert len(told) == PROBLEMS_MAX + 1
    assert told[-1] == "my.yaml: and 7 more"


def test_value_that_could_not_be_expanded_is_complained_about_once(complaints: Complaints) -> None:
    assert complaints("server:\n  port: ${env.NO_SUCH}\n") == [
        "my.yaml:2: server.port: the environment variable NO_SUCH is not set"
    ]


def test_repeated_key_is_refused_even_if_all_else_is_right(complaints: Complaints) -> None:
    assert complaints("log: {}\nlog: {}\n") == ["my.yaml:2: log: is given twice, first on line 1"]


@pytest.mark.parametrize(
    "entry", ["{name: a, key: 12345678}", "{name: a, key: '123 45678'}", "{name: a, key: [12345678]}"]
)
def test_key_is_never_shown(complaints: Complaints, entry: str) -> None:
    assert "45678" not in "\n".join(complaints(f"server:\n  api_keys: [{entry}]\n"))


def test_key_is_not_in_the_representation(loads: Loads) -> None:
    config = loads("server:\n  api_keys: [{name: a, key: ${env.K}}]\n".replace("${env.K}", '"${env.K}"'), {"K": "hush"})
    assert config.server.api_keys[0].key == "hush"
    assert "hush" not in repr(config)


def test_refusal_does_not_carry_the_values_in_its_causes(complaints: Complaints, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("server:\n  api_keys: [{name: a, key: [hush]}]\n")
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "my.yaml")
    assert refused.value.__cause__ is None and refused.value.__context__ is None


def test_words_for_true_and_false_are_understood_where_one_is_wanted(loads: Loads) -> None:
    config = loads("server: {docs: off, heartbeat: off}\nmodels: {q: {path: q.gguf, flash_attn: on, pinned: yes}}\n")
    assert config.server.docs is False
    assert config.server.heartbeat.value == "off"
    assert config.models["q"].flash_attn == "on"
    assert config.models["q"].pinned is True


def test_file_may_leave_out_models_if_it_says_something(loads: Loads) -> None:
    assert loads("server: {port: 1}\n").models == {}


def test_relative_file_is_named_as_typed_and_kept_as_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("port: 1\n")
    with pytest.raises(ConfigError, match=r"^a\.yaml:1: "):
        load("a.yaml")
    Path("a.yaml").write_text("log: {level: debug}\n")
    loaded = load("a.yaml")
    assert loaded.path == tmp_path / "a.yaml"
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.path = Path("b")  # type: ignore[misc]


def test_tilde_in_the_files_own_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.yaml").write_text("log: {level: debug}\n")
    assert load("~/a.yaml").config.log.level.value == "debug"


def test_file_is_found_by_option_then_environment_then_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no greenroom\.yaml here; name a file with --config or GREENROOM_CONFIG"):
        find(None, {})
    (tmp_path / "greenroom.yaml").touch()
    assert find(None, {}) == Path("greenroom.yaml")
    assert find(None, {"GREENROOM_CONFIG": "/b.yaml"}) == Path("/b.yaml")
    assert find("/a.yaml", {"GREENROOM_CONFIG": "/b.yaml"}) == Path("/a.yaml")


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
