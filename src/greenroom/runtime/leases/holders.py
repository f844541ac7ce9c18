"""Processes of this machine that hold leases: their end is heard of at once.

Owns one pidfd for each. Where a process cannot be watched (another machine, a container with its own numbers) nothing
is promised, and its lease ends when it is not heard of in time. Never signals anybody.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from greenroom.leases import holder as holders
from greenroom.leases.records import Holder


class Holders:
    def __init__(self) -> None:
        self._watched: dict[str, int] = {}

    def watch(self, lease: str, holder: Holder, on_end: Callable[[], None]) -> None:
        """Call `on_end` when this process has ended, at once or later; never where that cannot be known."""
        if not holders.is_here(holder):
            return
        try:
            pidfd = os.pidfd_open(holder.pid)
        except ProcessLookupError:
            asyncio.get_running_loop().call_soon(on_end)
            return
        except OSError:
            # An old kernel, or no more descriptors: the lease still ends in time if nobody renews it.
            return
        # Looked at after it was opened, because until then the number could become somebody else's.
        if not holders.is_alive(holder):
            os.close(pidfd)
            asyncio.get_running_loop().call_soon(on_end)
            return
        self._watched[lease] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, on_end)

    def forget(self, lease: str) -> None:
        pidfd = self._watched.pop(lease, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        for lease in list(self._watched):
            self.forget(lease)
