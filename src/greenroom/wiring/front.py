"""The front: the HTTP edge, the door behind it, inference and the management API.

Owns how these are made and joined, and how they open together. Settings are read from the gateway at each request: a
reload replaces the configuration as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.access.key_ring import KeyRing, Look
from greenroom.access.keys import Tenants
from greenroom.access.limits import Limiter
from greenroom.access.profiles import Profiles
from greenroom.access.requestors import Requestors
from greenroom.access.usage_store import UsageStore
from greenroom.api.asgi import AsgiBridge
from greenroom.api.front import FrontDoor, HostRule, MetricsDoor
from greenroom.api.gateway import Gateway
from greenroom.config.limits import is_named
from greenroom.config.schema import Config, Server
from greenroom.errors import ConfigError
from greenroom.features.jobs.jobs import Jobs
from greenroom.features.jobs.routes import AsyncRequests
from greenroom.features.library.downloads import Downloads
from greenroom.features.pictures.answers import PictureAnswers, PictureServices
from greenroom.features.pictures.store import PictureStore
from greenroom.features.versions.routes import meant
from greenroom.http.edge import Edge
from greenroom.http.limits import limits_for
from greenroom.runtime.loop import Tickets
from greenroom.runtime.moves.admission import Prefetch
from greenroom.runtime.operations.files import OperationFiles
from greenroom.runtime.operations.table import JobLimits, KeepLimits, OperationEvents, OperationTable
from greenroom.runtime.record.recording import ActivityRecorder
from greenroom.serving.ask import Settings
from greenroom.serving.ask_reader import AskReader
from greenroom.serving.request_log import RequestLog
from greenroom.serving.requests import Inference
from greenroom.serving.tasks import Tasks
from greenroom.telemetry.activity import UsageCounts
from greenroom.telemetry.logs import get_logger
from greenroom.wiring.common import CommonParts, MemoryParts
from greenroom.wiring.routes import make_management

if TYPE_CHECKING:
    from greenroom.access.shared_limits import SharedLimits

_log = get_logger("server")


@dataclass(frozen=True, slots=True)
class FrontParts:
    activity_file: ActivityRecorder | None
    prefetch: Prefetch
    inference: Inference
    management: AsgiBridge
    door: FrontDoor
    edge: Edge
    # None without a port of their own.
    metrics_edge: Edge | None
    operations: OperationTable
    jobs: Jobs
    pictures: PictureStore
    downloads: Downloads
    reader: AskReader
    limiter: Limiter
    shared_limits: SharedLimits | None
    tenants: Tenants
    requestors: Requestors
    tasks: Tasks
    # None if none is kept.
    usage: UsageStore | None
    keys: KeyRing

    def configure(self, config: Config, look: Look | None = None) -> None:
        """Apply the configuration: at the start, and again at each reload. `look` is one at its key file."""
        server = config.server
        self.inference.configure(Settings.of(config))
        self.tenants.are_named = server.multi_tenant
        self.requestors.configure(config.clients)
        self.reader.profiles = Profiles(config.profiles) if config.profiles else None
        self.tasks.configure(config)
        self.reader.tasks = self.tasks if self.tasks else None
        self.door.serves_ui = server.ui
        hosts = (server.host, *server.allowed_hosts)
        self.door.hosts = HostRule(hosts, server.allowed_origins, public_url=server.public_url)
        self.keys.use(server, look)
        self.use_keys(config)
        self.downloads.pump()

    def use_keys(self, config: Config) -> None:
        """Use the keys that there are at present, with their limits."""
        self.door.keys = self.keys.keys
        self.limiter.configure(config, self.door.keys)
        self.door.limiter = self.reader.limiter = self.limiter if self.limiter.is_on else None

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


def wire_front(common: CommonParts, memory: MemoryParts, tickets: Tickets, gateway: Gateway) -> FrontParts:
    server = gateway.config.server
    activity_file = ActivityRecorder(Path(server.record_activity)) if server.record_activity else None
    prefetch = Prefetch(common.state, memory.watch.host_available_mib, common.observer)
    tenants, requestors = Tenants(), Requestors(common.clock)
    counts = UsageCounts(lambda tenant: is_named(gateway.config, tenant)) if server.usage_days else None
    usage = None if counts is None else UsageStore(common.state_dir.path, counts, server.usage_days)
    reader = AskReader(gateway.resolver, common.catalog, tenants, gateway.salts, common.gateway)
    inference = Inference(
        reader,
        gateway.resolver,
        common.loop,
        tickets,
        RequestLog(
            common.activity,
            common.metrics,
            None if activity_file is None else activity_file.add,
            counts,
            requestors,
        ),
        Settings.of(gateway.config),
        prefetch,
    )
    reader.meant = lambda name, caller: meant(gateway.config, name, caller)
    application = make_management(gateway)
    management = AsgiBridge(application)
    door = FrontDoor(inference, management, application)
    edge, metrics_edge = _edges(door, server, str(common.state_dir.path))
    table = _operations(common)
    keys = KeyRing(lambda: _use_changed_keys(front, common))
    jobs = Jobs(table, inference, edge, keys, common.gateway, common.loop)
    door.jobs = AsyncRequests(jobs, edge.bodies, inference.ids.next, inference.refused)
    pictures = _pictures(common)
    reader.picture_urls = PictureAnswers(PictureServices(pictures, edge.bodies, common.gateway))
    downloads = Downloads(table, gateway.library, common.gateway)
    front = FrontParts(
        activity_file,
        prefetch,
        inference,
        management,
        door,
        edge,
        metrics_edge,
        table,
        jobs,
        pictures,
        downloads,
        reader,
        *_limits(common),
        tenants,
        requestors,
        gateway.tasks,
        usage,
        keys,
    )
    front.configure(common.gateway.config)
    return front


def _edges(door: FrontDoor, server: Server, spool_dir: str) -> tuple[Edge, Edge | None]:
    """The edge for callers, and the one for metrics if these have a port of their own."""
    edge = Edge(
        admit=door.admit, handle=door.handle, refuse=door.refuse, limits=limits_for(server), spool_dir=spool_dir
    )
    if edge.bodies.spools_to_memory:
        _log.warning(
            "state_dir lies in memory (tmpfs): large request bodies count towards server.bodies_memory_mib",
            state_dir=spool_dir,
        )
    if not server.metrics or server.metrics_port is None:
        return edge, None
    return edge, Edge(admit=MetricsDoor(door).admit, handle=door.handle, refuse=door.refuse, limits=limits_for(server))


def _use_changed_keys(front: FrontParts, common: CommonParts) -> None:
    front.use_keys(common.gateway.config)
    ring = front.keys
    for problem in ring.problems:
        _log.warning("the key file cannot be used as it is", problem=problem, keys_that_count=len(ring.of_file))
    if not ring.problems:
        _log.info("keys reread", file=ring.path, keys=len(ring.of_file))


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


MIB = 1024 * 1024


def _operations(common: CommonParts) -> OperationTable:
    def limits() -> JobLimits:
        jobs = common.gateway.config.jobs
        return JobLimits(jobs.keep_s, jobs.count_max, jobs.store_mib * MIB, jobs.unfinished_max)

    return OperationTable(OperationFiles(common.state_dir.path / "jobs"), limits, OperationEvents(common.hub))


def _pictures(common: CommonParts) -> PictureStore:
    def limits() -> KeepLimits:
        images = common.gateway.config.images
        return KeepLimits(images.keep_s, images.count_max, images.store_mib * MIB)

    return PictureStore(OperationFiles(common.state_dir.path / "pictures"), limits, common.clock)
