"""The front: the HTTP edge, the door behind it, inference and the management API.

Owns how these are made and joined, and how they open together. Settings are read from the gateway at each request: a
reload replaces the configuration as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from greenroom.config.schema import Config
from greenroom.http.edge import Edge
from greenroom.http.limits import limits_for
from greenroom.runtime.moves.model_files import Prefetch
from greenroom.runtime.record.recording import ActivityRecorder
from greenroom.runtime.tickets import Tickets
from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.management import make_management
from greenroom.server.asgi import AsgiBridge
from greenroom.server.front import FrontDoor, HostRule
from greenroom.server.inference.ask import AskReader, Settings
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
    front = FrontParts(activity_file, prefetch, inference, management, door, edge)
    front.configure(gateway.config)
    return front
