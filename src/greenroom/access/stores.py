"""Which stores of access a gateway has: of limits that it shares with others, and of usage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenroom.access.usage_store import UsageStore
from greenroom.config.limits import is_named
from greenroom.errors import ConfigError
from greenroom.runtime.shell import Shell
from greenroom.telemetry.activity import UsageCounts
from greenroom.telemetry.logs import get_logger

if TYPE_CHECKING:
    from greenroom.access.shared_limits import SharedLimits

_log = get_logger("server")


def make_usage(shell: Shell) -> UsageStore | None:
    """None if no usage is kept."""
    if not (days := shell.config.server.usage_days):
        return None
    return UsageStore(shell.state_dir.path, UsageCounts(lambda tenant: is_named(shell.config, tenant)), days)


def make_shared_limits(shell: Shell) -> SharedLimits | None:
    """None if this gateway shares no limits. Raises ConfigError if the client of the store is not installed."""
    url = shell.config.limits.store or shell.config.leases.store
    if url is None:
        return None
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

    return SharedLimits(url, shell.state_dir.run_name, told)
