"""The front: the HTTP edge, the door behind it, inference and the management API.

Owns how these are made and joined, and how they open together. Settings are read from the gateway at each request: a
reload replaces the configuration as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.access.client_stats import ClientStats
from greenroom.access.key_ring import KeyRing, Look
from greenroom.access.keys import Tenants
from greenroom.access.limits import Limiter
from greenroom.access.usage_store import UsageStore
from greenroom.api.asgi import AsgiBridge
from greenroom.api.front import Door, HostRule, MetricsDoor
from greenroom.config.limits import is_named
from greenroom.config.schema import Config, Server
from greenroom.errors import ConfigError
from greenroom.features.jobs.routes import AsyncRequests
from greenroom.features.pictures.answers import PictureAnswers, PictureServices
from greenroom.features.pictures.store import PictureStore
from greenroom.http.body import BodyBudget
from greenroom.http.edge import Edge
from greenroom.http.limits import EdgeState, limits_for
from greenroom.runtime.loop import Tickets
from greenroom.runtime.moves.admission import Prefetch
from greenroom.runtime.record.recording import ActivityRecorder
from greenroom.runtime.resolver import Resolver
from greenroom.serving.prefix_cache import PrefixSalts
from greenroom.serving.read import Reader
from greenroom.serving.request_log import RequestLog
from greenroom.serving.requests import Inference
from greenroom.serving.tasks import Tasks
from greenroom.telemetry.activity import UsageCounts
from greenroom.telemetry.logs import get_logger
from greenroom.wiring.common import CommonParts, MemoryParts
from greenroom.wiring.gateway import Gateway
from greenroom.wiring.routes import make_management

if TYPE_CHECKING:
    from greenroom.access.shared_limits import SharedLimits

_log = get_logger("server")


@dataclass(frozen=True, slots=True)
class AccessParts:
    tenants: Tenants
    client_stats: ClientStats
    limiter: Limiter
    shared_limits: SharedLimits | None
    counts: UsageCounts | None
    # None if none is kept.
    usage: UsageStore | None
    keys: KeyRing


def wire_access(common: CommonParts, on_changed_keys: Callable[[], None]) -> AccessParts:
    """Raises ConfigError if the client of the store of limits is not installed."""
    gateway, days = common.gateway, common.gateway.config.server.usage_days
    counts = UsageCounts(lambda tenant: is_named(gateway.config, tenant)) if days else None
    usage = None if counts is None else UsageStore(common.state_dir.path, counts, days)
    return AccessParts(Tenants(), ClientStats(common.clock), *_limits(common), counts, usage, KeyRing(on_changed_keys))


@dataclass(frozen=True, slots=True)
class ServingParts:
    activity_file: ActivityRecorder | None
    prefetch: Prefetch
    inference: Inference
    bodies: BodyBudget
    edge_state: EdgeState


def wire_serving(
    common: CommonParts,
    memory: MemoryParts,
    access: AccessParts,
    resolver: Resolver,
    pictures: PictureStore,
    salts: PrefixSalts,
    tickets: Tickets,
    tasks: Tasks,
) -> ServingParts:
    server = common.gateway.config.server
    limits = limits_for(server)
    bodies = BodyBudget(limits, str(common.state_dir.path))
    activity_file = ActivityRecorder(Path(server.record_activity)) if server.record_activity else None
    prefetch = Prefetch(common.state, memory.watch.host_available_mib, common.observer)
    picture_urls = PictureAnswers(PictureServices(pictures, bodies, common.gateway))
    reader = Reader(
        resolver, common.catalog, access.tenants, access.limiter, tasks, salts, common.gateway, picture_urls
    )
    log = RequestLog(
        common.activity,
        common.metrics,
        None if activity_file is None else activity_file.add,
        access.counts,
        access.client_stats,
    )
    inference = Inference(reader, common.loop, tickets, log, prefetch)
    return ServingParts(activity_file, prefetch, inference, bodies, EdgeState(limits))


@dataclass(frozen=True, slots=True)
class FrontParts:
    access: AccessParts
    serving: ServingParts
    tasks: Tasks
    management: AsgiBridge
    door: Door
    edge: Edge
    # None without a port of their own.
    metrics_edge: Edge | None

    def configure(self, config: Config, look: Look | None = None) -> None:
        """Apply the configuration: at the start, and again at each reload. `look` is one at its key file."""
        server = config.server
        self.serving.inference.configure(config)
        self.access.tenants.are_named = server.multi_tenant
        self.access.client_stats.configure(config.clients)
        self.tasks.configure(config)
        self.door.serves_ui = server.ui
        hosts = (server.host, *server.allowed_hosts)
        self.door.hosts = HostRule(hosts, server.allowed_origins, public_url=server.public_url)
        self.access.keys.use(server, look)
        self.use_keys(config)

    def use_keys(self, config: Config) -> None:
        """Use the keys that there are at present, with their limits."""
        self.door.keys = self.access.keys.keys
        self.access.limiter.configure(config, self.door.keys)
        limiter = self.access.limiter
        self.door.limiter = limiter if limiter.is_on else None

    def use_changed_keys(self, config: Config) -> None:
        """The key file was read again."""
        self.use_keys(config)
        ring = self.access.keys
        for problem in ring.problems:
            _log.warning("the key file cannot be used as it is", problem=problem, keys_that_count=len(ring.of_file))
        if not ring.problems:
            _log.info("keys reread", file=ring.path, keys=len(ring.of_file))

    async def bind(self, server: Server) -> None:
        """Take the ports; connections wait until `accept`. Raises OSError, or ConfigError for `metrics_port`."""
        await self.edge.bind(server.host, server.port)
        if self.metrics_edge is None:
            return
        try:
            await self.metrics_edge.bind(server.host, server.metrics_port or 0)
        except OSError as error:
            where, why = f"{server.host}:{server.metrics_port}", error.strerror or error
            raise ConfigError(f"server.metrics_port: cannot listen on {where}: {why}. Choose another port.") from error

    async def accept(self) -> None:
        for edge in self._edges():
            await edge.accept()
        if self.metrics_edge is not None:
            _log.info("serving metrics", address=self.metrics_edge.addresses[0])

    async def close(self) -> None:
        """Stop accepting connections; running answers go on."""
        for edge in self._edges():
            await edge.close()

    def abort(self) -> None:
        """Cut every connection."""
        for edge in self._edges():
            edge.abort()

    def _edges(self) -> list[Edge]:
        return [self.edge] if self.metrics_edge is None else [self.edge, self.metrics_edge]


def wire_front(access: AccessParts, serving: ServingParts, gateway: Gateway) -> FrontParts:
    """Every other part of the gateway has been made."""
    inference, server = serving.inference, gateway.config.server
    application = make_management(gateway)
    management = AsgiBridge(application)
    later = AsyncRequests(gateway.jobs, serving.bodies, inference.ids.next, inference.refused)
    door = Door(inference, management, application, later)
    front = FrontParts(access, serving, gateway.tasks, management, door, *_edges(door, server, serving))
    front.configure(gateway.config)
    return front


def _edges(door: Door, server: Server, serving: ServingParts) -> tuple[Edge, Edge | None]:
    """The edge for callers, and the one for metrics if these have a port of their own."""
    edge = Edge(
        admit=door.admit,
        handle=door.handle,
        refuse=door.refuse,
        limits=serving.edge_state.limits,
        state=serving.edge_state,
        bodies=serving.bodies,
    )
    if edge.bodies.spools_to_memory:
        _log.warning(
            "state_dir lies in memory (tmpfs): large request bodies count towards server.bodies_memory_mib",
            state_dir=edge.bodies.spool_dir,
        )
    if not server.metrics or server.metrics_port is None:
        return edge, None
    return edge, Edge(admit=MetricsDoor(door).admit, handle=door.handle, refuse=door.refuse, limits=limits_for(server))


def _limits(common: CommonParts) -> tuple[Limiter, SharedLimits | None]:
    """Raises ConfigError if the client of the store is not installed."""
    config = common.gateway.config
    url = config.limits.store or config.leases.store
    if url is None:
        return Limiter(), None
    try:
        # Imported only if used: it is slow to import.
        from greenroom.access.shared_limits import SharedLimits
    except ImportError as error:
        raise ConfigError("limits.store needs the client for Redis: pip install 'greenroom[redis]'") from error

    def told(why: str | None) -> None:
        if why is not None:
            _log.warning("the store of limits cannot be used; this gateway holds its share", why=f"it {why}")
        else:
            _log.info("the store of limits is back")

    shared = SharedLimits(url, f"{common.state_dir.id}.{common.state_dir.run}", told)
    return Limiter(shared.window), shared
