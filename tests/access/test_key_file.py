"""The format of a key file: whole or refused, and without a key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from greenroom.access.key_file import FILE_BYTES_MAX, FileKey, joined, parsed, read_keys, rendered
from greenroom.config.sections.keys import ApiKey
from greenroom.errors import ConfigError

HASH = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
FULL: dict[str, Any] = {
    "name": "team ü",
    "sha256": HASH,
    "tenant": "lab",
    "priority_max": "low",
    "models": ["llama-*"],
    "routes": ["/v1/**"],
    "verbs": ["load"],
    "limits": {"requests_per_minute": 5},
    "expires": "2099-01-01T00:00:00Z",
    "created": "2026-01-01T00:00:00Z",
    "revoked": "2026-02-01T00:00:00Z",
}


def document(*entries: dict[str, Any], version: object = 1) -> bytes:
    return json.dumps({"version": version, "keys": entries}).encode()


def why(data: bytes) -> str:
    with pytest.raises(ConfigError) as refused:
        parsed(data, "keys.json")
    return refused.value.message


def test_what_is_written_is_read_again() -> None:
    keys = (FileKey.model_validate(FULL), FileKey(name="b", sha256=OTHER, models=()))
    assert parsed(rendered(keys), "x") == keys
    assert rendered(parsed(rendered(keys), "x")) == rendered(keys)
    # One line for each key, for people who compare two versions.
    assert len(rendered(keys).splitlines()) == len(keys) + 2
    assert parsed(rendered(()), "x") == ()


def test_a_document_that_is_cut_short_anywhere_is_refused() -> None:
    data = rendered([FileKey.model_validate(FULL), FileKey(name="b", sha256=OTHER)]).rstrip()
    for size in range(len(data)):
        said = why(data[:size])
        assert HASH[:16] not in said
    assert why(b"") == why(b"\n ") == "the key file keys.json is empty"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (document({"name": "a", "key": "s3cret"}), "keys[0].key: must not be here"),
        (document({"name": "a", "sha256": "s3cret"}), "keys[0].sha256: must be 64 hexadecimal digits in lower case"),
        (document({"name": "a"}), "give exactly one of key and sha256 for a"),
        (document({"name": "a", "sha256": HASH, "admn": True}), "keys[0].admn: unknown key, did you mean admin?"),
        (document({"name": "a", "sha256": HASH, "expires": "soon"}), "keys[0].expires: a date and time, such as"),
        (document({"name": "", "sha256": HASH}), "keys[0].name: may not be empty"),
        (document({"name": "a", "sha256": HASH, "verbs": ["s3cret"]}), "keys[0].verbs[0]: one of read, load, "),
        (
            document({"name": "a", "sha256": HASH, "limits": {"concurrent_max": 0}}),
            "keys[0].limits.concurrent_max: must be at least 1, not 0",
        ),
        (b'{"version": 1}', "keys: is needed"),
        (b'{"version": 1, "keys": "s3cret"}', "keys: a list is wanted"),
        (document("s3cret"), "keys[0]: a mapping (key: value) is wanted"),  # type: ignore[arg-type]
        (document({"name": "a", "sha256": HASH}, {"name": "a", "sha256": OTHER}), "a names another key already"),
        (document({"name": "a", "sha256": HASH}, {"name": "b", "sha256": HASH}), "is the same key as a"),
        (document({"name": "a", "sha256": HASH, "models": ["x"], "admin": True}), "concerns every model"),
        (document({"name": " a", "sha256": HASH}), "keys[0].name: may not begin or end with a space"),
        (document({"name": "a", "tenant": "a ", "sha256": HASH}), "keys[0].tenant: may not begin or end with a space"),
        (document({"name": "a\t", "sha256": HASH}), "keys[0].name: may not contain control or invisible characters"),
        (document(version=2), "version: one of 1 is wanted, not 2"),
        (
            b'{"version": 1, "keys": [{"name": "a", "sha256": "%s", "admin": false, "admin": true}]}' % HASH.encode(),
            "twice",
        ),
        (b'{"version": NaN, "keys": []}', "NaN"),
        (b"[]", "a mapping (key: value) is wanted"),
        (b'"s3cret"', "a mapping (key: value) is wanted"),
        (b'["s3cret"]', "a mapping (key: value) is wanted"),
        (b'{"version": "s3cret", "keys": []}', "version: one of 1 is wanted"),
        (b'{"version": 1, "keys": [], "kys": "s3cret"}', "kys: unknown key, did you mean keys?"),
        (b'{"version": 1, "keys": [], "host": "s3cret"}', "keys.json: host: unknown key"),
        (document({"name": "a", "sha256": HASH, "cmd": "s3cret"}), "line 1: keys[0].cmd: unknown key"),
        (document({"name": "a", "sha256": HASH, "revokd": "x"}), "keys[0].revokd: unknown key, did you mean revoked?"),
        (document({"name": "a", "sha256": HASH, "limits": {"host": 1}}), "keys[0].limits.host: unknown key"),
        (b"\xff\xfe", "wrong"),
        (b"[" * 200_000, "nested too deeply"),
        (document() + document(), "no JSON"),
        (b'{"version": 1, "k\\u0065ys": [{"name": " a"}]}', "keys.json: keys[0].name: may not begin"),
        (
            b'{"x": {"keys": []}, "version": 1, "keys": [{"name": " a", "sha256": "%s"}]}' % HASH.encode(),
            "keys.json: keys[0].name: may not begin",
        ),
    ],
)
def test_what_is_wrong_is_told_without_secrets(data: bytes, said: str) -> None:
    told = why(data)
    assert said in told and told.startswith("the key file keys.json")
    assert "belongs" not in told, "that is said of keys of the configuration"
    assert "s3cret" not in told and HASH not in told and "\n" not in told


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_line_to_mend_is_named(wrong: int) -> None:
    names = ["[a, {b}]", "keys", "c"]
    keys = [FileKey(name=name, sha256=f"{number:064x}") for number, name in enumerate(names)]
    data = rendered(keys).replace(f'"name": "{names[wrong]}'.encode(), f'"name": " {names[wrong]}'.encode())
    for text, line in (
        (data, wrong + 2),
        (b"\n\n" + data, wrong + 4),
        (data.replace(b",\n", b"\n,\n\n"), 3 * wrong + 2),
    ):
        assert why(text).startswith(f"the key file keys.json, line {line}: keys[{wrong}].name: may not begin or end")


NUMBERS = (20270131, "20270131", 20270131120000, " 1800000000 ", 0, 1.5)
BEYOND = ("9999-12-31T23:59:59-05:00", "0001-01-01T00:00:00+01:00")


@pytest.mark.parametrize("field", ["expires", "created", "revoked"])
@pytest.mark.parametrize(
    ("moment", "said"),
    [
        *((number, "is a number; a date is written with hyphens, as in 2027-01-31") for number in NUMBERS),
        *((moment, "in UTC it lies before the year 1 or after the year 9999") for moment in BEYOND),
        (True, "a date is wanted, such as 2027-01-31, not true"),
    ],
)
def test_what_is_no_moment_is_refused_by_its_field(field: str, moment: object, said: str) -> None:
    assert f"keys[0].{field}: {said}" in why(document({"name": "a", "sha256": HASH, field: moment}))


def test_what_a_machine_without_a_clock_writes_can_be_read() -> None:
    moment = "1970-01-01T00:00:07Z"
    data = document({"name": "a", "sha256": HASH, "created": moment, "revoked": moment, "expires": "1999-01-01"})
    assert [key.name for key in parsed(data, "keys.json")] == ["a"]


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o644, 0o666])
def test_a_file_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(document())
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"other users \(mode {mode:04o}\); type: chmod 600"):
        read_keys(file)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_private_file_is_read(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(document({"name": "a", "sha256": HASH}))
    file.chmod(mode)
    assert [key.name for key in read_keys(file)] == ["a"]


def test_what_is_no_file_or_too_large_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir()
    large = tmp_path / "large"
    large.touch(0o600)
    os.truncate(large, FILE_BYTES_MAX + 1)
    for name in ("pipe", "folder", "large"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_keys(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_keys(tmp_path / "none")


def test_the_configuration_counts_where_both_have_a_key() -> None:
    ours = (ApiKey(name="a", sha256=HASH), ApiKey(name="b", key="b"))
    file = [
        FileKey(name="a", sha256=OTHER, admin=True),
        FileKey(name="c", sha256=HASH),
        FileKey(name="d", sha256="0" * 64),
    ]
    keys, left_out = joined(ours, file)
    assert [(key.name, key.admin) for key in keys] == [("a", False), ("b", False), ("d", False)]
    assert ["key a of" in left_out[0], "has it as a" in left_out[1], len(left_out)] == [True, True, 2]
