"""Collects an engine's whole answer instead of passing it on, for one that is made anew before the client gets it.

Owns the bytes until they are taken. The exchange is left unanswered; only a leaving client is noticed by it.
"""

from __future__ import annotations

from collections.abc import Callable

from greenroom.errors import BodiesFull, GatewayBug, GreenroomError, ResultTooLarge
from greenroom.http.body import Body
from greenroom.http.exchange import Exchange
from greenroom.http.headers import Headers
from greenroom.http.relays.relay import UNREAD_BYTES_MAX, Relay, RelayOutcome


class BufferedRelay(Relay):
    """Use in place of a Relay. COMPLETE means that `take` has the answer, or the reason why it could not be held."""

    __slots__ = ("_bytes_max", "_failure", "_into")

    def __init__(
        self, exchange: Exchange, into: Body, bytes_max: int, *, on_done: Callable[[Relay], None] | None = None
    ) -> None:
        self._into: Body | None = into
        self._bytes_max = bytes_max
        self._failure: GreenroomError | None = None
        super().__init__(exchange, on_done=on_done)

    def take(self) -> Body:
        """The answer; the caller closes it. Raises ResultTooLarge or BodiesFull if it could not be held."""
        if self._failure is not None:
            raise self._failure
        body, self._into = self._into, None
        if body is None:
            raise GatewayBug("An answer was taken that is not there.")
        return body

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self._note_head(status, headers)
        if body:
            self.body(body)
        self.complete()

    def head(self, status: int, headers: Headers) -> None:
        self._note_head(status, headers)

    def body(self, data: bytes) -> None:
        if self.outcome is not None or self._into is None:
            return
        self._unread.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > UNREAD_BYTES_MAX:
            self._read()
        try:
            if len(self._into) + len(data) > self._bytes_max:
                raise ResultTooLarge(f"The answer has more than {self._bytes_max:,} bytes.")
            self._into.append(data)
        except (ResultTooLarge, BodiesFull) as failure:
            self._failure = failure
            self._drop_upstream()
            self._settle(RelayOutcome.COMPLETE)

    def complete(self) -> None:
        self.upstream = None
        self._settle(RelayOutcome.COMPLETE)

    def stop(self) -> None:
        """Also drops an answer that is complete and was not taken."""
        super().stop()
        self._drop()

    def client_gone(self) -> None:
        super().client_gone()
        self._drop()

    def _settle(self, outcome: RelayOutcome) -> None:
        if self.outcome is not None:
            return
        if outcome is not RelayOutcome.COMPLETE or self._failure is not None:
            self._drop()
        super()._settle(outcome)
        if self._into is not None:
            # The client may leave before the answer is taken.
            self.exchange.listener = self

    def _drop(self) -> None:
        if self._into is not None:
            self._into.close()
            self._into = None
