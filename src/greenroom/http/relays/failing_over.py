"""Holds an engine's answer back if it is a failure, for requests that another model can still serve.

Owns which answers are failures. Nothing of such an answer reaches the client: the relay ends as if the engine were
lost before its first byte. All other answers go to the relay as they come.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from greenroom.errors import EngineLost, RemoteFailed
from greenroom.http.engine_connection import Connection
from greenroom.http.headers import Headers
from greenroom.http.relays.relay import Relay

# An engine has no room now: too many requests, or unavailable.
BUSY: Final = frozenset((429, 503))
# The same for an engine that has been unavailable for too long.
BUSY_IF_BROKEN: Final = frozenset((429,))


class FailingOver:
    """A Sink before a relay. Use for one answer."""

    __slots__ = ("_name", "_relay", "_told")

    def __init__(self, relay: Relay, name: str, told: Container[int]) -> None:
        """`name` is the model, for the error. Statuses in `told` go to the client although they are failures."""
        self._relay = relay
        self._name = name
        self._told = told

    @property
    def upstream(self) -> Connection | None:
        return self._relay.upstream

    @upstream.setter
    def upstream(self, connection: Connection | None) -> None:
        self._relay.upstream = connection

    @property
    def wanted(self) -> bool:
        return self._relay.wanted

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        if self._is_failure(status):
            self._fail(status)
        else:
            self._relay.answer(status, headers, body)

    def head(self, status: int, headers: Headers) -> None:
        if self._is_failure(status):
            # The rest of it is not wanted.
            upstream = self._relay.upstream
            self._fail(status)
            if upstream is not None:
                upstream.abort()
        else:
            self._relay.head(status, headers)

    def body(self, data: bytes) -> None:
        self._relay.body(data)

    def complete(self) -> None:
        self._relay.complete()

    def upgraded(self, headers: Headers, rest: bytes) -> None:
        self._relay.upgraded(headers, rest)

    def lost(self, error: EngineLost, before_first_byte: bool) -> None:
        # Connections to a provider have tried again already, and say that nothing more is to be tried there.
        is_unanswered = before_first_byte or (isinstance(error, RemoteFailed) and not self._relay.status)
        self._relay.lost(error, is_unanswered)

    def _is_failure(self, status: int) -> bool:
        """True if another model might do better: the engine broke, or has no room. Other errors are the caller's."""
        return (status >= 500 or status in BUSY) and status not in self._told

    def _fail(self, status: int) -> None:
        self._relay.status = status
        self._relay.lost(EngineLost(f"{self._name} answered {status}."), before_first_byte=True)
