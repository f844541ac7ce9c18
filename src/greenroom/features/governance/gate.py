"""Whether a call may do what it asks for: its token is checked, its quorum, then it is used up and written down.

Owns the order of the checks and the quorum of signers. Nothing has happened when a call is refused, and a call that is
permitted is on disk twice before it begins: its nonce as used, and its line in the audit log. Refusals are written down
too, those that repeat as a number: a caller without a token cannot have the log grow faster than two lines a minute
for each reason there is.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final

from greenroom.config.diff import Changes
from greenroom.config.part import Apply, Part
from greenroom.config.schema import Config
from greenroom.config.sections.governance import Governance as Section
from greenroom.config.sections.governance import Operation, Quorum
from greenroom.errors import (
    AuditUnavailable,
    ConfigError,
    GreenroomError,
    TokenBodyChanged,
    TokenBodyUnbound,
    TokenExpired,
    TokenFromFuture,
    TokenMissing,
    TokenTooFewSigners,
    TokenWrongModel,
    TokenWrongOperation,
    shown,
)
from greenroom.features.governance.audit import AuditLog
from greenroom.features.governance.canonical_json import NotCanonical, sha256_of
from greenroom.features.governance.keyset import KeySet, load_keys
from greenroom.features.governance.nonces import NonceJournal, Nonces
from greenroom.features.governance.tokens import FIELD, HEADER, OpToken, Presented, read_token
from greenroom.runtime.shell import Shell
from greenroom.telemetry.logs import get_logger

# A revision or a quantization of a repository in a pattern: branches, tags and commits are names of one another.
_PART_OF_REPOSITORY: Final = re.compile(r"[@:].*|\[[^\]]*[@:].*", re.DOTALL)
# Refusals that repeat within this time are written down as a number.
FOLD_S: Final = 60.0
FOLDER: Final = "governance"
OFF: Final = Section()

_log = get_logger("app")


@dataclass(frozen=True, slots=True)
class Done:
    """What a call does to one model, by every name that leads to it; `names` is None if it may concern each of them.

    With `is_repository` they are those of a repository of the hub: a rule for a part of that is one for all of it.
    """

    operation: Operation
    names: frozenset[str] | None
    is_repository: bool = False


@dataclass(frozen=True, slots=True)
class GovernedCall:
    """A call that needs a token."""

    operation: Operation
    model: str | None
    """As the caller named it; None where it names none."""
    fields: Mapping[str, Any]
    """Of its body and its query, without the token."""
    token: Any
    """As it came; None if none did."""
    find_done: Callable[[], Awaitable[tuple[Done, ...]]]
    """Finds all that it does, to the named model and to others. Asked once the token is good, because it looks at the
    disk. Raises GreenroomError if that cannot be told."""
    about: Mapping[str, str] = field(default_factory=dict)
    """For the audit log: the request's id, its route, its key's name."""


class GovernanceGate(Part):
    """`keys` are None while no tokens are needed; `section` says them at the start."""

    writes = True

    def __init__(
        self,
        make_nonces: Callable[[], Nonces],
        audit: AuditLog,
        clock: Callable[[], float] = time.time,
        fold_s: float = FOLD_S,
        section: Section = OFF,
    ) -> None:
        self.keys: KeySet | None = None
        self._section = section
        self._make_nonces = make_nonces
        self._nonces: Nonces | None = None
        self._audit = audit
        self._refusals = Refusals(audit, fold_s)
        self._clock = clock

    async def open(self) -> None:
        self._use(await self.read(self._section))

    async def draft(self, new: Config, changes: Changes) -> Apply:
        return partial(self._use, await self.read(new.governance))

    def _use(self, keys: KeySet | None) -> None:
        self.keys = keys
        if keys is None:
            return
        ids = ", ".join(f"{name} {id}" for name, id in keys.ids.items())
        _log.info("operations are signed", keys=ids, rules=len(keys.section.rules))
        if problem := self._audit.problem:
            _log.error("the audit log was changed; see `greenroom audit verify`", problem=problem)

    async def read(self, section: Section) -> KeySet | None:
        """The keys of a configuration, to be set as `keys`. Opens what they need. Raises ConfigError."""
        if not section.is_on:
            return None
        keys = load_keys(section)
        if self._nonces is None:
            nonces = self._make_nonces()
            await self._audit.open()
            await nonces.open(self._clock())
            self._nonces = nonces
        return keys

    async def permit(self, call: GovernedCall) -> None:
        """Use up the call's token. Raises TokenRefused, NoncesUnavailable or AuditUnavailable if it may not."""
        try:
            presented, proven = self.checked(call)
            done = await call.find_done()
            # They may have changed, or ended, while the disk was looked at.
            for what in () if self.keys is None else _lacking(self.keys.section, done, proven):
                raise TokenTooFewSigners(what)
            assert self._nonces is not None, "keys are read first"
            await self._nonces.consume(presented.token.nonce, presented.token.issued_at, self._clock())
        except GreenroomError as error:
            await self.refused(_of(call), error)
            raise
        # The token is spent, so that no reader of the log can use it.
        said = {"signers": sorted(proven), "token": presented.value}
        await self._audit.append({"event": "permitted", **_plain(_of(call)), **said})

    async def refused(self, about: Mapping[str, Any], error: GreenroomError) -> None:
        """Write down that a call was refused, as far as it could be read."""
        await self._refusals.add(_plain({**about, "code": error.code, "why": error.message}))

    async def answered(self, call: GovernedCall, status: int | None) -> None:
        """Write down how it ended: the status of its answer, or None. Raises AuditUnavailable."""
        await self._audit.append({"event": "answered", **_plain(call.about), "status": status})

    async def close(self) -> None:
        await self._refusals.close()
        if self._nonces is not None:
            await self._nonces.close()
        await self._audit.close()

    # --- checks, which change nothing -------------------------------------------------------------------------------

    def checked(self, call: GovernedCall) -> tuple[Presented, frozenset[str]]:
        """The token and the signers it proves, if it is for this call. Raises TokenRefused."""
        keys = self.keys
        assert keys is not None, "only asked while tokens are needed"
        if call.token is None:
            raise TokenMissing(
                f"{call.operation} needs a token: send it as {FIELD} in the body, or in the header {HEADER}. "
                "`greenroom token sign` makes one."
            )
        presented = read_token(call.token)
        proven, section = keys.proven(presented), keys.section
        _check_meaning(presented.token, call)
        _check_time(presented.token, section, self._clock())
        _check_body(presented.token, call.fields, is_needed=section.require_body_hash)
        return presented, proven


