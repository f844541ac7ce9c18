"""`greenroom check` of signed operations, and other warnings that look beyond the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from greenroom.config.schema import Model
from greenroom.features.governance.keyset import key_id
from greenroom.runtime.record.learned import identity_of
from tests.cli.command import Cli
from tests.features.governance.token_rig import PUBLIC, SHARED, key_file


def configured(folder: Path, **sections: Any) -> str:
    file = folder / "greenroom.yaml"
    file.write_text(json.dumps({"state_dir": str(folder / "state"), **sections}))
    return str(file)


def checked(folder: Path, cli: Cli, status: int = 0, **sections: Any) -> dict[str, Any]:
    """The result of `check --json`; `warnings` has what is wrong, whether it is an error or not."""
    result: dict[str, Any] = cli("check", configured(folder, **sections), "--json", status=status).json
    assert result["ok"] is (status == 0) is (not result["problems"])
    return {**result, "warnings": [*result["problems"], *result.get("warnings", ())]}


def test_keys_signers_and_quorums_are_shown(tmp_path: Path, cli: Cli) -> None:
    rules = [{"operations": ["model-delete"], "models": ["prod-*"], "group": "operators", "signers_min": 2}]
    governance = {
        "key_path": key_file(tmp_path),
        "signers": {**PUBLIC, "admin1": None},
        "signer_groups": {"operators": ["alice", "bob"]},
        "rules": rules,
    }
    result = checked(tmp_path, cli, governance=governance)
    told = result["governance"]
    assert result["warnings"] == [] == told["problems"]
    assert told["keys"][0] == {"signer": None, "kind": "hmac", "id": key_id(SHARED), "path": governance["key_path"]}
    ids = {key["signer"]: (key["kind"], key["id"]) for key in told["keys"][1:]}
    assert ids["alice"] == ("ed25519", key_id(bytes.fromhex(PUBLIC["alice"]))) and ids["admin1"] == ("hmac", None)
    assert told["rules"] == [{**rules[0], "signers": ["alice", "bob"]}]
    out = cli("check", tmp_path / "greenroom.yaml").out
    assert f"signed operations: shared key {key_id(SHARED)}, alice (Ed25519 " in out
    assert "  model-delete of prod-*: 2 of alice, bob\n  everything else: 1 of alice, bob, carol, admin1\n" in out
    assert SHARED.decode() not in out and SHARED.decode() not in json.dumps(result)
    assert checked(tmp_path, cli)["governance"] is None, "nothing is signed"


@pytest.mark.parametrize(
    ("data", "mode", "told"),
    [
        (None, 0, "No such file"),
        (SHARED, 0o644, "chmod 600"),
        (b"short", 0o600, "holds only 5 bytes"),
        (b"-----BEGIN PRIVATE KEY-----\n" + b"A" * 64, 0o600, "PEM"),
        (b"x" * 5_000, 0o600, "larger than"),
    ],
)
def test_what_is_wrong_with_a_key_file_is_told(
    tmp_path: Path, cli: Cli, data: bytes | None, mode: int, told: str
) -> None:
    path = str(tmp_path / "none") if data is None else key_file(tmp_path, data, mode)
    result = checked(tmp_path, cli, 1, governance={"key_path": path})
    (warning,) = result["warnings"]
    assert warning.startswith("governance.key_path: ") and told in warning and "does not start" in warning
    assert result["governance"]["keys"][0]["id"] is None


@pytest.mark.parametrize("mode", [None, pytest.param(0o644, marks=pytest.mark.slow)])
def test_a_gateway_with_a_wrong_key_file_does_not_start(tmp_path: Path, mode: int | None) -> None:
    path = str(tmp_path / "none") if mode is None else key_file(tmp_path, SHARED, mode)
    config = configured(tmp_path, governance={"key_path": path})
    serve = [sys.executable, "-m", "greenroom", "serve", "--config", config, "--port", "0"]
    ran = subprocess.run(serve, capture_output=True, timeout=120)
    told = "No such file" if mode is None else "chmod 600"
    assert ran.returncode != 0 and told in ran.stderr.decode()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_key_file_that_may_not_be_read_is_told(tmp_path: Path, cli: Cli) -> None:
    result = checked(tmp_path, cli, 1, governance={"key_path": key_file(tmp_path, mode=0)})
    assert "Permission denied" in result["warnings"][0]


WITHOUT_PACKAGES = """
import sys
sys.modules["jwt"] = None
from greenroom.cli.main import main
sys.exit(main(["check", sys.argv[1]]))
"""


def test_missing_packages_are_told_with_what_to_type(tmp_path: Path) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text(json.dumps({"governance": {"key_path": str(tmp_path / "none"), "signers": PUBLIC}}))
    ran = subprocess.run([sys.executable, "-c", WITHOUT_PACKAGES, str(file)], capture_output=True, timeout=120)
    out = ran.stdout.decode()
    assert ran.returncode == 1, ran.stderr.decode()
    assert "pip install 'greenroom[governance]'" in out and "No such file" in out, "both are told at once"


# --- quorums ----------------------------------------------------------------------------------------------------------


def test_a_quorum_that_hmac_cannot_prove_is_warned_of(tmp_path: Path, cli: Cli) -> None:
    two = [{"signers_min": 2}]
    for signers in ({}, {"admin1": None, "admin2": None}):
        governance = {"key_path": key_file(tmp_path), "signers": signers, "rules": two}
        (warning,) = checked(tmp_path, cli, governance=governance)["warnings"]
        assert "governance.rules.0: 2 signers" in warning and "HMAC proves no quorum" in warning
    both = {**PUBLIC, "admin1": None, "admin2": None}
    result = checked(tmp_path, cli, governance={**governance, "signers": both})
    assert "HMAC proves no quorum" in result["warnings"][0]
    assert checked(tmp_path, cli, governance={"signers": PUBLIC, "rules": two})["warnings"] == []


MIXED = {"alice": PUBLIC["alice"], "admin1": None}
ANYONE_SIGNS = [
    *("00" * 32, "01" + "00" * 31, "00" * 31 + "80", "ec" + "ff" * 30 + "7f", "ed" + "ff" * 30 + "7f"),
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
]


@pytest.mark.parametrize(
    ("governance", "has_shared", "told"),
    [
        # One signs with its own key, one is named by the shared key: no token has both.
        ({"signers": MIXED, "rules": [{"signers_min": 2}]}, True, "no token can prove more than 1 of alice, admin1"),
        # There is no shared key to name admin1 with.
        ({"signers": MIXED, "rules": [{"signers_min": 2}]}, False, "no token can prove more than 1 of alice, admin1"),
        (
            {"signers": MIXED, "signer_groups": {"late": ["admin1"]}, "rules": [{"group": "late"}]},
            False,
            "no token can prove more than 0 of admin1",
        ),
        *(({"signers": {"alice": key}}, False, "anyone could sign") for key in ANYONE_SIGNS),
    ],
)
def test_what_nobody_or_anybody_could_sign_is_an_error(
    tmp_path: Path, cli: Cli, governance: dict[str, Any], has_shared: bool, told: str
) -> None:
    shared = {"key_path": key_file(tmp_path)} if has_shared else {}
    assert told in checked(tmp_path, cli, 1, governance={**governance, **shared})["warnings"][0]


def test_rules_without_keys_are_warned_of(tmp_path: Path, cli: Cli) -> None:
    result = checked(tmp_path, cli, governance={"rules": [{"signers_min": 1}]})
    assert "nothing is signed" in result["warnings"][0]


# --- others -----------------------------------------------------------------------------------------------------------


def test_what_a_start_fails_at_is_an_error(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "file").touch()
    result = checked(tmp_path, cli, 1, server={"port": 9090, "metrics_port": 9090}, state_dir=str(tmp_path / "file"))
    assert (
        result["problems"]
        == result["warnings"]
        == [
            f"state_dir: {tmp_path}/file is no directory",
            "server.metrics_port: 9090 is server.port too, so the gateway does not start; choose another",
        ]
    )
    out = cli("check", tmp_path / "greenroom.yaml", status=1).out
    assert f"problem: {result['problems'][0]}\n" in out and "does not start: see above" in out.splitlines()[-1]
    for server in ({"port": 0, "metrics_port": 0}, {"port": 9090, "metrics_port": 9090, "metrics": False}):
        assert checked(tmp_path, cli, server=server)["warnings"] == []


def test_default_models_that_name_nothing_are_warned_of(tmp_path: Path, cli: Cli) -> None:
    models = {"chat": {"cmd": "sh ${PORT}", "memory_mib": 1, "aliases": ["small"]}}
    names = ("chat", "small", "coding", "cloud:any", "cloud", "gone", None)
    sections: dict[str, Any] = {
        "models": models,
        "tasks": {"coding": {"candidates": ["chat"]}},
        "remotes": {"cloud": {"base_url": "https://example.org"}},
        "server": {"default_model": "gone"},
        "profiles": {"all": {"keys": ["*"], "clients": {str(name): {"default_model": name} for name in names}}},
    }
    told = [text.partition(":")[0] for text in checked(tmp_path, cli, **sections)["warnings"]]
    clients = [f"profiles.all.clients.{name}.default_model" for name in ("cloud", "gone")]
    assert told == ["server.default_model", *clients]
    assert checked(tmp_path, cli, **sections, model_roots=[str(tmp_path)])["warnings"] == []


def test_waits_that_are_shorter_than_a_load_was_are_warned_of(tmp_path: Path, cli: Cli) -> None:
    models = {name: {"cmd": f"sh {name} ${{PORT}}", "memory_mib": 1} for name in ("quick", "slow", "changed")}
    times = {"quick": 3.0, "slow": 47.2, "changed": 400.0}
    learned = {
        name: {
            "identity": identity_of(Model.model_validate(model)),
            "moves_s": {"load": times[name]},
            "service_s": None,
        }
        for name, model in models.items()
    }
    learned["changed"]["identity"] = "0" * 32
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "lock").touch()
    (tmp_path / "state" / "learned.json").write_text(json.dumps({"version": 1, "models": learned}))
    result = checked(tmp_path, cli, models=models, server={"wait_max_s": 30})
    (warning,) = result["warnings"]
    assert "wait 30 s" in warning and "slow took 47 s to load" in warning
    assert checked(tmp_path, cli, models=models, server={"wait_max_s": 60})["warnings"] == []
