"""What permits an operation and what does not: each refusal with its own code, audited, and nothing twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jwt
import pytest

from greenroom.errors import AuditUnavailable, ConfigError, GreenroomError, NoncesUnavailable
from greenroom.features.governance import signing
from greenroom.features.governance.audit import verify
from greenroom.features.governance.canonical_json import sha256_of
from greenroom.features.governance.gate import Done
from greenroom.features.governance.tokens import as_text
from tests.features.governance.token_rig import (
    NOW,
    PRIVATE,
    PUBLIC,
    SHARED,
    call,
    key_file,
    op_token,
    opened,
    shared_token,
    signed_token,
)
from tests.full_disk import full_disk

GROUP = {"signers": PUBLIC, "signer_groups": {"operators": ["alice", "bob", "carol"]}}
TWO = {"rules": [{"operations": ["model-load"], "models": ["org/*"], "group": "operators", "signers_min": 2}]}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


async def code(gate: Any, asked: Any) -> str:
    """What a call is refused with; empty if it is permitted."""
    try:
        await gate.permit(asked)
    except GreenroomError as error:
        return error.code
    return ""


async def test_the_shared_key_permits_an_operation_once(tmp_path: Path) -> None:
    gate = await opened(tmp_path, key_path=key_file(tmp_path))
    token = shared_token(signers=["admin1", "admin2", "admin3"])
    await gate.permit(call(token))
    await gate.answered(call(token), 202)
    assert await code(gate, call(token)) == "token_replayed"
    assert [line["event"] for line in lines(tmp_path)] == ["opened", "permitted", "answered", "refused"]
    permitted = lines(tmp_path)[1]
    assert permitted["token"] == token and permitted["signers"] == ["admin1", "admin2", "admin3"]
    assert permitted["key"] == "ops" and permitted["model"] == "org/model"
    assert SHARED.decode() not in (tmp_path / "audit.jsonl").read_text()


async def test_a_token_is_taken_as_text_too(tmp_path: Path) -> None:
    gate = await opened(tmp_path, key_path=key_file(tmp_path))
    token = shared_token()
    assert await code(gate, call(as_text(token))) == ""
    assert await code(gate, call(token)) == "token_replayed"


@pytest.mark.parametrize(
    ("token", "asked", "expected"),
    [
        (None, {}, "token_missing"),
        (7, {}, "token_malformed"),
        ("eyJ", {}, "token_malformed"),
        ({"opToken": {}, "signature": "0" * 64}, {}, "token_malformed"),
        (shared_token(more=1), {}, "token_malformed"),
        (shared_token(issuedAt=True), {}, "token_malformed"),
        ({**shared_token(), "signature": "A" * 64}, {}, "token_malformed"),
        ({**shared_token(), "signature": "0" * 64}, {}, "token_bad_signature"),
        (shared_token(signers=["a", "a"]), {}, "token_signer_repeated"),
        (shared_token(operation="model-unload"), {}, "token_wrong_operation"),
        (shared_token(modelId="org/other"), {}, "token_wrong_model"),
        (shared_token(modelId=None), {}, "token_wrong_model"),
        (shared_token(), {"model": None}, "token_wrong_model"),
        (shared_token(issuedAt=NOW - 311), {}, "token_expired"),
        (shared_token(issuedAt=NOW + 11), {}, "token_not_yet_valid"),
        (shared_token(bodySha256=sha256_of({"a": 1})), {"fields": {"a": 2}}, "token_body_changed"),
        (shared_token(bodySha256=sha256_of({})), {"fields": {"a": 0.5}}, "token_body_changed"),
    ],
)
async def test_each_refusal_has_its_own_code_and_its_line(
    tmp_path: Path, token: Any, asked: dict[str, Any], expected: str
) -> None:
    gate = await opened(tmp_path, key_path=key_file(tmp_path))
    assert await code(gate, call(token, **asked)) == expected
    assert lines(tmp_path)[-1]["event"] == "refused" and lines(tmp_path)[-1]["code"] == expected
    assert "token" not in lines(tmp_path)[-1], "an unspent token is no reader's"


async def test_without_a_good_token_nothing_is_looked_up(tmp_path: Path) -> None:
    """What a call does besides is found on disk, which is not searched without a token."""
    gate = await opened(tmp_path, key_path=key_file(tmp_path))
    looked: list[str] = []
    for token in (
        None,
        "x",
        shared_token(modelId="else"),
        shared_token(issuedAt=0),
        {**shared_token(), "signature": "0" * 64},
    ):
        assert await code(gate, call(token, looked=looked)) != ""
    assert looked == []
    assert await code(gate, call(shared_token(), looked=looked)) == "" and looked == ["looked"]


async def test_a_refused_token_is_not_used_up(tmp_path: Path) -> None:
    gate = await opened(tmp_path, key_path=key_file(tmp_path))
    token = shared_token(bodySha256=sha256_of({"a": 1}))
    assert await code(gate, call(token, fields={"a": 2})) == "token_body_changed"
    assert await code(gate, call(token, fields={"a": 1})) == ""


@pytest.mark.parametrize("age_s", [310, -10])
async def test_the_window_ends_with_the_stated_skew(tmp_path: Path, age_s: int) -> None:
    gate = await opened(tmp_path, key_path=key_file(tmp_path))
    assert await code(gate, call(shared_token(issuedAt=NOW - age_s))) == ""


async def test_body_hashes_can_be_required_of_the_shared_key(tmp_path: Path) -> None:
    gate = await opened(tmp_path, key_path=key_file(tmp_path), require_body_hash=True)
    assert await code(gate, call(shared_token())) == "token_body_unbound"


# --- signers ----------------------------------------------------------------------------------------------------------


async def test_two_of_three_signers_permit_what_needs_two(tmp_path: Path) -> None:
    gate = await opened(tmp_path, **GROUP, **TWO)
    assert await code(gate, call(signed_token("alice"))) == "token_too_few_signers"
    assert await code(gate, call(signed_token("bob", "carol"))) == ""
    assert await code(gate, call(signed_token("alice", modelId="else"), model="else")) == ""


async def test_signers_of_a_group_alone_count(tmp_path: Path) -> None:
    rules = {"rules": [{"group": "operators", "signers_min": 2}], "signer_groups": {"operators": ["alice", "carol"]}}
    gate = await opened(tmp_path, signers=PUBLIC, **rules)
    assert await code(gate, call(signed_token("alice", "bob"))) == "token_too_few_signers"
    assert await code(gate, call(signed_token("alice", "carol"))) == ""


async def test_rules_follow_the_model_whatever_it_is_called(tmp_path: Path) -> None:
    """An alias, a model that has to leave, a download before a load, and what may concern every model."""
    rules = [{"models": ["prod-*"], "signers_min": 2}]
    gate = await opened(tmp_path, **GROUP, rules=rules)
    alone = [
        call(signed_token("alice", modelId="llama"), model="llama"),
        call(signed_token("alice"), also=(Done("model-unload", frozenset({"prod-a"})),)),
        call(signed_token("alice", modelId=None, operation="cache-flush"), model=None, operation="cache-flush"),
    ]
    assert [await code(gate, one) for one in alone] == ["token_too_few_signers"] * 3
    assert await code(gate, call(signed_token("alice", "bob", modelId="llama"), model="llama")) == ""


async def test_a_signature_proves_only_its_own_signer(tmp_path: Path) -> None:
    gate = await opened(tmp_path, **GROUP, **TWO)
    good = signed_token("alice", "bob")
    first, second = good["signatures"]
    twice = {**good, "signatures": [first, first]}
    swapped = {**good, "signatures": [first, {**second, "sig": first["sig"]}]}
    stranger = {**good, "signatures": [first, {**second, "signer": "mallory"}]}
    unnamed = {**good, "signatures": [first, {**second, "signer": "carol"}]}
    found = [await code(gate, call(token)) for token in (twice, swapped, stranger, unnamed)]
    assert found == ["token_signer_repeated", "token_bad_signature", "token_unknown_signer", "token_unknown_signer"]
    unbound = signing.by_signer(op_token(signers=["alice"]), "alice", PRIVATE["alice"])
    assert await code(gate, call(unbound)) == "token_body_unbound"


async def test_the_shared_key_speaks_for_no_signer_with_a_key(tmp_path: Path) -> None:
    gate = await opened(tmp_path, key_path=key_file(tmp_path), signers={"alice": PUBLIC["alice"], "admin1": None})
    assert await code(gate, call(shared_token(signers=["alice"]))) == "token_unknown_signer"
    assert await code(gate, call(shared_token(signers=["mallory"]))) == "token_unknown_signer"
    assert await code(gate, call(shared_token(signers=["admin1"]))) == ""


# --- JWT --------------------------------------------------------------------------------------------------------------


def a_jwt(key: Any, algorithm: str | None, headers: dict[str, Any] | None = None, **changed: Any) -> str:
    return jwt.encode(op_token(**changed), key, algorithm=algorithm, headers=headers)


async def test_a_jwt_is_signed_by_the_key_that_kid_or_iss_names(tmp_path: Path) -> None:
    signers = {"alice": PUBLIC["alice"], "bob": PUBLIC["bob"], "admin1": None}
    gate = await opened(tmp_path, key_path=key_file(tmp_path), signers=signers)
    body = {"bodySha256": sha256_of({})}
    bound, bobs = {"signers": ["alice"], **body}, {"signers": ["bob"], **body}
    assert await code(gate, call(a_jwt(SHARED, "HS256"))) == ""
    assert await code(gate, call(a_jwt(SHARED, "HS256", {"kid": "admin1"}))) == ""
    assert await code(gate, call(a_jwt(SHARED, "HS256", iss="admin1"))) == ""
    assert await code(gate, call(a_jwt(PRIVATE["alice"], "EdDSA", {"kid": "alice"}, **bound))) == ""
    assert await code(gate, call(a_jwt(PRIVATE["bob"], "EdDSA", {"kid": "bob"}, **bobs))) == ""
    assert await code(gate, call(a_jwt(PRIVATE["bob"], "EdDSA", iss="bob", **bobs))) == ""
    assert await code(gate, call(a_jwt(PRIVATE["bob"], "EdDSA", {"kid": "bob"}, iss="alice", **bobs))) == (
        "token_malformed"
    )
    assert await code(gate, call(a_jwt(PRIVATE["alice"], "EdDSA", iss="alice", **bobs))) == "token_malformed"
    assert await code(gate, call(a_jwt(SHARED, "HS256", {"kid": "mallory"}, signers=["mallory"]))) == (
        "token_unknown_signer"
    )
    # `exp` and `nbf` are compared with the real clock.
    assert await code(gate, call(a_jwt(SHARED, "HS256", exp=NOW))) == "token_expired"
    assert await code(gate, call(a_jwt(SHARED, "HS256", nbf=2**40))) == "token_not_yet_valid"


async def test_a_jwt_names_several_signers_as_the_other_forms_do(tmp_path: Path) -> None:
    """The shared key speaks for all of them that have no key; a signer's own key only for that signer."""
    signers = {**PUBLIC, "admin1": None, "admin2": None, "admin3": None}
    rules = {"rules": [{"signers_min": 2}]}
    gate = await opened(tmp_path, key_path=key_file(tmp_path), signers=signers, **rules)
    admins = ["admin1", "admin2", "admin3"]
    assert await code(gate, call(a_jwt(SHARED, "HS256", signers=admins))) == ""
    assert await code(gate, call(a_jwt(SHARED, "HS256", {"kid": "admin2"}, signers=admins))) == ""
    assert await code(gate, call(a_jwt(SHARED, "HS256", signers=["admin1"]))) == "token_too_few_signers"
    assert await code(gate, call(a_jwt(SHARED, "HS256", signers=["admin1", "alice"]))) == "token_unknown_signer"
    assert await code(gate, call(a_jwt(SHARED, "HS256", signers=["admin1", "admin1"]))) == "token_signer_repeated"
    both = {"signers": ["alice", "bob"], "bodySha256": sha256_of({})}
    assert await code(gate, call(a_jwt(PRIVATE["alice"], "EdDSA", {"kid": "alice"}, **both))) == "token_too_few_signers"


