"""The listening side: sockets, the connections on them, and the one sweep that watches their deadlines.

Owns the limits on connections and the clients' deadlines. Has no routes, tenants or models: it asks `admit` at the
end of a request's headers, gives complete requests to `handle`, and lets `refuse` render errors that it must answer
itself. All three are called on the loop and must not block. Why this is ours: docs/adr/0002-own-http-edge.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from greenroom.errors import GreenroomError, Overload
from greenroom.http import headers as wire
from greenroom.http.body import BodyBudget
from greenroom.http.client import ClientConnection
from greenroom.http.exchange import Exchange, Refusal, WriteBatch
from greenroom.http.limits import EdgeLimits, EdgeState, EdgeStats
from greenroom.http.request import Head

log: Final = logging.getLogger("greenroom.http")

_LAST_RESORT: Final[Refusal] = (
    500,
    [(b"content-type", b"application/json")],
    b'{"error":{"message":"internal error"}}',
)

_NO_SUCH_ADDRESS: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class Edge:
    """Accepts connections and turns their bytes into exchanges.

    `admit(head)` returns how many bytes the body may have at most, or raises the error to answer with.
    `handle(exchange)` is called when head and body are complete. `refuse(exchange, head, error)` renders an error;
    exchange and head may be None.
    """

    def __init__(
        self,
        *,
        admit: Callable[[Head], int],
        handle: Callable[[Exchange], None],
        refuse: Callable[[Exchange | None, Head | None, GreenroomError], Refusal],
        limits: EdgeLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        state: EdgeState | None = None,
        bodies: BodyBudget | None = None,
    ) -> None:
        """`state` and `bodies` are given where others use them too; they must be of the same limits."""
        self.handle = handle
        self.limits = limits or EdgeLimits()
        self.state = state or EdgeState(self.limits)
        self.bodies = bodies or BodyBudget(self.limits, None)
        self.writes = WriteBatch()
        self.addresses: list[str] = []
        self._loop: asyncio.AbstractEventLoop
        self.admit = admit
        self._refuse = refuse
        self._clock = clock
        self._connections: set[ClientConnection] = set()
        self._per_ip: Counter[str] = Counter()
        self._servers: list[asyncio.AbstractServer] = []
        self._bound: list[socket.socket] = []
        self._socket_paths: list[str] = []
        self._next_sweep: asyncio.TimerHandle | None = None
        self._read_clock()

    @property
    def stats(self) -> EdgeStats:
        return self.state.stats

    @property
    def connections(self) -> int:
        return len(self._connections)

    async def listen(self, *, host: str | None = None, port: int | None = None, path: str | None = None) -> None:
        """Accept on a TCP port (0: any free one) or on a Unix socket. Raises OSError. May be called more than once."""
        if path is not None:
            self._loop = asyncio.get_running_loop()
            self._servers.append(await self._listen_unix(path))
            self._sweep_on()
            return
        await self.bind(host, port or 0)
        await self.accept()

    async def bind(self, host: str | None, port: int) -> None:
        """Take a TCP port. A client that connects waits until `accept`. Raises OSError."""
        self._loop = asyncio.get_running_loop()
        try:
            found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except UnicodeError as error:
            raise socket.gaierror(socket.EAI_NONAME, f"{host!r:.100} is no name of a host") from error
        missing: OSError | None = None
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                sock = socket.create_server(address, family=family, backlog=self.limits.backlog)
            except OSError as error:
                # A name may stand for addresses that this machine lacks, such as those of IPv6; one is enough.
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
                missing = error
                continue
            # Connections inherit it. asyncio itself does it only for sockets that name their protocol, uvloop for all.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._bound.append(sock)
            self.addresses.append(_spell(sock.getsockname()))
        if missing is not None and not self._bound:
            raise missing

    async def accept(self) -> None:
        """Answer on the ports that were taken, first those that wait already."""
        while self._bound:
            server = await self._loop.create_server(self._accept, sock=self._bound.pop(), backlog=self.limits.backlog)
            self._servers.append(server)
        self._sweep_on()

    def _sweep_on(self) -> None:
        if self._next_sweep is None:
            self._sweep()

    async def close(self) -> None:
        """Stop accepting and close idle connections. Running answers go on; their connections close after them."""
        self.state.draining = True
        for server in self._servers:
            server.close()
        for sock in self._bound:
            sock.close()
        self._bound.clear()
        self._servers.clear()
        for path in self._socket_paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._socket_paths.clear()
        for connection in list(self._connections):
            if connection.is_idle:
                connection.close_idle()

    def abort(self) -> None:
        """Cut every connection now and end the sweep. The edge is done after this."""
        if self._next_sweep is not None:
            self._next_sweep.cancel()
            self._next_sweep = None
        for connection in list(self._connections):
            connection.transport.abort()

    def refusal(self, exchange: Exchange | None, head: Head | None, error: GreenroomError) -> Refusal:
        """The answer for this error. Never raises: if rendering fails, the answer is a plain 500."""
        try:
            return self._refuse(exchange, head, error)
        except Exception:
            log.exception("rendering an error failed")
            self.state.stats.bugs += 1
            return _LAST_RESORT

    # --- what connections say ---------------------------------------------------------------------------------------

    def joined(self, connection: ClientConnection) -> None:
        self._connections.add(connection)
        self.state.stats.accepted += 1
        ip = connection.peer_ip
        self._per_ip[ip] += 1
        crowded = self._per_ip[ip] > self.limits.connections_per_ip_max and not _is_loopback(ip)
        if crowded or len(self._connections) > self.limits.connections_max or self.state.draining:
            self.state.stats.over_limit += 1
            crowd = Overload("Too many connections; try again in a moment.", retry_after_s=1.0)
            connection.turn_away(crowd, linger=False)

    def left(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        ip = connection.peer_ip
        self._per_ip[ip] -= 1
        if self._per_ip[ip] <= 0:
            del self._per_ip[ip]

    def _accept(self) -> ClientConnection:
        return ClientConnection(self)

    async def _listen_unix(self, path: str) -> asyncio.AbstractServer:
        _remove_stale_socket(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(path)
            # For our own user only, set before clients can connect: the file's mode is the only protection.
            os.chmod(path, 0o600)
            server = await self._loop.create_unix_server(self._accept, sock=sock, backlog=self.limits.backlog)
        except BaseException:
            sock.close()
            raise
        self._socket_paths.append(path)
        self.addresses.append(f"unix:{path}")
        return server

    def _read_clock(self) -> None:
        self.state.now = self._clock()
        self.state.date = wire.date_line(time.time())

    def _sweep(self) -> None:
        # First, so that one sweep that fails is not the last.
        self._next_sweep = self._loop.call_later(self.limits.sweep_s, self._sweep)
        self._read_clock()
        for connection in list(self._connections):
            try:
                connection.sweep(self.state.now)
            except Exception:
                log.exception("sweeping a connection failed")
                self.state.stats.bugs += 1
                connection.transport.abort()


def _is_loopback(ip: str) -> bool:
    # A Unix socket has no address; a client that may open its file is local.
    if not ip:
        return True
    address = ipaddress.ip_address(ip.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _spell(name: tuple[object, ...]) -> str:
    host, port = str(name[0]), name[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _remove_stale_socket(path: str) -> None:
    """Remove the socket of a dead process. One that still accepts is kept, and bind then raises OSError."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return
        except OSError:
            os.unlink(path)
