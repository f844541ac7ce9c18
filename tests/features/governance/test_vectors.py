"""The test vectors of docs/governance.md are what this implementation makes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from greenroom.features.governance import signing
from greenroom.features.governance.canonical_json import canonical, sha256_of
from greenroom.features.governance.tokens import as_text
from tests.features.governance.token_rig import PRIVATE, PUBLIC, SHARED

GUIDE = Path(__file__).parents[3] / "docs" / "governance.md"
BODY = {"modelId": "org/model", "evictModel": "old", "maxContextLength": 32768}
FIELDS = {"operation": "model-load", "modelId": "org/model", "issuedAt": 1745880000, "nonce": "abc123"}


def vectors() -> str:
    """The lines of the guide."""
    plain = FIELDS | {"signers": ["admin1", "admin2"]}
    bound = FIELDS | {"signers": ["alice", "bob"], "bodySha256": sha256_of(BODY)}
    shared = signing.by_shared_key(plain, SHARED)
    signed = signing.cosigned(signing.by_signer(bound, "alice", PRIVATE["alice"]), "bob", PRIVATE["bob"])
    rows = [
        ("an empty body's bodySha256", sha256_of({})),
        (f"bodySha256 of {json.dumps(BODY)}", sha256_of(BODY)),
        ("opToken of the shared key, canonical", canonical(plain).decode()),
        ("its signature", shared["signature"]),
        ("the token as text", as_text(shared)),
        ("opToken of the signers, canonical", canonical(bound).decode()),
        ("alice's sig", signed["signatures"][0]["sig"]),
        ("bob's sig", signed["signatures"][1]["sig"]),
    ]
    return "\n".join(f"- {name}:\n  `{value}`" for name, value in rows)


def test_the_vectors_of_the_guide_are_true() -> None:
    assert vectors() in GUIDE.read_text(encoding="utf-8")
    assert re.findall(r"^    (alice|bob): ([0-9a-f]{64})$", GUIDE.read_text(), re.MULTILINE) == [
        (name, PUBLIC[name]) for name in ("alice", "bob")
    ]
