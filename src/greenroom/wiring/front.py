"""The front: the HTTP edge, the door behind it, inference and the management API.

Owns how these are made and joined, and how they open together. Whose they are is read afresh at each request: a reload
replaces the configuration as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from greenroom.config.schema import Server
from greenroom.http.edge import Edge
from greenroom.http.limits import limits_for
from greenroom.runtime.moves.model_files import Prefetch
from greenroom.runtime.record.recording import ActivityRecorder
from greenroom.runtime.tickets import Tickets
from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.management import make_management
from greenroom.server.asgi import AsgiBridge
from greenroom.server.front import FrontDoor, HostRule
from greenroom.server.inference.ask import AskReader
from greenroom.server.inference.requests import Inference
from greenroom.server.inference.settings import Settings
from greenroom.telemetry.logs import get_logger
from greenroom.tenancy.keys import Keys
from greenroom.tenancy.tenants import Tenants
from greenroom.wiring.common import CommonParts
from greenroom.wiring.memory import MemoryParts

_log = get_logger("server")


class ServedGateway(Gateway, Protocol):
    """The gateway whose front this is."""

    @property
    def settings(self) -> Settings: ...


@dataclass(frozen=True, slots=True)
class FrontParts:
    activity_file: ActivityRecorder | None
    prefetch: Prefetch
    inference: Inference
    management: AsgiBridge
    door: FrontDoor
    edge: Edge

    def admit(self, server: Server) -> None:
        """Who may come in, and under which names; also anew at a reload."""
        self.door.keys = Keys(server.api_keys)
        self.door.hosts = HostRule((server.host, *server.allowed_hosts), server.allowed_origins)


def wire_front(common: CommonParts, memory: MemoryParts, tickets: Tickets, gateway: ServedGateway) -> FrontParts:
    server = gateway.config.server
    activity_file = ActivityRecorder(Path(server.record_activity)) if server.record_activity else None
    prefetch = Prefetch(
        common.state,
        lambda: memory.watch.last.reading.host.available_mib,
        common.observer.prefetched,
    )
    inference = Inference(
        _reader(common, gateway),
        common.loop,
        tickets,
        common.activity,
        common.metrics,
        lambda: gateway.settings,
        common.clock,
        None if activity_file is None else activity_file.add,
        prefetch.waits,
    )
    application = make_management(gateway)
    management = AsgiBridge(application)
    door = FrontDoor(inference, management, application.needs, lambda: gateway.settings)
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
    front.admit(server)
    return front


def _reader(common: CommonParts, gateway: ServedGateway) -> AskReader:
    return AskReader(
        common.catalog,
        Tenants(),
        lambda: gateway.settings.heartbeat,
        lambda: gateway.config.scheduler.keep_alive_max_s,
    )
