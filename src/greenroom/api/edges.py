"""Where callers come in: the edge with its door, that of metrics if these have a port of their own, and the keys."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from greenroom.access.key_ring import KeyRing
from greenroom.access.limits import Limiter
from greenroom.api.asgi import AsgiBridge
from greenroom.api.front import Door, HostRule
from greenroom.config.diff import Changes
from greenroom.config.part import Apply, Part
from greenroom.config.schema import Config, Server
from greenroom.errors import ConfigError
from greenroom.http.body import BodyBudget
from greenroom.http.edge import Edge
from greenroom.http.limits import limits_for
from greenroom.runtime.shell import Shell
from greenroom.serving.part import RequestsPart
from greenroom.telemetry.logs import get_logger

_log = get_logger("server")

# The time that event streams have to send their last events, and what was sent has to leave.
LAST_EVENTS_S: Final = 0.05
LAST_BYTES_S: Final = 0.05


class Edges(Part):
    name = "the listening sockets"

    def __init__(
        self,
        shell: Shell,
        requests: RequestsPart,
        bodies: BodyBudget,
        keys: KeyRing,
        limiter: Limiter,
        management: AsgiBridge,
        door: Door,
    ) -> None:
        self._shell = shell
        self._keys = keys
        self._limiter = limiter
        self._management = management
        self.door = door
        state, server = requests.edge_state, shell.config.server
        handle, refuse = door.handle, door.refuse
        self.edge = Edge(
            admit=door.admit, handle=handle, refuse=refuse, limits=state.limits, state=state, bodies=bodies
        )
        # None without a port of their own.
        self.metrics_edge: Edge | None = None
        if server.metrics and server.metrics_port is not None:
            self.metrics_edge = Edge(
                admit=door.admit_to_metrics, handle=handle, refuse=refuse, limits=limits_for(server)
            )
        if bodies.spools_to_memory:
            _log.warning(
                "state_dir lies in memory (tmpfs): large request bodies count towards server.bodies_memory_mib",
                state_dir=bodies.spool_dir,
            )
        self._use(shell.config)

    async def draft(self, new: Config, changes: Changes) -> Apply:
        return partial(self._use, new)

    def _use(self, config: Config) -> None:
        server = config.server
        self.door.serves_ui = server.ui
        hosts = (server.host, *server.allowed_hosts)
        self.door.hosts = HostRule(hosts, server.allowed_origins, public_url=server.public_url)
        self._use_keys(config)

    def _use_keys(self, config: Config) -> None:
        """Use the keys that there are at present, with their limits."""
        self.door.keys = self._keys.keys
        self._limiter.configure(config, self._keys.keys)
        self.door.limiter = self._limiter if self._limiter.is_on else None

    def use_changed_keys(self) -> None:
        """The key file was read again."""
        self._use_keys(self._shell.config)
        ring = self._keys
        for problem in ring.problems:
            _log.warning("the key file cannot be used as it is", problem=problem, keys_that_count=len(ring.of_file))
        if not ring.problems:
            _log.info("keys reread", file=ring.path, keys=len(ring.of_file))

    async def open(self) -> None:
        """Take the ports; connections wait until `accept`. Raises OSError, or ConfigError for `metrics_port`."""
        server = self._shell.config.server
        try:
            await self.edge.bind(server.host, server.port)
            if self.metrics_edge is not None:
                await self._bind_metrics(self.metrics_edge, server)
        except BaseException:
            await self.close()
            raise

    async def _bind_metrics(self, edge: Edge, server: Server) -> None:
        try:
            await edge.bind(server.host, server.metrics_port or 0)
        except OSError as error:
            where, why = f"{server.host}:{server.metrics_port}", error.strerror or error
            raise ConfigError(f"server.metrics_port: cannot listen on {where}: {why}. Choose another port.") from error

    async def accept(self) -> None:
        for edge in self._all():
            await edge.accept()
        if self.metrics_edge is not None:
            _log.info("serving metrics", address=self.metrics_edge.addresses[0])

    async def close(self) -> None:
        """End streams of events and logs after their last events, stop listening, then cut what is left."""
        self._shell.hub.close()
        await asyncio.sleep(LAST_EVENTS_S)
        self._management.close()
        try:
            for edge in self._all():
                await edge.close()
            await asyncio.sleep(LAST_BYTES_S)
        finally:
            for edge in self._all():
                edge.abort()

    def _all(self) -> list[Edge]:
        return [self.edge] if self.metrics_edge is None else [self.edge, self.metrics_edge]
