"""`greenroom token` and `greenroom audit`, and --token of the commands that change models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import pytest

from greenroom.cli.main import main
from greenroom.config.sections.governance import Operation
from greenroom.features.governance.audit import AuditLog
from greenroom.features.governance.canonical_json import sha256_of
from greenroom.features.governance.cli import OPERATIONS
from greenroom.features.governance.tokens import BySigners, read_token
from tests.cli.command import Cli
from tests.cli.fake_gateway import FakeGateway, answer
from tests.features.governance.token_rig import in_place, key_file

Out = pytest.CaptureFixture[str]


@pytest.fixture
def signers(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Keys of alice and bob, and a configuration that knows them."""
    monkeypatch.chdir(tmp_path)
    lines = ["governance:", "  signers:"]
    for name in ("alice", "bob"):
        lines.append(cli("token", "keygen", f"{name}.pem", "--signer", name).lines[2])
        assert os.stat(f"{name}.pem").st_mode & 0o777 == 0o600
    (tmp_path / "greenroom.yaml").write_text("\n".join([*lines, f"state_dir: {tmp_path}/state", ""]))
    return {name: f"{name}.pem" for name in ("alice", "bob")}


def test_operations_are_those_of_the_configuration() -> None:
    assert get_args(Operation) == OPERATIONS


def test_a_token_is_signed_cosigned_and_verified(tmp_path: Path, signers: dict[str, str], cli: Cli) -> None:
    sign = ["token", "sign", "model-load", "m", "--key", "alice.pem", "--signer", "alice", "--signers", "alice,bob"]
    (tmp_path / "one").write_text(cli(*sign, "--body", '{"evict":["x"]}').out)
    text = cli("token", "cosign", "one", "--key", "bob.pem", "--signer", "bob").out.strip()
    (tmp_path / "both").write_text(text)
    presented = read_token(text)
    assert isinstance(presented.proof, BySigners) and len(presented.proof.signatures) == 2
    assert presented.token.body_sha256 == sha256_of({"evict": ["x"]})
    told = cli("token", "verify", "both", "--json", "--body", '{"evict":["x"]}').json
    assert told["signers"] == ["alice", "bob"] and told["operation"] == "model-load" and told["left_s"] > 200
    assert "another body" in cli("token", "verify", "both", "--body", "{}", status=1).err
    assert "does not name carol" in cli("token", "cosign", "one", "--key", "bob.pem", "--signer", "carol", status=1).err


def test_a_shared_key_signs_too(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("token", "keygen", "--shared", "shared.key").out == "governance:\n  key_path: shared.key\n"
    (tmp_path / "greenroom.yaml").write_text("governance: {key_path: shared.key}\n")
    sign = ["token", "sign", "config-reload", "--key", "shared.key", "--signer", "admin1", "--no-body"]
    (tmp_path / "token").write_text(cli(*sign, "--json").out)
    assert "config-reload of no model, proven by admin1" in cli("token", "verify", "token").out
    assert "File exists" in cli("token", "keygen", "--shared", "shared.key", status=1).err


def test_a_key_that_others_can_read_signs_nothing(tmp_path: Path, cli: Cli) -> None:
    path = key_file(tmp_path, mode=0o644)
    assert "other users" in cli("token", "sign", "model-load", "m", "--key", path, status=1).err


@pytest.mark.parametrize(
    ("command", "method", "path", "said"),
    [
        (["load", "m"], "POST", "/api/v1/models/m/load", {"model": "m", "tier": "ready"}),
        (["unload", "m", "--grace-s", "5"], "POST", "/api/v1/models/m/unload", {"model": "m", "tier": "cold"}),
        (["reload"], "POST", "/api/v1/reload", {}),
    ],
)
def test_commands_send_the_token(
    gateway: FakeGateway, tmp_path: Path, command: list[str], method: str, path: str, said: dict[str, str]
) -> None:
    (tmp_path / "token").write_text("eyJ0\n")
    gateway.on(method, path, answer(said))
    assert main([*command, "--token", str(tmp_path / "token")]) == 0
    asked = next(one for one in gateway.asked if one.target == path)
    assert asked.headers["x-verified-op-token"] == "eyJ0"
    if "--grace-s" in command:
        assert asked.json == {"grace_s": 5} and isinstance(asked.json["grace_s"], int)


def test_a_file_that_holds_no_token_is_told(gateway: FakeGateway, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "token").write_text("two words")
    cli("reload", "--token", tmp_path / "token", status=2)
    assert "cannot be read" in cli("reload", "--token", tmp_path / "none", status=2).err


async def test_the_audit_log_is_verified(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, in_place)
    await log.open()
    for number in range(3):
        await log.append({"event": "permitted", "model": f"m{number}"})
    await log.close()
    assert "4 lines, none changed" in cli("audit", "verify", path).out
    path.write_text(path.read_text().replace("m1", "m9"))
    assert "line 3: it was changed" in cli("audit", "verify", path, status=1).err
    assert cli("audit", "verify", path, "--json", status=1).json["bad_line"] == 3
