"""What the configuration of signed operations comes to, for `greenroom check`: keys by their ids, signers, quorums.

Reads the key files and nothing else. Shows ids of keys, never keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from greenroom.config.sections.governance import Governance
from greenroom.errors import ConfigError
from greenroom.tenancy.governance.keyset import SHARED, load_keys


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
        yield f"  everything else: 1 of {', '.join(self._anyone()) or 'any names'}"

    def _anyone(self) -> list[str]:
        return [key["signer"] for key in self.keys if key["signer"] is not None]


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