async def test_the_key_decides_the_algorithm(tmp_path: Path) -> None:
    """What once broke JWT libraries: no algorithm, a public key as a secret, keys that the token brings itself."""
    gate = await opened(tmp_path, key_path=key_file(tmp_path), signers={"alice": PUBLIC["alice"], "admin1": None})
    bound = {"signers": ["alice"], "bodySha256": sha256_of({})}
    raw_public = bytes.fromhex(PUBLIC["alice"])
    bad = [
        a_jwt(None, "none"),
        a_jwt(None, "none", {"kid": "alice"}, **bound),
        a_jwt(SHARED, "HS512"),
        a_jwt(raw_public, "HS256", {"kid": "alice"}, **bound),
        a_jwt(PUBLIC["alice"].encode(), "HS256", {"kid": "alice"}, **bound),
        a_jwt(SHARED, "HS256", {"kid": "alice"}, **bound),
        a_jwt(PRIVATE["alice"], "EdDSA"),
        a_jwt(PRIVATE["bob"], "EdDSA", {"kid": "alice"}, **bound),
    ]
    assert {await code(gate, call(token)) for token in bad} == {"token_bad_signature"}
    brought = a_jwt(SHARED, "HS256", {"jku": "http://127.0.0.1/keys"})
    assert await code(gate, call(brought)) == "token_malformed"
    assert await code(gate, call(a_jwt(SHARED, "HS256", {"kid": "../../dev/null"}))) == "token_malformed"


