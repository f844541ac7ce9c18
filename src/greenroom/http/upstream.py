"""A pool of connections to one engine: idle ones are reused, new ones made when there is none.

Owns the pool and its idle connections. Never interprets an answer: `engine_connection.py` reads it and calls a `Sink`.
Open connections are bounded by the number of exchanges; only idle ones need a bound of their own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from dataclasses import dataclass
from typing import Final

from greenroom.errors import EngineLost
from greenroom.http.body import Payload
from greenroom.http.engine_connection import Connection, Sink
from greenroom.http.exchange import WriteBatch

# Engines listen on this machine or one nearby: a connection that takes longer will not come.
CONNECT_TIMEOUT_S: Final = 5.0
# A refusal comes at once, if it comes.
REFUSED_WITHIN_S: Final = 1.0
# What OpenSSL says of a certificate, by its number.
_CERTIFICATES: Final = {10: "has expired", 62: "is for another host"}


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine listens: host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Pool:
    """Connections to one address. `idle_s` must be shorter than the engine's own keep-alive time.

    Errors name the engine by `name`: callers must not learn its address.
    """

    def __init__(
        self,
        address: EngineAddress,
        *,
        name: str = "The engine",
        idle_max: int = 32,
        idle_s: float = 4.0,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.address = address
        self.name = name
        self.connect_timeout_s = CONNECT_TIMEOUT_S
        self.writes = WriteBatch()
        self.connects = 0
        self.reuses = 0
        self.retries = 0
        self._idle_max = idle_max
        self._idle_s = idle_s
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._retrying: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop = loop or asyncio.get_running_loop()
        self._time = self._loop.time

    def lost(self, what: str) -> EngineLost:
        """The error for an engine that did `what` instead of answering."""
        return EngineLost(f"{self.name} {what}. Ask again: if it has ended, it is brought back.")

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    @property
    def busy_count(self) -> int:
        return len(self._open) - len(self._idle)

    async def send(self, head: bytes, body: Payload, sink: Sink) -> None:
        """Send a request. `sink` receives the answer, or the failure to connect. Waits only if it must connect."""
        if not self.send_now(head, body, sink):
            await self._send_fresh(head, body, sink)

    def send_now(self, head: bytes, body: Payload, sink: Sink) -> bool:
        """Send a request on an idle connection. False if there is none."""
        idle = self._idle
        oldest = self._time() - self._idle_s
        while idle:
            connection = idle.pop()
            if connection.idle_since > oldest and not connection.transport.is_closing():
                self.reuses += 1
                connection.begin(head, body, sink)
                return True
            connection.abort()
        return False

    async def refuses(self) -> bool:
        """True if nothing listens at its address: the engine has closed its socket.

        An engine that is only busy does not: while its backlog is full, a connection waits or fails in another way.
        """
        if self._closed:
            return False
        try:
            async with asyncio.timeout(REFUSED_WITHIN_S):
                connection = await self._dial()
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            # A TimeoutError is an OSError too.
            return False
        connection.abort()
        return False

    def close(self) -> None:
        """Cut every connection, idle or busy. Busy sinks get `lost`. Later requests are lost at once."""
        self._closed = True
        self._idle.clear()
        for task in list(self._retrying):
            task.cancel()
        for connection in list(self._open):
            connection.lose("was stopped")

    # --- what connections say ---------------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)

    def released(self, connection: Connection) -> None:
        """An answer is complete and the connection can be used again."""
        if self._closed or len(self._idle) >= self._idle_max:
            connection.abort()
            return
        connection.idle_since = self._time()
        self._idle.append(connection)
        # The list is ordered by age, so the first one is the only one to check for expiry.
        if self._idle[0].idle_since < connection.idle_since - self._idle_s:
            self._idle.pop(0).abort()

    def ended(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def may_resend(self, sink: Sink) -> bool:
        """True if what was sent on a reused connection that ended without a byte is sent once more."""
        return True

    def retry(self, head: bytes, body: Payload, sink: Sink) -> None:
        """An idle connection turned out to be closed: send once more, on a fresh one."""
        self.retries += 1
        task = self._loop.create_task(self._send_fresh(head, body, sink), name=f"retry to {self.address}")
        self._retrying.add(task)
        # By callback: a task cancelled before its first step never enters its body, and `sink` would wait for ever.
        task.add_done_callback(lambda task: self._retried(task, sink))

    def _retried(self, task: asyncio.Task[None], sink: Sink) -> None:
        self._retrying.discard(task)
        if task.cancelled() and sink.wanted:
            sink.lost(self.lost("was stopped"), True)

    # --- connecting -------------------------------------------------------------------------------------------------

    async def _send_fresh(self, head: bytes, body: Payload, sink: Sink) -> None:
        try:
            connection = await self._connect()
        except (OSError, TimeoutError) as error:
            sink.lost(self.lost(f"cannot be reached: {_reason(error)}"), True)
            return
        if sink.wanted:
            connection.begin(head, body, sink)
        else:
            self.released(connection)

    async def _connect(self) -> Connection:
        if self._closed:
            raise ConnectionRefusedError(0, "it was stopped")
        self.connects += 1
        async with asyncio.timeout(self.connect_timeout_s):
            connection = await self._dial()
        if self._closed:
            connection.abort()
            raise ConnectionAbortedError(0, "it was stopped")
        return connection

    async def _dial(self) -> Connection:
        address = self.address
        if address.path:
            _, connection = await self._loop.create_unix_connection(self._new_connection, address.path)
        else:
            _, connection = await self._loop.create_connection(self._new_connection, address.host, address.port)
        return connection

    def _new_connection(self) -> Connection:
        return Connection(self)


def _reason(error: OSError) -> str:
    """The system's message; asyncio's own would add the address."""
    if isinstance(error, ssl.SSLCertVerificationError):
        # Not its own words, which name the host.
        return f"its certificate {_CERTIFICATES.get(error.verify_code, 'is of no authority that is trusted here')}"
    if isinstance(error, ssl.SSLError):
        return "TLS failed"
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    if error.errno:
        return os.strerror(error.errno)
    return error.strerror or "no connection in time"
