"""Leases: kept by this gateway itself, or in a store that it shares with other gateways.

Owns which of the two it is, and which object the scheduler and moves use for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from greenroom.config.schema import Config
from greenroom.errors import ConfigError
from greenroom.leases.holder import holder_of
from greenroom.leases.shared.store import Membership, SharedStore
from greenroom.runtime.leases.journal_writer import JournalWriter
from greenroom.runtime.leases.local import LocalLeasing
from greenroom.runtime.leases.making_room import MakingRoom
from greenroom.runtime.leases.refusals import LeasableMemory
from greenroom.runtime.leases.shared_leasing import SharedLeasing
from greenroom.runtime.leases.sharing import Sharing
from greenroom.runtime.moves.admission import AlwaysGranted, Grants
from greenroom.wiring.common import CommonParts
from greenroom.wiring.memory import MemoryParts


@dataclass(frozen=True, slots=True)
class LeaseParts:
    own: LocalLeasing
    """The leases kept here; none if a store is shared."""
    leasing: LocalLeasing | SharedLeasing
    """Serves the lease API."""
    sharing: Sharing | None = None

    @property
    def room(self) -> LocalLeasing | MakingRoom:
        """Takes the scheduler's decisions on leases."""
        return self.own if self.sharing is None else self.sharing.room

    @property
    def grants(self) -> Grants:
        """Asked by moves before they take memory."""
        return AlwaysGranted() if self.sharing is None else self.sharing.slots

    def begin(self) -> None:
        """Enter the leases of an earlier run, or wait for the store: that memory is in use."""
        if self.sharing is None:
            self.own.restore()
        else:
            self.sharing.begin()


def wire_leases(common: CommonParts, memory: MemoryParts, config: Config) -> LeaseParts:
    """Raises ConfigError if the client of the shared store is not installed."""
    own = LocalLeasing(
        memory.watch.post_and_look,
        common.clock,
        JournalWriter(common.state_dir.path),
        LeasableMemory(common.state, memory.device_names.id_of, memory.watch.room_for),
        wait_max_s=config.leases.wait_max_s,
        tell=common.hub.publish,
    )
    if config.leases.store is None:
        return LeaseParts(own, own)
    return _shared(common, memory, config, config.leases.store, own)


def _shared(common: CommonParts, memory: MemoryParts, config: Config, url: str, own: LocalLeasing) -> LeaseParts:
    store = _open_store(config, url)
    name = f"{common.state_dir.id}.{common.state_dir.run}"
    member = Membership(store, name, config.leases.ttl_s, holder_of(os.getpid()))
    sharing = Sharing(member, common.state, memory.watch.post_and_look, common.clock, memory.watch, common.hub.publish)
    leasing = SharedLeasing(
        store,
        wait_max_s=config.leases.wait_max_s,
        device_named=memory.device_names.id_of,
        room_for=memory.watch.room_for,
        known=lambda: sharing.leases,
    )
    return LeaseParts(own, leasing, sharing)


def _open_store(config: Config, url: str) -> SharedStore:
    """The store at this address. Raises ConfigError if its client is not installed."""
    try:
        # Imported only if used: it is slow to import.
        from greenroom.leases.shared.redis_store import RedisStore
    except ImportError as error:
        raise ConfigError("leases.store needs the client of Redis: pip install 'greenroom[redis]'.") from error
    return RedisStore(url, config.leases.host or os.uname().nodename, ttl_s=config.leases.ttl_s)