# --- mutations --------------------------------------------------------------------------------------------------------


def flipped(data: bytes) -> list[bytes]:
    return [bytes([*data[:at], data[at] ^ (1 << bit), *data[at + 1 :]]) for at in range(len(data)) for bit in range(8)]


@pytest.mark.slow
async def test_no_token_with_a_flipped_bit_is_accepted(tmp_path: Path) -> None:
    """All bits of every form, none of which was used before."""
    gate = await opened(tmp_path, key_path=key_file(tmp_path), signers={**PUBLIC, "admin1": None})
    shared, signed = shared_token(), signed_token("alice", "bob")
    objects = [one for token in (shared, signed) for one in flipped(json.dumps(token).encode())]
    texts = [
        one for token in (as_text(shared), as_text(signed), a_jwt(SHARED, "HS256")) for one in flipped(token.encode())
    ]
    tried: list[Any] = [text.decode("latin-1") for text in texts]
    for data in objects:
        try:
            tried.append(json.loads(data))
        except ValueError:
            continue
    assert len(objects) + len(texts) > 10_000
    checked = [one for one in tried if one not in (shared, signed)]
    for token in checked:
        with pytest.raises(GreenroomError):
            gate.checked(call(token))
    assert len(checked) > 8_000


@pytest.mark.parametrize("change", [lambda t: t + "=", lambda t: t + "A", lambda t: " " + t, lambda t: t + "\n"])
async def test_other_writings_of_the_same_token_are_refused(tmp_path: Path, change: Any) -> None:
    gate = await opened(tmp_path, key_path=key_file(tmp_path))
    for text in (as_text(shared_token()), a_jwt(SHARED, "HS256")):
        assert await code(gate, call(change(text))) in ("token_malformed", "token_bad_signature")


