"""Arenas: the host memory in which the weights of a hosted slot lie, held here and lent to its worker.

Owns the descriptor. It is a file that exists only in memory, so that it outlives a worker that crashes, needs no room
in /dev/shm, and is gone when the last who holds it has let go. Never looks inside: the worker fills it.
"""

from __future__ import annotations

import os


class Arena:
    def __init__(self, name: str) -> None:
        """Empty at first. Raises OSError when there is no descriptor left."""
        self._name = f"greenroom-{name}"
        self.fd = os.memfd_create(self._name, os.MFD_CLOEXEC)
        # Filled whole, by a worker that said so: any other worker can take it over as it is.
        self.is_filled = False

    @property
    def size_bytes(self) -> int:
        return 0 if self.fd < 0 else os.fstat(self.fd).st_size

    def empty(self) -> None:
        """Give back what a worker that ended in the middle has left in it. Raises OSError as the first time.

        The next one gets another file: a process that the last one has left behind may still write to the old one.
        """
        self.is_filled = False
        fresh = os.memfd_create(self._name, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, 0)
        os.close(self.fd)
        self.fd = fresh

    def close(self) -> None:
        """May be called again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
