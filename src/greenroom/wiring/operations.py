"""Operations that take a while: loads that an operator orders, and updates of models under version control.

Owns how these are made and joined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from greenroom.library.library import Library
from greenroom.library.versions import VersionStore
from greenroom.runtime.operations.loads import LINES_READ, Loads, LoadServices
from greenroom.runtime.operations.moves import OperatorMoves
from greenroom.runtime.operations.updates import Updates
from greenroom.runtime.operations.version_changes import UpdateServices
from greenroom.runtime.operations.warm_up import WarmUp
from greenroom.runtime.operations.weights import VersionWeights
from greenroom.runtime.tickets import Tickets
from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.models.loads import gpu_mib
from greenroom.wiring.common import CommonParts
from greenroom.wiring.front import FrontParts


def wire_loads(common: CommonParts, front: FrontParts, moves: OperatorMoves, gateway: Gateway) -> Loads:
    services = LoadServices(
        gateway.resolver,
        front.downloads,
        moves,
        lambda: gateway.config.library.download,
        lambda: common.loop.scheduler.view,
        lambda model: gpu_mib(gateway, model),
        common.hosted_slots.progress_of,
        lambda model: common.slots.log(model).tail(LINES_READ),
        common.clock,
    )
    return Loads(front.operations, services)


@dataclass(frozen=True, slots=True)
class Updating:
    """What only updates need. `unchanging` is held while the configuration must not change.

    `forgotten` is called when a version has left, so that what others keep of it can go too.
    """

    library: Library
    store: VersionStore
    tickets: Tickets
    unchanging: asyncio.Lock
    forgotten: Callable[[], None]


def wire_updates(
    common: CommonParts, front: FrontParts, moves: OperatorMoves, gateway: Gateway, updating: Updating
) -> Updates:
    services = UpdateServices(
        config=lambda: gateway.config,
        catalog=common.catalog,
        store=updating.store,
        weights=VersionWeights(updating.library, front.downloads),
        moves=moves,
        warm_up=WarmUp(updating.tickets, common.clock),
        slots=common.slots,
        hosted_slots=common.hosted_slots,
        post=common.post,
        clock=common.clock,
        learned=common.loop.scheduler.learned,
        unchanging=updating.unchanging,
        is_draining=lambda: gateway.is_draining,
        forgotten=updating.forgotten,
        view=lambda: common.loop.scheduler.view,
        until=common.loop.until,
    )
    return Updates(front.operations, services)
