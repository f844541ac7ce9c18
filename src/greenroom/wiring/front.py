"""The front: the HTTP edge, the door behind it, inference and the management API.

Owns how these are made and joined, and how they open together. Settings are read from the gateway at each request: a
reload replaces the configuration as a whole.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from greenroom.config.schema import Config
from greenroom.http.edge import Edge
from greenroom.http.limits import limits_for
from greenroom.runtime.moves.model_files import Prefetch
from greenroom.runtime.operations.files import Operation, OperationFiles
from greenroom.runtime.operations.table import KeepLimits, OperationTable
from greenroom.runtime.record.recording import ActivityRecorder
from greenroom.runtime.tickets import Tickets
from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.management import make_management
from greenroom.server.asgi import AsgiBridge
from greenroom.server.front import FrontDoor, HostRule
from greenroom.server.inference.ask import AskReader, Settings
from greenroom.server.inference.job_routes import AsyncRequests
from greenroom.server.inference.jobs import Jobs, JobServices
from greenroom.server.inference.requests import Inference, RequestLog
from greenroom.telemetry.logs import get_logger
from greenroom.tenancy.keys import Keys
from greenroom.tenancy.tenants import Tenants
from greenroom.wiring.common import CommonParts, MemoryParts

_log = get_logger("server")


@dataclass(frozen=True, slots=True)
class FrontParts:
    activity_file: ActivityRecorder | None
    prefetch: Prefetch
    inference: Inference
    management: AsgiBridge
    door: FrontDoor
    edge: Edge
    operations: OperationTable
    jobs: Jobs

    def configure(self, config: Config) -> None:
        """Apply the configuration: at the start, and again at each reload."""
        server = config.server
        self.inference.configure(Settings.of(config))
        self.door.keys = Keys(server.api_keys)
        self.door.hosts = HostRule((server.host, *server.allowed_hosts), server.allowed_origins)


def wire_front(common: CommonParts, memory: MemoryParts, tickets: Tickets, gateway: Gateway) -> FrontParts:
    server = gateway.config.server
    activity_file = ActivityRecorder(Path(server.record_activity)) if server.record_activity else None
    prefetch = Prefetch(
        common.state,
        memory.watch.host_available_mib,
        common.observer.prefetched,
    )
    inference = Inference(
        AskReader(common.catalog, Tenants()),
        common.loop,
        tickets,
        RequestLog(common.activity, common.metrics, None if activity_file is None else activity_file.add),
        Settings.of(gateway.config),
        common.clock,
        prefetch.waits,
    )
    application = make_management(gateway)
    management = AsgiBridge(application)
    door = FrontDoor(inference, management, application.needs)
    edge = Edge(
        admit=door.admit,
        handle=door.handle,
        refuse=door.refuse,
        limits=limits_for(server),
        spool_dir=str(common.state_dir.path),
    )
    if edge.bodies.spools_to_memory:
        _log.warning(
            "state_dir lies in memory (tmpfs): large request bodies count towards server.bodies_memory_mib",
            state_dir=str(common.state_dir.path),
        )
    table = _operations(common, gateway)
    jobs = Jobs(
        table,
        JobServices(
            inference,
            edge.bodies,
            edge.state,
            lambda name: door.keys.named(name),
            lambda: gateway.config.jobs.keep_s,
            lambda: gateway.config.scheduler.queue_depth_max,
            lambda: gateway.is_draining,
            common.loop.scheduler.learned,
            time.time,
        ),
    )
    door.jobs = AsyncRequests(jobs, edge.bodies, inference.next_id, inference.refused)
    front = FrontParts(activity_file, prefetch, inference, management, door, edge, table, jobs)
    front.configure(gateway.config)
    return front


MIB = 1024 * 1024


def _operations(common: CommonParts, gateway: Gateway) -> OperationTable:
    def limits() -> KeepLimits:
        jobs = gateway.config.jobs
        return KeepLimits(jobs.keep_s, jobs.count_max, jobs.store_mib * MIB)

    def publish(row: Operation) -> None:
        about = {"id": row.id, "status": row.status.value, "model": row.model, "route": row.route, "tenant": row.tenant}
        common.hub.publish(row.kind.value, about | {"error": None if row.error is None else row.error.code})

    return OperationTable(OperationFiles(common.state_dir.path / "jobs"), limits, publish)
