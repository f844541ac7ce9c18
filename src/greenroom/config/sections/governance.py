"""The options of signed operations: which keys sign, how many signers an operation needs, how long a token lives."""

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints

from greenroom.config.kinds import HEX_64, Name, NotBool, Section, StoreAddress
from greenroom.config.marks import FILE, RESTART, Example, Variable
from greenroom.config.reader import Problem

Operation = Literal[
    "model-load",
    "model-unload",
    "cache-flush",
    "model-update",
    "model-download",
    "model-delete",
    "config-reload",
]
# Where runners of this API look for the shared key.
DEFAULT_KEY_PATH: Final = "/etc/safebox/model-api.key"
SIGNERS_MAX: Final = 64
PublicKey = Annotated[str, StringConstraints(pattern=HEX_64)]


class Quorum(Section):
    """How many signers some operations need. All rules that fit an operation must be satisfied."""

    operations: tuple[Operation, ...] = ()
    """The operations it is for; all when not given."""
    models: tuple[Name, ...] = ("*",)
    """Patterns of names of models and repositories, with * and ?; letter case does not count. An operation that names
    no model, such as a flush of everything, needs what the strictest of its rules asks for."""
    group: Name | None = None
    """Only signers of this group count; all known signers when not given."""
    signers_min: Annotated[int, Field(ge=1, le=SIGNERS_MAX), NotBool] = 1
    """So many different signers."""


class Governance(Section):
    """Signed operations: what loads, unloads, flushes, downloads, deletes or reloads needs a token beside the key."""

    enabled: bool | None = None
    """Whether tokens are needed; when not given, if there is a key_path or a signer."""
    key_path: Annotated[
        str | None,
        FILE,
        Example("/etc/safebox/model-api.key"),
        Variable(
            "VERIFIED_OP_TOKEN_KEY_PATH",
            "The file with the shared key of tokens; signed operations are on if it is set.",
        ),
    ] = None
    """A file with the shared key of tokens by HMAC-SHA256, at least 32 bytes, closed to other users. When neither this
    nor signers is given it is /etc/safebox/model-api.key."""
    signers: Annotated[
        dict[Name, PublicKey | None], Example({"alice": "0123456789abcdef" * 4, "bob": "fedcba9876543210" * 4})
    ] = {}
    """Signers by name with their Ed25519 public keys in hex (`greenroom token keygen`). One without a key may be named
    by tokens of the shared key; where there are no signers, those may name anyone."""
    signer_groups: Annotated[dict[Name, tuple[Name, ...]], Example({"operators": ["alice", "bob"]})] = {}
    """Named sets of signers, for rules."""
    rules: tuple[Quorum, ...] = ()
    """How many signers operations need; one where no rule fits."""
    window_s: Annotated[float, Field(ge=1, le=86_400), NotBool] = 300
    """How long a token may be used after it was issued."""
    clock_skew_s: Annotated[float, Field(ge=0, le=300), NotBool, RESTART] = 10
    """How far clocks of signers and gateways may differ; a token may be so much older, or from so far ahead."""
    require_body_hash: bool = False
    """Refuse tokens of the shared key without bodySha256 too; those by Ed25519 always need it."""
    store: Annotated[StoreAddress | None, RESTART] = None
    """redis://… where gateways share which tokens were used; leases.store when not given, else a file in state_dir."""
    audit_path: Annotated[str | None, RESTART, FILE, Example("/var/log/greenroom/audit.jsonl")] = None
    """The audit log; governance/audit.jsonl in state_dir when not given."""

    @property
    def is_on(self) -> bool:
        has_keys = self.key_path is not None or bool(self.signers)
        return has_keys if self.enabled is None else self.enabled

    @property
    def shared_key_path(self) -> str | None:
        """The file of the shared key; None where only Ed25519 counts."""
        has_public = any(key is not None for key in self.signers.values())
        return self.key_path or (None if has_public else DEFAULT_KEY_PATH)

    def _problems(self) -> Iterator[Problem]:
        for name, key in self.signers.items():
            if key is not None and _has_small_order(key):
                yield Problem(
                    ("signers", name), "is no key: anyone could sign for it. `greenroom token keygen` makes one"
                )
        if len(self.signers) > SIGNERS_MAX:
            yield Problem(("signers",), f"may be at most {SIGNERS_MAX}")
        owner_of: dict[str, str] = {}
        for name, key in self.signers.items():
            if key is not None and owner_of.setdefault(key, name) != name:
                yield Problem(("signers", name), f"has the key of {owner_of[key]}: one signer would count twice")
        for name, members in self.signer_groups.items():
            for position, member in enumerate(members):
                if member not in self.signers:
                    yield Problem(("signer_groups", name, position), f"{member} is not one of signers")
                elif member in members[:position]:
                    yield Problem(("signer_groups", name, position), f"{member} is named twice")
        for position, rule in enumerate(self.rules):
            yield from (
                Problem(("rules", position, *problem.where), problem.message) for problem in _of_rule(self, rule)
            )


def _of_rule(section: Governance, rule: Quorum) -> Iterator[Problem]:
    if rule.group is not None and rule.group not in section.signer_groups:
        yield Problem(("group",), f"{rule.group} is not one of signer_groups")
        return
    known = _known(section, rule)
    # Without signers, tokens of the shared key may name anyone.
    if section.signers and len(known) < rule.signers_min:
        yield Problem(("signers_min",), f"is {rule.signers_min}, and there are only {len(known)} signers")
    elif section.signers and (most := max(_by_own_keys(section, known), _by_shared_key(section, known))) < (
        rule.signers_min
    ):
        yield Problem(
            ("signers_min",),
            f"is {rule.signers_min}, and no token can prove more than {most} of {', '.join(known)}: it is signed by "
            "signers' own keys or by the shared key, never by both. Give each of them a key",
        )


def _known(section: Governance, rule: Quorum) -> tuple[str, ...]:
    """The signers that count for this rule."""
    return tuple(section.signers) if rule.group is None else section.signer_groups[rule.group]


def _by_own_keys(section: Governance, known: tuple[str, ...]) -> int:
    return sum(section.signers[name] is not None for name in known)


def _by_shared_key(section: Governance, known: tuple[str, ...]) -> int:
    """How many of them a token of the shared key may name."""
    return 0 if section.shared_key_path is None else len(known) - _by_own_keys(section, known)


def quorum_warnings(section: Governance) -> Iterator[str]:
    """Rules that do not ask for what their writer may think, one sentence each."""
    if section.rules and not section.is_on:
        yield "governance.rules: nothing is signed, because there is neither key_path nor a signer, or enabled is false"
        return
    for position, rule in enumerate(section.rules):
        known = _known(section, rule)
        if rule.signers_min > 1 and (not section.signers or _by_shared_key(section, known) >= rule.signers_min):
            yield (
                f"governance.rules.{position}: {rule.signers_min} signers are asked for, and whoever holds the shared "
                "key can name them alone: HMAC proves no quorum. Give signers keys of their own (`greenroom token "
                "keygen`)"
            )


# The order of the field of Curve25519, and the y of points of order 8. Signatures by a point of small order can be made
# by anyone; 64 zeros, as in a template that was not filled in, are such a point.
_FIELD: Final = 2**255 - 19
_ORDER_8: Final = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7


def _has_small_order(key: str) -> bool:
    y = (int.from_bytes(bytes.fromhex(key), "little") & (2**255 - 1)) % _FIELD
    return y in (0, 1, _FIELD - 1, _ORDER_8, _FIELD - _ORDER_8)
