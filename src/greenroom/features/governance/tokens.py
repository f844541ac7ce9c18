"""What a token says, and the forms in which it is presented.

Owns the fields of `opToken`, the three forms (shared key, Ed25519 signatures, JWT) and how strictly they are read: each
token has one way to be written as text, and no field is ignored. Proves nothing: `keyset.py` does.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from greenroom.config.sections.governance import SIGNERS_MAX
from greenroom.errors import TokenMalformed, TokenSignerRepeated
from greenroom.features.governance.canonical_json import NUMBER_MAX, NotCanonical, canonical, read

# The field of a body, and the header of calls without one.
FIELD: Final = "verifiedOpToken"
HEADER: Final = "x-verified-op-token"
TEXT_CHARS_MAX: Final = 16 * 1024
NONCE_CHARS_MAX: Final = 256
NAME_CHARS_MAX: Final = 256
MODEL_CHARS_MAX: Final = 4_096
_REQUIRED: Final = frozenset({"operation", "modelId", "issuedAt", "signers", "nonce"})
_OPTIONAL: Final = frozenset({"bodySha256"})
# Claims of a JWT that are honoured beside the fields.
_CLAIMS: Final = frozenset({"exp", "nbf", "iat", "iss"})
_HEX_32: Final = re.compile(r"[0-9a-f]{64}")
_HEX_64: Final = re.compile(r"[0-9a-f]{128}")
_BASE64URL: Final = re.compile(r"[A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class OpToken:
    operation: str
    model: str | None
    """As the body names it; None where it names none."""
    issued_at: int
    signers: tuple[str, ...]
    nonce: str
    body_sha256: str | None


@dataclass(frozen=True, slots=True)
class BySharedKey:
    """HMAC-SHA256 of the canonical form of `opToken`."""

    signed: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class BySigners:
    """Ed25519 signatures of the canonical form of `opToken`, each signer's once."""

    signed: bytes
    signatures: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class ByJwt:
    """A JWT. `signer` is whose key signed it by its `kid` or `iss`; None for the shared key."""

    text: str
    signer: str | None


@dataclass(frozen=True, slots=True)
class Presented:
    token: OpToken
    proof: BySharedKey | BySigners | ByJwt
    value: Any
    """As it came, for the audit log: it is spent when it is written there."""


def read_token(said: Any) -> Presented:
    """The token in a field or header: an object, its canonical JSON in base64url, or a JWT. Raises TokenRefused."""
    try:
        if isinstance(said, dict):
            return _of_object(said)
        if not isinstance(said, str) or len(said) > TEXT_CHARS_MAX:
            raise _malformed(f"it must be an object, or a text of at most {TEXT_CHARS_MAX:,} characters")
        return _of_jwt(said) if "." in said else _of_object(_of_text(said))
    except NotCanonical as error:
        raise _malformed(str(error)) from None


def as_text(value: Mapping[str, Any]) -> str:
    """A token as text for a header: its canonical JSON in base64url without padding."""
    return base64.urlsafe_b64encode(canonical(value)).rstrip(b"=").decode("ascii")


def unsigned(
    operation: str, model: str | None, issued_at: int, signers: tuple[str, ...], nonce: str, body_sha256: str | None
) -> dict[str, Any]:
    """The object `opToken`. Raises TokenRefused if it could not be read again."""
    fields = {
        "operation": operation,
        "modelId": model,
        "issuedAt": issued_at,
        "signers": list(signers),
        "nonce": nonce,
        **({} if body_sha256 is None else {"bodySha256": body_sha256}),
    }
    _op_token(fields)
    return fields


# --- the three forms ------------------------------------------------------------------------------------------------


def _of_object(value: dict[str, Any]) -> Presented:
    if len(canonical(value)) > TEXT_CHARS_MAX:
        raise _malformed(f"it is longer than {TEXT_CHARS_MAX:,} bytes")
    if value.keys() == {"opToken", "signature"}:
        signature = _hex(value["signature"], _HEX_32, "signature")
        return Presented(_op_token(value["opToken"]), BySharedKey(canonical(value["opToken"]), signature), value)
    if value.keys() == {"opToken", "signatures"}:
        token = _op_token(value["opToken"])
        return Presented(token, BySigners(canonical(value["opToken"]), _signatures(value["signatures"])), value)
    raise _malformed("its fields must be opToken and signature, or opToken and signatures")


