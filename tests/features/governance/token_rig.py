"""Keys, tokens and a gate for tests, by a clock that stands still."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from greenroom.config.sections.governance import Governance as Section
from greenroom.features.governance import signing
from greenroom.features.governance.audit import AuditLog
from greenroom.features.governance.canonical_json import sha256_of
from greenroom.features.governance.gate import Done, GovernanceGate, GovernedCall
from greenroom.features.governance.nonces import NonceJournal, Run

NOW = 1_745_880_000
SHARED = b"0123456789abcdef" * 4
SKEW_S = 10
# The secret keys of RFC 8032's first two tests.
PRIVATE = {
    "alice": Ed25519PrivateKey.from_private_bytes(
        bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    ),
    "bob": Ed25519PrivateKey.from_private_bytes(
        bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    ),
    "carol": Ed25519PrivateKey.from_private_bytes(bytes(range(32))),
}
PUBLIC = {name: signing.public_of(key) for name, key in PRIVATE.items()}


def key_file(folder: Path, data: bytes = SHARED, mode: int = 0o600) -> str:
    path = folder / "model-api.key"
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


def op_token(**changed: Any) -> dict[str, Any]:
    fields = {
        "operation": "model-load",
        "modelId": "org/model",
        "issuedAt": NOW,
        "signers": ["admin1"],
        "nonce": signing.new_nonce(),
    }
    return {key: value for key, value in (fields | changed).items() if value is not ...}


def shared_token(**changed: Any) -> dict[str, Any]:
    return signing.by_shared_key(op_token(**changed), SHARED)


def signed_token(*signers: str, body: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    fields = op_token(signers=list(signers), bodySha256=sha256_of(body or {}), **changed)
    token = signing.by_signer(fields, signers[0], PRIVATE[signers[0]])
    for signer in signers[1:]:
        token = signing.cosigned(token, signer, PRIVATE[signer])
    return token


def call(
    token: Any,
    model: str | None = "org/model",
    also: tuple[Done, ...] = (),
    looked: list[str] | None = None,
    **changed: Any,
) -> GovernedCall:
    """`also` is what it does besides. `looked` is told when what it does is looked for."""

    async def found() -> tuple[Done, ...]:
        if looked is not None:
            looked.append("looked")
        names = None if model is None else frozenset({model, *({"prod-llama"} if model == "llama" else ())})
        return (Done(fields["operation"], names), *also)

    about = {"request": "r-1", "route": "POST /v1/models/load", "key": "ops"}
    fields: dict[str, Any] = {"operation": "model-load", "fields": {}, "about": about, **changed}
    return GovernedCall(model=model, token=token, find_done=found, **fields)


async def in_place(work: Callable[[], None], name: str) -> None:
    work()


def aged_journal(folder: Path) -> None:
    """A journal that remembers for long, so that no token is too old for it."""
    (folder / "nonces").write_text("greenroom nonces 1 after 0\n")


async def opened(
    folder: Path, run: Run = in_place, clock: Callable[[], float] = lambda: NOW, fold_s: float = 60, **keys: Any
) -> GovernanceGate:
    folder.mkdir(exist_ok=True)
    if not (folder / "nonces").exists():
        aged_journal(folder)
    section = Section(clock_skew_s=SKEW_S, **keys)
    gate = GovernanceGate(
        lambda: NonceJournal(folder / "nonces", SKEW_S, run),
        AuditLog(folder / "audit.jsonl", run),
        clock,
        fold_s,
    )
    gate.keys = await gate.read(section)
    return gate
