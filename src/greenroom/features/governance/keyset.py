"""The keys that prove tokens: the shared key and the signers' public keys.

Owns how keys are read and how signatures are checked. The key decides the algorithm, never the token: the shared key is
for HMAC-SHA256, a signer's key for Ed25519. Every holder of the shared key can name any signer, so a signer that has a
key of its own is believed only by its own signature. Never shows or logs a key: `greenroom check` shows their ids.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from greenroom.base.plain_file import FileTooLarge, NotPrivate, read_private, why
from greenroom.config.sections.governance import Governance
from greenroom.errors import (
    ConfigError,
    TokenBadSignature,
    TokenBodyUnbound,
    TokenExpired,
    TokenFromFuture,
    TokenUnknownSigner,
    shown,
)
from greenroom.features.governance.tokens import ByJwt, BySharedKey, BySigners, Presented

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

KEY_BYTES_MIN: Final = 32
KEY_BYTES_MAX: Final = 4_096
SHARED: Final = "shared key"
MISSING: Final = "signed operations need more packages; type: pip install 'greenroom[governance]'"


@dataclass(frozen=True, slots=True, repr=False)
class KeySet:
    """Where the configuration names no signers, the shared key may name anyone."""

    section: Governance
    """What the configuration says."""
    _shared: bytes | None
    _public: Mapping[str, Ed25519PublicKey]

    @property
    def ids(self) -> dict[str, str]:
        """The id of each key, by its signer; that of the shared key by SHARED."""
        shared = {} if self._shared is None else {SHARED: key_id(self._shared)}
        return shared | {name: key_id(key.public_bytes_raw()) for name, key in self._public.items()}

    def proven(self, presented: Presented) -> frozenset[str]:
        """The signers whose approval the token proves. Raises TokenRefused if any signature is wrong."""
        token, proof, skew_s = presented.token, presented.proof, self.section.clock_skew_s
        if isinstance(proof, BySigners):
            return self._by_signers(token.signers, proof, has_body=token.body_sha256 is not None)
        if isinstance(proof, BySharedKey):
            made = hmac.new(self._shared_key(), proof.signed, hashlib.sha256).digest()
            if not hmac.compare_digest(made, proof.signature):
                raise _bad_signature()
        elif proof.signer is not None and proof.signer in self._public:
            _require_body(token.body_sha256 is not None)
            _check_jwt(proof, self._public[proof.signer], "EdDSA", skew_s)
            return frozenset({proof.signer})
        elif proof.signer is not None and self._is_unknown(proof.signer):
            raise _unknown(proof.signer)
        else:
            _check_jwt(proof, self._shared_key(), "HS256", skew_s)
        return self._named(token.signers)

    def _by_signers(self, named: tuple[str, ...], proof: BySigners, *, has_body: bool) -> frozenset[str]:
        from cryptography.exceptions import InvalidSignature

        _require_body(has_body)
        for signer, signature in proof.signatures:
            if (key := self._public.get(signer)) is None:
                raise _unknown(signer)
            if signer not in named:
                raise TokenUnknownSigner(f"{shown(signer)} signed the token, which does not name it among its signers.")
            try:
                key.verify(signature, proof.signed)
            except InvalidSignature:
                raise _bad_signature() from None
        return frozenset(signer for signer, _ in proof.signatures)

    def _named(self, signers: tuple[str, ...]) -> frozenset[str]:
        """Those that a token of the shared key names."""
        for signer in signers:
            if signer in self._public:
                raise TokenUnknownSigner(
                    f"{shown(signer)} has a key of its own, and the shared key cannot speak for it. Sign with that key."
                )
            if self._is_unknown(signer):
                raise _unknown(signer)
        return frozenset(signers)

    def _is_unknown(self, signer: str) -> bool:
        return bool(self.section.signers) and signer not in self.section.signers

    def _shared_key(self) -> bytes:
        if self._shared is None:
            raise TokenBadSignature("There is no shared key here: tokens are signed with the signers' own keys.")
        return self._shared


def key_id(data: bytes) -> str:
    """A short name by which people compare keys; no key of 32 random bytes can be found by it."""
    return hashlib.sha256(b"greenroom key id\n" + data).hexdigest()[:16]


def load_keys(section: Governance) -> KeySet:
    """The keys that the configuration names. Raises ConfigError, with a line for everything that is wrong."""
    path, shared = section.shared_key_path, None
    problems = []
    try:
        require_packages()
    except ConfigError as error:
        problems.append(error.message)
    try:
        shared = None if path is None else read_shared_key(path)
    except ConfigError as error:
        problems.append(error.message)
    if problems:
        raise ConfigError("\n".join(problems))
    public = {name: public_key(text) for name, text in section.signers.items() if text is not None}
    return KeySet(section, shared, public)


def read_shared_key(path: str) -> bytes:
    """The content of a key file without white space around it. Raises ConfigError, which never shows any of it."""
    data = read_key_file(path, "governance.key_path").strip()
    if data.startswith(b"-----BEGIN"):
        raise ConfigError(f"governance.key_path: {path} holds a key in PEM, which is no shared secret")
    if len(data) < KEY_BYTES_MIN:
        said = "is empty" if not data else f"holds only {len(data)} bytes"
        raise ConfigError(
            f"governance.key_path: {path} {said}; a key has at least {KEY_BYTES_MIN}. "
            "`greenroom token keygen --shared FILE` makes one"
        )
    return data


def read_key_file(path: str, what: str) -> bytes:
    """All of a file that holds a secret. Raises ConfigError, also if other users may read or change it."""
    try:
        return read_private(os.path.expanduser(path), KEY_BYTES_MAX)
    except NotPrivate as error:
        raise ConfigError(f"{what}: {path} {error}") from None
    except FileTooLarge:
        raise ConfigError(f"{what}: {path} is larger than {KEY_BYTES_MAX:,} bytes, which is no key") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: {path} cannot be read: {why(error)}") from None


def public_key(text: str) -> Ed25519PublicKey:
    """The key of these 64 digits of hex."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))


