from __future__ import annotations

import json

import pytest

from greenroom.cli.main import main
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


def test_a_key_that_may_not_is_told_what_it_lacks(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    refusal = "The key chat may ask models, not manage them. Use a key with `admin: true`."
    gateway.on("POST", "/api/v1/reload", error(403, "not_allowed", refusal))
    assert main(["reload"]) == 1
    said = capsys.readouterr().err
    assert refusal in said and "`greenroom key new` makes one (--admin" in said
