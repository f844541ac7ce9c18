"""What remote models cost and when they may be fallen back to, kept here or shared with other gateways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenroom.config.diff import Changes
from greenroom.config.part import Apply, Part
from greenroom.config.schema import Config
from greenroom.errors import ConfigError
from greenroom.runtime.remote.fallback import CloudFallback
from greenroom.runtime.remote.spending import Spending
from greenroom.runtime.shell import Shell

if TYPE_CHECKING:
    from greenroom.runtime.remote.shared import SharedRemote


class Remote(Part):
    writes = True

    def __init__(self, shell: Shell) -> None:
        """Raises ConfigError if the client of the shared store is not installed."""
        folder = shell.state_dir.path
        self.spending, self.fallback = Spending(folder), CloudFallback(folder)
        # None where no store is shared with other gateways.
        self._shared: SharedRemote | None = None
        url = shell.config.limits.store or shell.config.leases.store
        if url is None:
            return
        try:
            # Imported only if used: it is slow to import.
            from greenroom.runtime.remote.shared import SharedRemote
        except ImportError as error:
            raise ConfigError("limits.store needs the client for Redis: pip install 'greenroom[redis]'") from error
        # By a name that stays over restarts: its sums of today are counted once.
        self._shared = SharedRemote(url, shell.state_dir.id, self.spending, self.fallback, shell.live)

    async def open(self) -> None:
        """Read the files, then hear what other gateways have to tell. Raises ConfigError."""
        self.spending.open()
        self.fallback.open()
        if self._shared is not None:
            await self._shared.open()

    async def draft(self, new: Config, changes: Changes) -> Apply:
        return await self.spending.look_again()

    async def close(self) -> None:
        try:
            if self._shared is not None:
                await self._shared.close()
        finally:
            await self.spending.close()
