"""Every route of the management API, in the order in which they are asked."""

from __future__ import annotations

from greenroom.api.management import Docs, Management, empty_app
from greenroom.api.models.listing import Listing, ModelStatuses
from greenroom.api.remote import RemoteRoutes
from greenroom.api.reports.clients import ClientRoutes, LimitRoutes
from greenroom.api.reports.configuration import ConfigRoutes
from greenroom.api.reports.history import HistoryRoutes
from greenroom.api.reports.memory import Gpus
from greenroom.api.reports.snapshot import Snapshot
from greenroom.api.reports.streams import Streams
from greenroom.api.reports.usage import UsageRoutes
from greenroom.api.reports.watching import Watching
from greenroom.features.governance.governed import GovernedRoutes
from greenroom.features.governance.governed_models import GovernedModels
from greenroom.features.jobs.routes import JobRoutes
from greenroom.features.leases.routes import LeaseRoutes
from greenroom.features.library.download_routes import DownloadRoutes
from greenroom.features.library.ollama_routes import OllamaRoutes
from greenroom.features.library.routes import LibraryRoutes
from greenroom.features.operations.capabilities import CapabilityRoutes
from greenroom.features.operations.llama_swap_routes import LlamaSwapRoutes
from greenroom.features.operations.load_routes import LoadRoutes, PinRoutes
from greenroom.features.operations.native_routes import NativeRoutes
from greenroom.features.operations.routes import Caches, Operating
from greenroom.features.pictures.answers import PictureRoutes
from greenroom.features.planning.explain_routes import Explaining
from greenroom.features.planning.queue_routes import QueueRoutes
from greenroom.features.planning.simulate_routes import Simulating
from greenroom.features.versions.routes import VersionRoutes
from greenroom.wiring.gateway import Gateway


def make_management(gateway: Gateway, streams: Streams | None = None) -> Management:
    """`streams` counts the streams of events and logs; by default its own."""
    app = empty_app()
    began = gateway.clock()

    def uptime_s() -> float:
        # By the monotonic clock, which is never set.
        return gateway.clock() - began

    def look() -> Snapshot:
        return Snapshot(gateway, uptime_s())

    streams = streams or Streams(lambda: gateway.is_draining, gateway.clock)
    # Their paths come before those that take any id.
    DownloadRoutes(gateway.downloads).add_to(app)
    loads = LoadRoutes(gateway, gateway.loads)
    loads.add_to(app)
    NativeRoutes(gateway, loads, look).add_to(app)
    library = LibraryRoutes(gateway, gateway.library, gateway.loads, gateway.updates, look)
    library.add_to(app)
    Listing(gateway.catalog, gateway.resolver, gateway.tasks, look).add_to(app)
    OllamaRoutes(gateway, gateway.library, gateway.downloads, library, gateway.started_at, look).add_to(app)
    LlamaSwapRoutes(gateway, gateway.loads, gateway.updates, streams, look).add_to(app)
    CapabilityRoutes(gateway, gateway.library, gateway.loads, look).add_to(app)
    Watching(gateway, streams, look, uptime_s).add_to(app)
    Operating(gateway, gateway.loads, gateway.operations, gateway.updates, gateway, streams, look).add_to(app)
    ConfigRoutes(gateway).add_to(app)
    PinRoutes(gateway, gateway, gateway.updates).add_to(app)
    VersionRoutes(gateway, gateway.updates).add_to(app)
    QueueRoutes(gateway, gateway.tickets).add_to(app)
    HistoryRoutes(gateway, gateway.history).add_to(app)
    LimitRoutes(gateway.limiter).add_to(app)
    Explaining(gateway, gateway.leasing).add_to(app)
    Simulating(gateway).add_to(app)
    UsageRoutes(gateway.usage).add_to(app)
    ClientRoutes(gateway, gateway.client_stats).add_to(app)
    RemoteRoutes(gateway, gateway.spending, gateway.cloud_fallback).add_to(app)
    Gpus(gateway).add_to(app)
    LeaseRoutes(gateway, gateway.leasing).add_to(app)
    Caches(gateway, gateway.salts, gateway).add_to(app)
    JobRoutes(gateway.jobs, gateway.bodies).add_to(app)
    PictureRoutes(gateway.pictures, gateway.clock).add_to(app)
    Docs(app, gateway).add_to(app)
    # One of them takes any id, so it is asked last.
    ModelStatuses(gateway.catalog, gateway.tasks, look).add_to(app)
    models = GovernedModels(gateway, gateway.library, gateway.downloads, gateway.updates, library.users_of)
    governed = GovernedRoutes(app, gateway.governance, models)
    return Management(governed, governed.routes)