# --- what must be on disk ---------------------------------------------------------------------------------------------


async def test_of_many_calls_with_one_token_one_is_permitted(tmp_path: Path) -> None:
    gate = await opened(tmp_path, key_path=key_file(tmp_path))
    token = shared_token()
    found = await asyncio.gather(*(code(gate, call(token)) for _ in range(50)))
    assert sorted(found) == ["", *["token_replayed"] * 49]


async def test_a_used_token_stays_used_over_a_restart(tmp_path: Path) -> None:
    token = shared_token()
    first = await opened(tmp_path, key_path=key_file(tmp_path))
    assert await code(first, call(token)) == ""
    await first.close()
    second = await opened(tmp_path, key_path=key_file(tmp_path))
    assert await code(second, call(token)) == "token_replayed"
    assert await code(second, call(shared_token())) == ""


@pytest.mark.parametrize("left", [None, b"", b"rubbish\n", b"greenroom nonces 1 after 0\n1 zz\n"])
async def test_without_its_journal_tokens_from_before_are_refused(tmp_path: Path, left: bytes | None) -> None:
    (await opened(tmp_path, key_path=key_file(tmp_path))).keys = None
    journal = tmp_path / "nonces"
    journal.write_bytes(left or b"")
    folder = tmp_path / "again"
    folder.mkdir()
    (folder / "nonces").write_bytes(left or b"")
    gate = await opened(folder, key_path=key_file(tmp_path))
    assert await code(gate, call(shared_token(issuedAt=NOW + 10))) == "token_issued_before_start"
    later = await opened(tmp_path / "later", clock=lambda: NOW + 20, key_path=key_file(tmp_path))
    assert await code(later, call(shared_token(issuedAt=NOW + 11))) == ""


