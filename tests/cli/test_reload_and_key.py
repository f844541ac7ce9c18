from __future__ import annotations

import hashlib
import json

import pytest
import yaml

from greenroom.cli.main import main
from greenroom.config.schema import Config
from greenroom.tenancy.keys import Keys
from tests.cli.fake_gateway import FakeGateway, answer, error

NOTHING: dict[str, object] = {"added": [], "changed": [], "relabelled": [], "removed": [], "at_once": [], "took_s": 0.1}


def test_reload_prints_what_changed(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    changes = NOTHING | {
        "added": ["a"],
        "removed": ["b"],
        "changed": ["c"],
        "relabelled": ["d"],
        "at_once": ["log.level"],
    }
    gateway.on("POST", "/api/v1/reload", answer(changes))
    assert main(["reload"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["+ a", "- b", "~ c", "= d", "* log.level"]
    assert last.startswith("reloaded in ") and last.endswith(": 5 changes")


def test_reload_says_when_nothing_changed(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.on("POST", "/api/v1/reload", answer(NOTHING))
    assert main(["reload"]) == 0
    assert capsys.readouterr().out.endswith(": nothing changed\n")


def test_reload_gives_the_changes_as_json(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.on("POST", "/api/v1/reload", answer(NOTHING))
    assert main(["reload", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == NOTHING


def test_a_bad_file_fails_with_its_lines(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.on("POST", "/api/v1/reload", error(422, "invalid_config", "g.yaml:3: models: unknown key"))
    assert main(["reload"]) == 1
    assert capsys.readouterr() == ("", "greenroom: g.yaml:3: models: unknown key\n")


def test_a_new_key_opens_the_door_its_lines_describe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", 'a "name": #1 😀']) == 0
    out = capsys.readouterr().out
    key = out.splitlines()[0].removeprefix("key: ")
    config = Config.model_validate(yaml.safe_load(out[out.index("server:") :]))
    assert Keys(config.server.api_keys).check(key.encode()).name == 'a "name": #1 😀'


@pytest.mark.parametrize(
    ("words", "admin", "leases"), [([], False, False), (["--admin"], True, False), (["--leases"], False, True)]
)
def test_a_new_key_may_do_what_was_asked_for(
    capsys: pytest.CaptureFixture[str], words: list[str], admin: bool, leases: bool
) -> None:
    assert main(["key", "ops", *words]) == 0
    out = capsys.readouterr().out
    config = Config.model_validate(yaml.safe_load(out[out.index("server:") :]))
    (entry,) = config.server.api_keys
    assert (entry.admin, entry.leases) == (admin, leases)
    assert main(["key", "ops", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"name", "key", "sha256", *(word[2:] for word in words)}


def test_a_key_that_may_not_is_told_what_it_lacks(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    refusal = "The key chat may ask models, not manage them. Use a key with `admin: true`."
    gateway.on("POST", "/api/v1/reload", error(403, "not_allowed", refusal))
    assert main(["reload"]) == 1
    said = capsys.readouterr().err
    assert refusal in said and "`greenroom key` makes one (--admin" in said


def test_two_keys_differ_and_match_their_digests(capsys: pytest.CaptureFixture[str]) -> None:
    made = []
    for _ in range(2):
        assert main(["key", "--json"]) == 0
        made.append(json.loads(capsys.readouterr().out))
    assert made[0]["key"] != made[1]["key"]
    assert all(hashlib.sha256(one["key"].encode()).hexdigest() == one["sha256"] for one in made)
