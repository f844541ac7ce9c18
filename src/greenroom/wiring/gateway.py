"""All parts of a running gateway that its routes need, by name. `routes.py` gives each route those it uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from greenroom.api.reports.configuration import ConfigFile
from greenroom.api.shell import Overview
from greenroom.features.operations.load_routes import Pinning
from greenroom.features.operations.routes import PrefixCaches, Reloading

if TYPE_CHECKING:
    from greenroom.access.client_stats import ClientStats
    from greenroom.access.limits import Limiter
    from greenroom.access.usage_store import UsageStore
    from greenroom.features.governance.gate import GovernanceGate
    from greenroom.features.jobs.jobs import Jobs
    from greenroom.features.leases.local import LocalLeasing
    from greenroom.features.leases.sharing import SharedLeasing
    from greenroom.features.library.downloads import Downloads
    from greenroom.features.operations.loads import Loads
    from greenroom.features.operations.moves import OperatorMoves
    from greenroom.features.pictures.store import PictureStore
    from greenroom.features.versions.updates import Updates
    from greenroom.http.body import BodyBudget
    from greenroom.library.library import Library
    from greenroom.runtime.loop import Tickets
    from greenroom.runtime.remote.fallback import CloudFallback
    from greenroom.runtime.remote.spending import Spending
    from greenroom.serving.prefix_cache import PrefixSalts
    from greenroom.telemetry.history import History


class Gateway(Overview, ConfigFile, Reloading, Pinning, PrefixCaches, Protocol):
    """`app.py` passes in the real gateway, tests a small one with real tables."""

    library: Library
    tickets: Tickets
    leasing: LocalLeasing | SharedLeasing
    operations: OperatorMoves
    loads: Loads
    downloads: Downloads
    updates: Updates
    jobs: Jobs
    pictures: PictureStore
    bodies: BodyBudget
    history: History
    usage: UsageStore | None
    """None where none is kept."""
    limiter: Limiter
    client_stats: ClientStats
    governance: GovernanceGate
    spending: Spending
    cloud_fallback: CloudFallback
    salts: PrefixSalts
    """By which engines keep prefixes apart that take a salt."""
