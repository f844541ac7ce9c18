"""Arenas: what a worker that ended has left is given back, and nothing that lags behind writes to what comes next."""

from __future__ import annotations

import os

from greenroom.runtime.workers.hosted_slots import Arena


def test_the_next_worker_fills_another_file_than_the_one_that_ended_in_the_middle() -> None:
    arena = Arena("s1")
    straggler = os.dup(arena.fd)
    os.ftruncate(straggler, 8192)
    arena.empty()
    assert os.fstat(straggler).st_size == arena.size_bytes == 0
    # Also where the worker itself had emptied it.
    os.pwrite(straggler, b"late", 0)
    assert arena.size_bytes == 0
    os.close(straggler)
    arena.close()
    arena.close()
