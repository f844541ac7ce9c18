"""`greenroom key`: a new key opens the door that its entry describes, and is shown once."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from greenroom.access.key_file import read_keys
from greenroom.access.keys import Caller, Keys
from greenroom.cli.commands.key import VERBS
from greenroom.config.schema import Config
from greenroom.config.sections.keys import Verb
from tests.cli.command import Cli


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration is found by itself."""
    monkeypatch.chdir(tmp_path)


def new(cli: Cli, *words: str) -> dict[str, Any]:
    made: dict[str, Any] = cli("key", "new", *words, "--json").json
    return made


def listed(cli: Cli, file: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cli("key", "list", "--file", file, "--json").json
    return found


# --- without a key file ---------------------------------------------------------------------------------------------


def test_a_new_key_opens_the_door_its_lines_describe(cli: Cli) -> None:
    out = cli("key", "new", 'a "name": #1 😀', "--tenant", "lab", "--model", "x*", "--requests-per-minute", "7").out
    key = out.splitlines()[0].removeprefix("key: ")
    config = Config.model_validate(yaml.safe_load(out[out.index("server:") :]))
    caller = Keys(config.server.api_keys).check(key.encode())
    assert (caller.name, caller.tenant, caller.sees("xy"), caller.sees("y")) == ('a "name": #1 😀', "lab", True, False)
    assert caller.limits is not None and caller.limits.requests_per_minute == 7
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("words", "admin", "leases"), [([], False, False), (["--admin"], True, False), (["--leases"], False, True)]
)
def test_a_new_key_may_do_what_was_asked_for(cli: Cli, words: list[str], admin: bool, leases: bool) -> None:
    out = cli("key", "new", "ops", *words).out
    config = Config.model_validate(yaml.safe_load(out[out.index("server:") :]))
    (entry,) = config.server.api_keys
    assert (entry.admin, entry.leases) == (admin, leases)
    assert new(cli, "ops", *words).keys() == {"name", "key", "sha256", *(word[2:] for word in words)}


def test_two_keys_differ_and_match_their_digests(cli: Cli) -> None:
    made = [new(cli, "a"), new(cli, "a")]
    assert made[0]["key"] != made[1]["key"]
    assert all(hashlib.sha256(one["key"].encode()).hexdigest() == one["sha256"] for one in made)


def test_list_and_revoke_need_a_file(cli: Cli, tmp_path: Path) -> None:
    for words in (["list"], ["revoke", "a"]):
        assert "set server.key_file" in cli("key", *words, status=2).err
    assert "`greenroom key new` makes it" in cli("key", "list", "--file", "none.json", status=2).err


# --- with one -------------------------------------------------------------------------------------------------------


def test_a_key_is_printed_once_and_its_hash_is_kept(cli: Cli, tmp_path: Path) -> None:
    secret = cli("key", "new", "team", "--file", "keys.json").out.removeprefix("key: ").strip()
    text = (tmp_path / "keys.json").read_text()
    assert secret not in text and hashlib.sha256(secret.encode()).hexdigest() in text
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600
    assert len(secret.removeprefix("gr-")) == 43, "256 bits"
    for words in (["list"], ["list", "--json"], ["revoke", "team"]):
        shown = cli("key", *words, "--file", "keys.json").out
        assert "team" in shown and secret not in shown and hashlib.sha256(secret.encode()).hexdigest() not in shown


def test_what_was_asked_for_is_what_it_may(cli: Cli) -> None:
    words = ["--tenant", "lab", "--priority-max", "low", "--model", "a*", "--model", "b", "--route", "/v1/**"]
    words += ["--verb", "load", "--expires", "12h", "--requests-per-minute", "1", "--tokens-per-minute", "2"]
    words += ["--concurrent-max", "3", "--file", "keys.json"]
    made = new(cli, "team", *words)
    (shown,) = listed(cli, "keys.json")
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
def test_what_cannot_be_is_refused_and_nothing_is_written(cli: Cli, words: list[str], said: str) -> None:
    assert said in cli("key", "new", "team", "--file", "keys.json", *words, status=2).err
    assert os.listdir() == []


def test_a_year_is_shown_with_four_digits(cli: Cli) -> None:
    new(cli, "old", "--file", "keys.json")
    file = Path("keys.json")
    file.write_text(file.read_text().replace('"created": "20', '"expires": "0001-01-01", "created": "20'))
    assert listed(cli, "keys.json")[0]["expires"] == "0001-01-01T00:00:00Z"


def test_name_with_a_space_around_it_is_refused(cli: Cli) -> None:
    for words in ([], ["--file", "keys.json"]):
        shown = cli("key", "new", " sp ", *words, status=2)
        assert "name: may not begin or end with a space" in shown.err
        assert shown.out == ""
    assert os.listdir() == []


def test_the_file_is_the_configurations(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "g.yaml").write_text("server: {key_file: keys.json, api_keys: [{name: ops, key: k, admin: true}]}\n")
    config = ["--config", str(folder / "g.yaml")]
    assert new(cli, "team", *config)["from"] == "file"
    assert [key.name for key in read_keys(folder / "keys.json")] == ["team"]
    assert "server.api_keys has a key ops already" in cli("key", "new", "ops", *config, status=2).err
    assert "has a key team already" in cli("key", "new", "team", *config, status=1).err
    assert cli("key", "revoke", "team", *config).out.startswith("team is revoked since ")
    assert "has no key other" in cli("key", "revoke", "other", *config, status=1).err
    assert [one["state"] for one in listed(cli, str(folder / "keys.json"))] == ["revoked"]


def test_a_key_can_be_given_every_verb_of_the_configuration() -> None:
    assert tuple(Verb) == VERBS