def make_gate(shell: Shell) -> GovernanceGate:
    """Opens and imports nothing of governance while the configuration needs no tokens."""
    folder, section = shell.state_dir.path / FOLDER, shell.config.governance

    def nonces() -> Nonces:
        store = section.store or shell.config.leases.store
        if store is None:
            return NonceJournal(folder / "nonces", section.clock_skew_s, is_first=shell.state_dir.is_new)
        try:
            from greenroom.features.governance.shared_nonces import SharedNonces
        except ImportError:
            raise ConfigError("governance.store needs the client for Redis: pip install 'greenroom[redis]'") from None
        return SharedNonces(store, section.clock_skew_s)

    audit_path = folder / "audit.jsonl" if section.audit_path is None else Path(section.audit_path)
    return GovernanceGate(nonces, AuditLog(audit_path), section=section)


def _lacking(section: Section, done: tuple[Done, ...], proven: frozenset[str]) -> Iterator[str]:
    """For each rule that is not satisfied, what is missing."""
    for rule in section.rules:
        counted = proven if rule.group is None else proven & frozenset(section.signer_groups[rule.group])
        for one in done:
            if _fits(rule, one) and len(counted) < rule.signers_min:
                group = "" if rule.group is None else f" of {rule.group}"
                yield f"{one.operation} needs {rule.signers_min} signers{group} here; the token proves {len(counted)}."


def _fits(rule: Quorum, done: Done) -> bool:
    """The hub does not mind the case of letters, and neither do names of what is on disk."""
    if rule.operations and done.operation not in rule.operations:
        return False
    patterns = [pattern.casefold() for pattern in rule.models]
    if done.is_repository:
        patterns = [_PART_OF_REPOSITORY.sub("", pattern) for pattern in patterns]
    return done.names is None or any(fnmatchcase(name.casefold(), one) for name in done.names for one in patterns)


def _check_meaning(token: OpToken, call: GovernedCall) -> None:
    if token.operation != call.operation:
        raise TokenWrongOperation(f"The token is for {shown(token.operation)}; this call is {call.operation}.")
    if token.model != call.model:
        said = ["no model" if one is None else shown(one) for one in (token.model, call.model)]
        raise TokenWrongModel(f"The token is for {said[0]}; this call names {said[1]}.")