def require_packages() -> None:
    try:
        import cryptography
        import jwt
    except ImportError:
        raise ConfigError(f"governance: {MISSING}") from None
    del cryptography, jwt


def _check_jwt(proof: ByJwt, key: bytes | Ed25519PublicKey, algorithm: str, skew_s: float) -> None:
    import jwt

    try:
        # Without the checks of `iat`, which are ours by `issuedAt`; `exp` and `nbf` count where they are given.
        jwt.decode(proof.text, key, algorithms=[algorithm], leeway=skew_s, options={"verify_iat": False})
    except jwt.ExpiredSignatureError:
        raise TokenExpired("The token's `exp` has passed. Sign a new one.") from None
    except jwt.ImmatureSignatureError:
        raise TokenFromFuture("The token's `nbf` has not come yet.") from None
    except (jwt.PyJWTError, OverflowError):
        # Times beyond every clock are no errors of its own to it.
        raise _bad_signature() from None


def _require_body(has_body: bool) -> None:
    if not has_body:
        raise TokenBodyUnbound("A token that is signed by Ed25519 needs bodySha256, the hash of the call's body.")


def _bad_signature() -> TokenBadSignature:
    return TokenBadSignature("The token's signature is not that of a key of this server.")


def _unknown(signer: str) -> TokenUnknownSigner:
    return TokenUnknownSigner(f"{shown(signer)} is not one of the signers that governance.signers names.")


@dataclass(frozen=True, slots=True)
class GovernanceReport:
    """`problems` are why the gateway would not start; there are no ids of keys then."""

    problems: tuple[str, ...]
    keys: tuple[dict[str, Any], ...]
    rules: tuple[dict[str, Any], ...]

    def lines(self) -> Iterator[str]:
        """The same for people."""
        yield f"signed operations: {', '.join(_key(key) for key in self.keys)}"
        for rule in self.rules:
            what = f"{', '.join(rule['operations']) or 'everything'} of {', '.join(rule['models'])}"
            yield f"  {what}: {rule['signers_min']} of {', '.join(rule['signers']) or 'any names'}"
        anyone = [key["signer"] for key in self.keys if key["signer"] is not None]
        yield f"  everything else: 1 of {', '.join(anyone) or 'any names'}"


def report(section: Governance) -> GovernanceReport | None:
    """None while nothing is signed."""
    if not section.is_on:
        return None
    problems: tuple[str, ...] = ()
    ids = dict[str, str]()
    try:
        ids = load_keys(section).ids
    except ConfigError as error:
        problems = tuple(error.message.splitlines())
    return GovernanceReport(problems, tuple(_keys(section, ids)), tuple(_rules(section)))


def _keys(section: Governance, ids: dict[str, str]) -> Iterator[dict[str, Any]]:
    if section.shared_key_path is not None:
        yield {"signer": None, "kind": "hmac", "id": ids.get(SHARED), "path": section.shared_key_path}
    for name, key in section.signers.items():
        yield {"signer": name, "kind": "hmac" if key is None else "ed25519", "id": ids.get(name)}


def _rules(section: Governance) -> Iterator[dict[str, Any]]:
    for rule in section.rules:
        signers = section.signers if rule.group is None else section.signer_groups[rule.group]
        told = {"operations": list(rule.operations), "models": list(rule.models), "group": rule.group}
        yield {**told, "signers_min": rule.signers_min, "signers": list(signers)}


def _key(key: dict[str, Any]) -> str:
    if key["signer"] is None:
        return f"shared key {key['id'] or '?'}"
    return f"{key['signer']} ({'shared key' if key['kind'] == 'hmac' else 'Ed25519 ' + (key['id'] or '?')})"