async def test_a_clock_that_is_set_back_lets_no_token_be_used_again(tmp_path: Path) -> None:
    now = [float(NOW)]
    token = shared_token()
    gate = await opened(tmp_path, clock=lambda: now[0], key_path=key_file(tmp_path))
    assert await code(gate, call(token)) == ""
    now[0] = NOW + 200_000
    assert await code(gate, call(shared_token(issuedAt=NOW + 200_000))) == ""
    now[0] = NOW
    assert await code(gate, call(token)) in ("token_replayed", "token_issued_before_start")


KILLED = """
import asyncio, os, signal, sys, json
from pathlib import Path
from tests.features.governance.token_rig import call, in_place, opened

async def run(work, name):
    if name == "write audit log":
        os.kill(os.getpid(), signal.SIGKILL)
    work()

async def main():
    folder = Path(sys.argv[1])
    gate = await opened(folder, run=run, key_path=str(folder / "model-api.key"))
    await gate.permit(call(json.loads(sys.argv[2])))
    print("acted")

asyncio.run(main())
"""


async def test_a_kill_between_consuming_and_acting_leaves_it_used(tmp_path: Path) -> None:
    token, key = shared_token(), key_file(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), json.dumps(token)], capture_output=True, timeout=60
    )
    assert ran.returncode == -signal.SIGKILL and b"acted" not in ran.stdout
    gate = await opened(tmp_path, key_path=key)
    assert await code(gate, call(token)) == "token_replayed"


async def test_a_full_disk_permits_nothing(tmp_path: Path) -> None:
    gate = await opened(tmp_path, key_path=key_file(tmp_path))
    token = shared_token()
    with full_disk(), pytest.raises(NoncesUnavailable):
        await gate.permit(call(token))
    # It was not used, but it might have been on disk.
    assert await code(gate, call(token)) == "token_replayed"
    size = (tmp_path / "audit.jsonl").stat().st_size
    with full_disk(size), pytest.raises(AuditUnavailable):
        await gate.permit(call(shared_token()))
    assert (tmp_path / "audit.jsonl").stat().st_size == size
    assert await code(gate, call(shared_token())) == ""
    assert verify(tmp_path / "audit.jsonl").problem is None


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "mode", "expected"),
    [
        (SHARED, 0o644, "other users"),
        (SHARED, 0o620, "other users"),
        (b"", 0o600, "is empty"),
        (b" \n", 0o600, "is empty"),
        (b"short", 0o600, "holds only 5 bytes"),
        (b"-----BEGIN PUBLIC KEY-----\n" + b"A" * 60, 0o600, "PEM"),
        (b"x" * 5_000, 0o600, "no key"),
    ],
)
async def test_unusable_key_files_are_told_without_their_content(
    tmp_path: Path, data: bytes, mode: int, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as refused:
        await opened(tmp_path, key_path=key_file(tmp_path, data, mode))
    assert "xxxx" not in refused.value.message and SHARED.decode() not in refused.value.message


async def test_a_missing_key_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        await opened(tmp_path, key_path=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"/etc/safebox/model-api\.key"):
        await opened(tmp_path, enabled=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="plain file"):
        await opened(tmp_path, key_path=str(tmp_path / "pipe"))