def _check_time(token: OpToken, section: Section, now: float) -> None:
    age_s = now - token.issued_at
    if age_s > section.window_s + section.clock_skew_s:
        raise TokenExpired(f"The token is {age_s:.0f} s old; it was valid for {section.window_s:g} s. Sign a new one.")
    if age_s < -section.clock_skew_s:
        raise TokenFromFuture(f"The token was issued {-age_s:.0f} s ahead of this server's clock. Compare the clocks.")


def _check_body(token: OpToken, fields: Mapping[str, Any], *, is_needed: bool) -> None:
    if token.body_sha256 is None:
        if is_needed:
            raise TokenBodyUnbound("This server needs tokens with bodySha256, the hash of the call's body.")
        return
    try:
        found = sha256_of(dict(fields))
    except NotCanonical as error:
        raise TokenBodyChanged(f"The call's body has no hash: {error}.") from None
    if found != token.body_sha256:
        raise TokenBodyChanged("The call's body is not the one that was signed: its bodySha256 is another.")


def _of(call: GovernedCall) -> dict[str, Any]:
    """What the audit log says of a call."""
    return {"operation": call.operation, "model": None if call.model is None else shown(call.model), **call.about}


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """With texts that can be written: a caller's may hold half of a surrogate pair."""
    return {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in fields.items()
    }


# --- refused calls in the audit log ---------------------------------------------------------------------------------
#
# The first of a key and reason within a minute, and how many followed. A log that kept its size by dropping old lines
# would let a caller push out what was permitted. A crash loses at most a minute's counts, of calls that did nothing.

Subject = tuple[str, str]


@dataclass(slots=True)
class _Folded:
    """The calls after the first."""

    timer: asyncio.TimerHandle
    count: int = 0
    last_at: int = 0
    last_request: str = ""
    operations: set[str] = field(default_factory=set)

    def add(self, fields: Mapping[str, Any]) -> None:
        self.count += 1
        self.last_at, self.last_request = int(time.time()), str(fields.get("request", ""))
        if operation := fields.get("operation"):
            self.operations.add(operation)


class Refusals:
    """A line that cannot be written is counted; the call is refused in any case."""

    def __init__(self, audit: AuditLog, fold_s: float = FOLD_S) -> None:
        self._audit = audit
        self._fold_s = fold_s
        # By the name of the key and the code: both are few, whatever callers send.
        self._folded: dict[Subject, _Folded] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def add(self, fields: Mapping[str, Any]) -> None:
        """Write down a refused call, or count it. `fields` has its `code`, and its `key` if it has one."""
        subject = (str(fields.get("key", "")), str(fields["code"]))
        if (folded := self._folded.get(subject)) is not None:
            folded.add(fields)
            return
        timer = asyncio.get_running_loop().call_later(self._fold_s, self._end, subject)
        self._folded[subject] = folded = _Folded(timer)
        try:
            await self._audit.append({"event": "refused", **fields})
        except AuditUnavailable:
            folded.add(fields)

    async def close(self) -> None:
        """Write down all that is counted, if there is room."""
        self._is_closed = True
        for subject, folded in list(self._folded.items()):
            folded.timer.cancel()
            self._end(subject)
        if self._writing:
            await asyncio.wait(self._writing)

    def _end(self, subject: Subject) -> None:
        folded = self._folded.pop(subject)
        if not folded.count:
            return
        task = asyncio.get_running_loop().create_task(self._write(subject, folded), name="audit refusals")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, subject: Subject, folded: _Folded) -> None:
        key, code = subject
        last = {"lastAt": folded.last_at, "lastRequest": folded.last_request}
        told = {"repeats": folded.count, "operations": sorted(folded.operations), **last}
        try:
            await self._audit.append({"event": "refused", "key": key, "code": code, **told})
        except AuditUnavailable:
            if self._is_closed:
                return
            # Counted again, for a disk that has room later.
            timer = asyncio.get_running_loop().call_later(self._fold_s, self._end, subject)
            later = self._folded.setdefault(subject, _Folded(timer))
            if later.timer is not timer:
                timer.cancel()
            later.count += folded.count
            later.operations |= folded.operations
