"""Which profile a request goes by, and what it comes to once the profile of its client has narrowed it.

Owns the choice and the rules of narrowing. Pure but for a bounded memory of what was found: keys and tenants are the
operator's, ids of clients are whatever callers send.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from greenroom.access.keys import Caller, cap
from greenroom.config.schema import PRIORITY_NAMES, ClientProfile, Profile
from greenroom.config.sections.keys import ModelScope
from greenroom.config.sections.profiles import TEMPLATE_SWITCHES
from greenroom.errors import BadRequest

# Combinations of key, tenant and client that are remembered.
REMEMBERED_MAX: Final = 2_000
FOR_EVER: Final = -1.0

_EMPTY: Final[Mapping[str, bytes]] = {}
# Of a caller's switches, which are read at once and put together with the profile's.
SWITCHES_BYTES_MAX: Final = 256 * 1024
_switches: Final = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)

Fields = Mapping[str, msgspec.Raw]


class RequestProfile:
    """What one kind of request gets without asking, and what it may ask at most."""

    __slots__ = (
        *("_caller", "_keep_alive_s", "_narrowed", "_params", "_priority", "_scopes", "_switches"),
        *("default_model", "name"),
    )

    def __init__(self, name: str, profile: Profile, client: ClientProfile | None) -> None:
        """`name` is the profile's in the configuration."""
        # The widest first: those that follow can only narrow what came before.
        parts: tuple[ClientProfile, ...] = (profile,) if client is None else (profile, client)
        self.name = name
        self.default_model = _last(part.default_model for part in parts)
        self._scopes = [part.models for part in parts if part.models is not None]
        # A greater number is a worse priority.
        self._priority = max((PRIORITY_NAMES[part.priority] for part in parts if part.priority), default=None)
        # The caller that was narrowed last: as a rule there is one.
        self._caller: Caller | None = None
        self._narrowed: Caller | None = None
        self._keep_alive_s: float | None = None
        self._params: dict[str, bytes] = {}
        self._switches: dict[str, msgspec.Raw] = {}
        for part in parts:
            self._keep_alive_s = _shorter(part.keep_alive_s, self._keep_alive_s)
            for field, value in part.set_params.items():
                self._params.setdefault(field, msgspec.json.encode(value))
            for switch, value in part.template_switches.items():
                self._switches.setdefault(switch, msgspec.Raw(msgspec.json.encode(value)))

    def narrowed(self, caller: Caller) -> Caller:
        """The same caller, limited to models that the profile allows as well."""
        if self._narrowed is None or self._caller is not caller:
            scope = caller.models
            for patterns in self._scopes:
                scope = ModelScope(patterns, scope)
            self._caller, self._narrowed = caller, replace(caller, models=scope)
        return self._narrowed

    def priority(self, said: int | None, of_model: int) -> int:
        """The priority of a request that names this one, or none."""
        if self._priority is None:
            return of_model if said is None else said
        return self._priority if said is None else cap(said, self._priority)

    def keep_alive_s(self, said: float | None) -> float | None:
        """How long the model stays after a request that says so much, or nothing."""
        return self._keep_alive_s if said is None else _shorter(said, self._keep_alive_s)

    def params(self, of_model: Mapping[str, bytes], stripped: frozenset[str]) -> Mapping[str, bytes]:
        """The fields to set in a request for text: JSON. Not those that the model sets or strips itself."""
        return {name: value for name, value in self._params.items() if name not in of_model and name not in stripped}

    def template_switches(
        self, fields: Fields, of_model: Mapping[str, bytes], stripped: frozenset[str]
    ) -> Mapping[str, bytes]:
        """The field with all switches of the chat template: the caller's, in their place the profile's, or the
        model's own. Empty if there is nothing to set. Raises BadRequest."""
        if not self._switches or TEMPLATE_SWITCHES in stripped:
            return _EMPTY
        if (by_model := of_model.get(TEMPLATE_SWITCHES)) is not None:
            joined = self._switches | _read(by_model)
        else:
            joined = _read(fields.get(TEMPLATE_SWITCHES, b"null")) | self._switches
        return {TEMPLATE_SWITCHES: msgspec.json.encode(joined)}


class Profiles:
    """All profiles of a configuration."""

    def __init__(self, profiles: Mapping[str, Profile]) -> None:
        self._profiles = [
            (name, one, ModelScope(one.keys), ModelScope(one.tenants), [ModelScope((id,)) for id in one.clients])
            for name, one in profiles.items()
        ]
        self._found: dict[tuple[str, str, str], RequestProfile | None] = {}

    def of(self, key: str, tenant: str, client: str) -> RequestProfile | None:
        """The profile of requests by this key, tenant and client; None if none fits."""
        whose = (key, tenant, client)
        if whose in self._found:
            return self._found[whose]
        if len(self._found) >= REMEMBERED_MAX:
            self._found.clear()
        found = self._found[whose] = self._look(key, tenant, client)
        return found

    def _look(self, key: str, tenant: str, client: str) -> RequestProfile | None:
        for name, profile, keys, tenants, clients in self._profiles:
            if keys.allows(key) or (tenant and tenants.allows(tenant)):
                pairs = zip(clients, profile.clients.values(), strict=True)
                of_client = next((one for ids, one in pairs if client and ids.allows(client)), None)
                return RequestProfile(name, profile, of_client)
        return None


def _last(said: Iterable[str | None]) -> str | None:
    return next((one for one in reversed([*said]) if one is not None), None)


def _shorter(one: float | None, other: float | None) -> float | None:
    """The shorter of two stays, either of which may be missing or for ever."""
    if one is None or other is None:
        return one if other is None else other
    if FOR_EVER in (one, other):
        return other if one == FOR_EVER else one
    return min(one, other)


def _read(raw: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    if len(raw) > SWITCHES_BYTES_MAX:
        raise BadRequest(f"{TEMPLATE_SWITCHES} has more than {SWITCHES_BYTES_MAX:,} bytes.", param=TEMPLATE_SWITCHES)
    try:
        return _switches.decode(raw) or {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest(f"{TEMPLATE_SWITCHES} is not an object.", param=TEMPLATE_SWITCHES) from None
