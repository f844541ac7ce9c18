"""Raw bytes both ways between a client and an engine after an Upgrade.

Owns the pair of connections once the engine has agreed (101). Until then it is a plain relay: an engine that declines
is answered like any other. Never looks at the bytes. Ends both sides when either ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from greenroom.http.exchange import Exchange, answer_head
from greenroom.http.headers import UPGRADE_ANSWER_ALLOWED, Headers, response_headers
from greenroom.http.relays.relay import Relay, RelayOptions, RelayOutcome

# An engine that does not read is given this long for the last bytes of a client.
LAST_BYTES_S: Final = 1.0


class Tunnel(Relay):
    """Use in place of a Relay for a request with `head.upgrade`. COMPLETE means that the tunnel was open and ended."""

    __slots__ = ("_client", "_engine_transport", "bytes_from_client", "bytes_from_engine")

    def __init__(
        self,
        exchange: Exchange,
        options: RelayOptions,
        *,
        on_done: Callable[[Relay], None] | None = None,
    ) -> None:
        self.bytes_from_client = 0
        self.bytes_from_engine = 0
        self._client: asyncio.Transport | None = None
        self._engine_transport: asyncio.Transport | None = None
        super().__init__(exchange, options, on_done=on_done)

    def upgraded(self, headers: Headers, rest: bytes) -> None:
        """The engine agreed: pass its 101 on, then every byte of both sides."""
        engine = self.upstream
        assert engine is not None
        agreed = [header for header in headers if header[0] == b"upgrade"]
        if len(agreed) != 1 or not _protocols(agreed[0][1]) <= _protocols(self.exchange.head.upgrade or b""):
            engine.lose("switched to another protocol than it was asked for")
            return
        head = self._switching_head(headers, agreed)
        self._engine_transport = engine.take_over(self)
        # Bytes the client sent ahead reach the engine here.
        self._client = self.exchange.take_over(self)
        self._client.write(head)
        if rest:
            self.engine_data(rest)

    def stop(self) -> None:
        """Cut both sides."""
        if self.is_open:
            self._end()
        else:
            super().stop()

    @property
    def is_open(self) -> bool:
        return self._client is not None

    def client_data(self, data: bytes) -> None:
        if self._engine_transport is not None:
            self.bytes_from_client += len(data)
            self._engine_transport.write(data)

    def engine_data(self, data: bytes) -> None:
        if self._client is not None:
            self.bytes_from_engine += len(data)
            self._client.write(data)

    def client_gone(self) -> None:
        if self.is_open:
            self._end()
        else:
            super().client_gone()

    def engine_gone(self) -> None:
        self._end()

    # A side that reads too slowly pauses the other one.

    def engine_paused(self) -> None:
        if self._client is not None and not self._client.is_closing():
            self._client.pause_reading()

    def engine_resumed(self) -> None:
        if self._client is not None and not self._client.is_closing():
            self._client.resume_reading()

    def _switching_head(self, headers: Headers, agreed: Headers) -> bytes:
        kept = response_headers(headers, self._options.extra_headers, allowed=UPGRADE_ANSWER_ALLOWED)
        return answer_head(self.exchange.head, 101, kept + agreed, b"connection: upgrade\r\n", b"")

    def _end(self) -> None:
        """Close both sides in order, so that what was already taken still arrives, if it is read soon."""
        client, engine = self._client, self._engine_transport
        self._client = self._engine_transport = self.upstream = None
        if client is not None:
            client.close()
        if engine is not None:
            engine.close()
            if engine.get_write_buffer_size():
                asyncio.get_running_loop().call_later(LAST_BYTES_S, engine.abort)
        self._settle(RelayOutcome.COMPLETE)


def _protocols(said: bytes) -> set[bytes]:
    return {protocol.strip() for protocol in said.lower().split(b",")}
