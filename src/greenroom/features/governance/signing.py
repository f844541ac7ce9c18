"""Makes tokens: new keys, signatures by the shared key or a signer's own, and further signatures on a token. Owns the
files of private keys. Used by `greenroom token`, never by the gateway, which holds no private key."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from greenroom.errors import ConfigError, TokenMalformed
from greenroom.features.governance.canonical_json import canonical, sha256_of
from greenroom.features.governance.keyset import read_key_file, read_shared_key, require_packages
from greenroom.features.governance.tokens import BySigners, as_text, read_token, unsigned

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

NONCE_BYTES: Final = 16


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def new_shared_key(path: str) -> None:
    """Write a fresh shared key to a new file that only its owner can read. Raises OSError."""
    _write_new(path, secrets.token_hex(32).encode("ascii") + b"\n")


def new_private_key(path: str) -> str:
    """Write a fresh private key (PEM) to such a file, and return its public key in hex. Raises OSError, ConfigError."""
    require_packages()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate()
    _write_new(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return public_of(key)


def read_private_key(path: str) -> Ed25519PrivateKey:
    """Raises ConfigError, which never shows any of the file."""
    require_packages()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = read_key_file(path, "the key")
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{path} is no private key in PEM without a password") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is a key of another kind; tokens are signed by Ed25519")
    return key


def is_private_key(path: str) -> bool:
    """Whether the file holds a signer's own key; else it is a shared one. Raises ConfigError."""
    return read_key_file(path, "the key").lstrip().startswith(b"-----BEGIN")


def signer(path: str, name: str) -> Callable[[str, str | None, Mapping[str, Any]], str]:
    """Signs one call after the other, as this signer, with the key in this file: their own or the shared one. Takes the
    operation, its model and the fields of body and query; gives the token for the header. Raises ConfigError."""
    own, shared = (read_private_key(path), b"") if is_private_key(path) else (None, read_shared_key(path))

    def sign(operation: str, model: str | None, fields: Mapping[str, Any]) -> str:
        body = sha256_of(dict(fields))
        op_token = unsigned(operation, model, int(time.time()), (name,), new_nonce(), body)
        return as_text(by_shared_key(op_token, shared) if own is None else by_signer(op_token, name, own))

    return sign


def public_of(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def by_shared_key(op_token: Mapping[str, Any], key: bytes) -> dict[str, Any]:
    signature = hmac.new(key, canonical(dict(op_token)), hashlib.sha256).hexdigest()
    return {"opToken": dict(op_token), "signature": signature}


def by_signer(op_token: Mapping[str, Any], signer: str, key: Ed25519PrivateKey) -> dict[str, Any]:
    return {"opToken": dict(op_token), "signatures": [_signed(op_token, signer, key)]}


def cosigned(token: Mapping[str, Any], signer: str, key: Ed25519PrivateKey) -> dict[str, Any]:
    """The token with one more signature. Raises TokenRefused if it is not by signers, or does not name this one."""
    presented = read_token(dict(token))
    if not isinstance(presented.proof, BySigners):
        raise TokenMalformed("Only a token with `signatures`, by Ed25519, can have several.")
    if signer not in presented.token.signers:
        raise TokenMalformed(
            f"The token does not name {signer} among its signers, and they are signed: make a new one."
        )
    op_token = token["opToken"]
    others = [one for one in token["signatures"] if one["signer"] != signer]
    return {"opToken": op_token, "signatures": [*others, _signed(op_token, signer, key)]}


def _signed(op_token: Mapping[str, Any], signer: str, key: Ed25519PrivateKey) -> dict[str, str]:
    return {"signer": signer, "sig": key.sign(canonical(dict(op_token))).hex()}


def _write_new(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
