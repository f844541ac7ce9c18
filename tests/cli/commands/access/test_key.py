"""`greenroom key`: a new key opens the door that its entry describes, and is shown once."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from greenroom.cli.commands.access.key import VERBS
from greenroom.cli.main import main
from greenroom.config.schema import Config
from greenroom.config.sections.keys import Verb
from greenroom.tenancy.key_file import read_keys
from greenroom.tenancy.keys import Caller, Keys

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration is found by itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GREENROOM_CONFIG", raising=False)


def new(capsys: Capture, *words: str) -> dict[str, Any]:
    assert main(["key", "new", *words, "--json"]) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


def listed(capsys: Capture, file: str) -> list[dict[str, Any]]:
    assert main(["key", "list", "--file", file, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


# --- without a key file ---------------------------------------------------------------------------------------------


def test_a_new_key_opens_the_door_its_lines_describe(capsys: Capture) -> None:
    assert (
        main(["key", "new", 'a "name": #1 😀', "--tenant", "lab", "--model", "x*", "--requests-per-minute", "7"]) == 0
    )
    out = capsys.readouterr().out
    key = out.splitlines()[0].removeprefix("key: ")
    config = Config.model_validate(yaml.safe_load(out[out.index("server:") :]))
    caller = Keys(config.server.api_keys).check(key.encode())
    assert (caller.name, caller.tenant, caller.sees("xy"), caller.sees("y")) == ('a "name": #1 😀', "lab", True, False)
    assert caller.limits is not None and caller.limits.requests_per_minute == 7
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("words", "admin", "leases"), [([], False, False), (["--admin"], True, False), (["--leases"], False, True)]
)
def test_a_new_key_may_do_what_was_asked_for(capsys: Capture, words: list[str], admin: bool, leases: bool) -> None:
    assert main(["key", "new", "ops", *words]) == 0
    out = capsys.readouterr().out
    config = Config.model_validate(yaml.safe_load(out[out.index("server:") :]))
    (entry,) = config.server.api_keys
    assert (entry.admin, entry.leases) == (admin, leases)
    assert new(capsys, "ops", *words).keys() == {"name", "key", "sha256", *(word[2:] for word in words)}


def test_two_keys_differ_and_match_their_digests(capsys: Capture) -> None:
    made = [new(capsys, "a"), new(capsys, "a")]
    assert made[0]["key"] != made[1]["key"]
    assert all(hashlib.sha256(one["key"].encode()).hexdigest() == one["sha256"] for one in made)


def test_list_and_revoke_need_a_file(capsys: Capture, tmp_path: Path) -> None:
    for words in (["list"], ["revoke", "a"]):
        assert main(["key", *words]) == 2
        assert "set server.key_file" in capsys.readouterr().err
    assert main(["key", "list", "--file", "none.json"]) == 2
    assert "`greenroom key new` makes it" in capsys.readouterr().err


# --- with one -------------------------------------------------------------------------------------------------------


def test_a_key_is_printed_once_and_its_hash_is_kept(capsys: Capture, tmp_path: Path) -> None:
    assert main(["key", "new", "team", "--file", "keys.json"]) == 0
    secret = capsys.readouterr().out.removeprefix("key: ").strip()
    text = (tmp_path / "keys.json").read_text()
    assert secret not in text and hashlib.sha256(secret.encode()).hexdigest() in text
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600
    assert len(secret.removeprefix("gr-")) == 43, "256 bits"
    for words in (["list"], ["list", "--json"], ["revoke", "team"]):
        assert main(["key", *words, "--file", "keys.json"]) == 0
        shown = capsys.readouterr().out
        assert "team" in shown and secret not in shown and hashlib.sha256(secret.encode()).hexdigest() not in shown


def test_what_was_asked_for_is_what_it_may(capsys: Capture) -> None:
    words = ["--tenant", "lab", "--priority-max", "low", "--model", "a*", "--model", "b", "--route", "/v1/**"]
    words += ["--verb", "load", "--expires", "12h", "--requests-per-minute", "1", "--tokens-per-minute", "2"]
    words += ["--concurrent-max", "3", "--file", "keys.json"]
    made = new(capsys, "team", *words)
    (shown,) = listed(capsys, "keys.json")
    assert {**shown, "key": made["key"]} == made
    assert (shown["models"], shown["routes"], shown["verbs"]) == (["a*", "b"], ["/v1/**"], ["load"])
    assert shown["limits"] == {"requests_per_minute": 1, "tokens_per_minute": 2, "concurrent_max": 3}
    assert (shown["tenant"], shown["priority_max"], shown["state"], shown["revoked"]) == ("lab", "low", "valid", None)
    until = datetime.fromisoformat(shown["expires"]).timestamp() - time.time()
    assert 11 * 3_600 < until <= 12 * 3_600
    caller = Keys(read_keys("keys.json")).check(made["key"].encode())
    assert isinstance(caller, Caller) and caller.limits is not None and caller.limits.concurrent_max == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--expires", "2020-01-01"], "is past already"),
        (["--expires", "soon"], "expires: a date and time, such as 2030-01-31T12:00:00Z, is wanted"),
        (["--model", "a", "--admin"], "concerns every model"),
        (["--route", "nowhere"], "routes"),
        (["--concurrent-max", "0"], "limits.concurrent_max: must be at least 1, not 0"),
        (["--tenant", ""], "tenant: may not be empty"),
        (["--tenant", " lab "], "tenant: may not begin or end with a space"),
        (["--tenant", "l\tab"], "tenant: may not contain control or invisible characters"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(capsys: Capture, words: list[str], said: str) -> None:
    assert main(["key", "new", "team", "--file", "keys.json", *words]) == 2
    assert said in capsys.readouterr().err
    assert os.listdir() == []


def test_a_year_is_shown_with_four_digits(capsys: Capture) -> None:
    new(capsys, "old", "--file", "keys.json")
    file = Path("keys.json")
    file.write_text(file.read_text().replace('"created": "20', '"expires": "0001-01-01", "created": "20'))
    assert listed(capsys, "keys.json")[0]["expires"] == "0001-01-01T00:00:00Z"


def test_name_with_a_space_around_it_is_refused(capsys: Capture) -> None:
    for words in ([], ["--file", "keys.json"]):
        assert main(["key", "new", " sp ", *words]) == 2
        shown = capsys.readouterr()
        assert "name: may not begin or end with a space" in shown.err
        assert shown.out == ""
    assert os.listdir() == []


def test_the_file_is_the_configurations(capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "g.yaml").write_text("server: {key_file: keys.json, api_keys: [{name: ops, key: k, admin: true}]}\n")
    config = ["--config", str(folder / "g.yaml")]
    assert new(capsys, "team", *config)["from"] == "file"
    assert [key.name for key in read_keys(folder / "keys.json")] == ["team"]
    assert main(["key", "new", "ops", *config]) == 2
    assert "server.api_keys has a key ops already" in capsys.readouterr().err
    assert main(["key", "new", "team", *config]) == 1
    assert "has a key team already" in capsys.readouterr().err
    assert main(["key", "revoke", "team", *config]) == 0
    assert capsys.readouterr().out.startswith("team is revoked since ")
    assert main(["key", "revoke", "other", *config]) == 1
    assert "has no key other" in capsys.readouterr().err
    assert [one["state"] for one in listed(capsys, str(folder / "keys.json"))] == ["revoked"]


def test_a_key_can_be_given_every_verb_of_the_configuration() -> None:
    assert tuple(Verb) == VERBS
