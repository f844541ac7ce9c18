"""Which leasing a gateway has: leases that it keeps itself, or those of a store that it shares with others."""

from __future__ import annotations

import os

from greenroom.errors import ConfigError
from greenroom.features.leases.entry import LeasableMemory
from greenroom.features.leases.journal import JournalWriter
from greenroom.features.leases.local import LocalLeasing
from greenroom.features.leases.sharing import SharedLeasing, Sharing
from greenroom.leases.records import holder_of
from greenroom.leases.shared.store import Membership
from greenroom.runtime.memory.devices import DeviceNames
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.shell import Shell


def make_leasing(shell: Shell, watch: MemoryWatch, names: DeviceNames) -> LocalLeasing | SharedLeasing:
    """Raises ConfigError if the client of the shared store is not installed."""
    section, loop, hub = shell.config.leases, shell.loop, shell.hub
    memory, wait_max_s, url = LeasableMemory(loop, names, watch), section.wait_max_s, section.store
    if url is None:
        return LocalLeasing(loop, JournalWriter(shell.state_dir.path), memory, hub, wait_max_s=wait_max_s)
    try:
        # Imported only if used: it is slow to import.
        from greenroom.features.leases.renewer import RenewerProcess
        from greenroom.leases.shared.redis_store import RedisStore
    except ImportError as error:
        raise ConfigError("leases.store needs the client of Redis: pip install 'greenroom[redis]'.") from error
    host, ttl_s = section.host or os.uname().nodename, section.ttl_s
    store = RedisStore(url, host, ttl_s=ttl_s, renewer=RenewerProcess(url, host, ttl_s))
    member = Membership(store, shell.state_dir.run_name, ttl_s, holder_of(os.getpid()))
    sharing = Sharing(member, loop, watch, hub)
    return SharedLeasing(store, wait_max_s=wait_max_s, memory=memory, sharing=sharing)
