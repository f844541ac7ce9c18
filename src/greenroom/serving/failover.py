"""Holds an engine's answer back if it is a failure and another model can still serve the request.

Owns which answers are failures. Nothing of such an answer reaches the client: the relay ends as if the engine were
lost before its first byte. All other answers go to the relay as they come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from greenroom.errors import EngineLost, RemoteFailed
from greenroom.http.engine_connection import Connection
from greenroom.http.headers import Headers
from greenroom.http.relays.relay import Relay

# An engine has no room now: too many requests, or unavailable.
BUSY: Final = frozenset((429, 503))
# The same for an engine that has been unavailable for too long.
BUSY_IF_BROKEN: Final = frozenset((429,))


class FailoverSink:
    """A Sink before a relay. Use for one answer."""

    __slots__ = ("_has_other", "_name", "_relay")

    def __init__(self, relay: Relay, name: str, has_other: Callable[[int], bool]) -> None:
        """`name` is the model, for the error.

        `has_other` says whether another model can serve it after a failure with this status, 0 if it had none. It is
        asked only when a failure comes.
        """
        self._relay = relay
        self._name = name
        self._has_other = has_other

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
        may_turn = isinstance(error, RemoteFailed) and not self._relay.status and self._has_other(0)
        self._relay.lost(error, before_first_byte or may_turn)

    def _is_failure(self, status: int) -> bool:
        """True if another model might do better: the engine broke, or has no room. Other errors are the caller's."""
        return (status >= 500 or status in BUSY) and self._has_other(status)

    def _fail(self, status: int) -> None:
        self._relay.status = status
        self._relay.lost(EngineLost(f"{self._name} answered {status}."), before_first_byte=True)