def _of_text(said: str) -> dict[str, Any]:
    decoded = _from_base64url(said)
    value = read(decoded)
    if not isinstance(value, dict) or canonical(value) != decoded:
        raise _malformed("the text must be the canonical JSON of an object")
    return value


def _of_jwt(said: str) -> Presented:
    parts = said.split(".")
    if len(parts) != 3:
        raise _malformed("a JWT has three parts")
    head, claims, _ = (_from_base64url(part) for part in parts)
    header, fields = read(head), read(claims)
    if not isinstance(header, dict) or not isinstance(fields, dict):
        raise _malformed("the parts of a JWT must be objects")
    # Whatever else a header names (keys, addresses of keys, critical words) would have to be obeyed.
    if not header.keys() <= {"alg", "typ", "kid"}:
        raise _malformed("a JWT's header may hold alg, typ and kid")
    token = _op_token({key: value for key, value in fields.items() if key not in _CLAIMS})
    named = [one for one in (header.get("kid"), fields.get("iss")) if one is not None]
    if any(one not in token.signers for one in named) or named[1:] not in ([], named[:1]):
        raise _malformed("kid and iss must name one of the signers, and the same one")
    signer = named[0] if named else None
    return Presented(token, ByJwt(said, signer), said)


# --- fields ---------------------------------------------------------------------------------------------------------


def _op_token(fields: Any) -> OpToken:
    if not isinstance(fields, dict) or not _REQUIRED <= fields.keys() <= _REQUIRED | _OPTIONAL:
        raise _malformed("opToken must hold operation, modelId, issuedAt, signers and nonce, and may hold bodySha256")
    model, issued_at, body = fields["modelId"], fields["issuedAt"], fields.get("bodySha256")
    if not isinstance(issued_at, int) or isinstance(issued_at, bool) or not 0 <= issued_at <= NUMBER_MAX:
        raise _malformed("issuedAt must be whole seconds since 1970")
    if "bodySha256" in fields:
        _hex(body, _HEX_32, "bodySha256")
    return OpToken(
        operation=_name(fields["operation"], "operation"),
        model=None if model is None else _name(model, "modelId", MODEL_CHARS_MAX),
        issued_at=issued_at,
        signers=_signers(fields["signers"]),
        nonce=_name(fields["nonce"], "nonce", NONCE_CHARS_MAX),
        body_sha256=body,
    )


def _signers(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= SIGNERS_MAX:
        raise _malformed(f"signers must be a list of 1 to {SIGNERS_MAX} names")
    return _each_once([_name(one, "signers") for one in value])


def _signatures(value: Any) -> tuple[tuple[str, bytes], ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= SIGNERS_MAX:
        raise _malformed(f"signatures must be a list of 1 to {SIGNERS_MAX}")
    if not all(isinstance(one, dict) and one.keys() == {"signer", "sig"} for one in value):
        raise _malformed("each of signatures must hold signer and sig")
    found = [(_name(one["signer"], "signer"), _hex(one["sig"], _HEX_64, "sig")) for one in value]
    _each_once([name for name, _ in found])
    return tuple(found)


def _each_once(names: list[str]) -> tuple[str, ...]:
    if len(set(names)) != len(names):
        raise TokenSignerRepeated("The token names a signer twice; each counts once.")
    return tuple(names)


def _name(value: Any, what: str, chars_max: int = NAME_CHARS_MAX) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= chars_max:
        raise _malformed(f"{what} must be a text of 1 to {chars_max} characters")
    return value


def _hex(value: Any, pattern: re.Pattern[str], what: str) -> bytes:
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise _malformed(f"{what} must be {pattern.pattern.partition('{')[2].rstrip('}')} digits of hex, in lower case")
    return bytes.fromhex(value)


def _from_base64url(text: str) -> bytes:
    """Strict: no padding, no other characters, and no bits that decode to nothing."""
    try:
        if _BASE64URL.fullmatch(text) is None:
            raise _malformed("it has characters that are not of base64url without padding")
        decoded = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        raise _malformed("it is not base64url") from None
    if base64.urlsafe_b64encode(decoded).rstrip(b"=").decode("ascii") != text:
        raise _malformed("it is not the one way to write these bytes in base64url")
    return decoded


def _malformed(why: str) -> TokenMalformed:
    return TokenMalformed(f"The token cannot be read: {why}.")
