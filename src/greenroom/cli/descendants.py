"""A program and everything it started, to be ended together.

Owns a descriptor for each process, so that a number that is used again by another is never signalled. Processes that
left the tree before it was looked at are not found.
"""

from __future__ import annotations

import os
import select
import signal
import time
from typing import Final

from greenroom.process import proc

# Shells and launchers start others for them; more than this is no program under a lease.
PROCESSES_MAX: Final = 1_000


class Descendants:
    def __init__(self, root: int) -> None:
        self._root = root
        self._pidfds: dict[int, int] = {}

    def send(self, number: signal.Signals) -> None:
        """To every one that is there now, and to those found before whose parent has left them."""
        for pid in (self._root, *proc.below(self._root)):
            self._open(pid)
        for pidfd in self._pidfds.values():
            try:
                signal.pidfd_send_signal(pidfd, number)
            except OSError:
                # It has ended, or has become somebody else's to end.
                continue

    def wait(self, until: float) -> bool:
        """Wait for their end, by the clock that is never set. False if some are there still."""
        for pidfd in self._pidfds.values():
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            if not ended.poll(max(0.0, until - time.monotonic()) * 1000):
                return False
        return True

    def close(self) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()

    def _open(self, pid: int) -> None:
        if pid in self._pidfds or len(self._pidfds) >= PROCESSES_MAX:
            return
        try:
            self._pidfds[pid] = os.pidfd_open(pid)
        except OSError:
            # It has ended meanwhile, or there are no more descriptors: then it is found again by the next signal.
            return
