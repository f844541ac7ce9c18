"""Runs a program that kills itself at its nth write to disk, counted from when a certain file is there.

    python dies_at_write.py N TRIGGER PYTHON -m greenroom serve …

A write is counted twice: before it is synced, and after its file has its name. So no step in between is left out.
With the name of a file for N it kills itself when it is about to delete a file of this name.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from typing import Any

LOCK = threading.Lock()


def main() -> None:
    point, trigger = sys.argv[1], sys.argv[2]
    module, sys.argv = sys.argv[5], sys.argv[5:]
    count, fsync, replace, unlink = 0, os.fsync, os.replace, os.unlink

    def reached() -> None:
        nonlocal count
        with LOCK:
            if os.path.exists(trigger):
                count += 1
                if str(count) == point:
                    os.kill(os.getpid(), signal.SIGKILL)

    def dying_fsync(file: Any) -> None:
        reached()
        fsync(file)

    def dying_replace(*paths: Any, **keys: Any) -> None:
        replace(*paths, **keys)
        reached()

    def dying_unlink(path: Any, **keys: Any) -> None:
        if os.path.basename(path) == point:
            os.kill(os.getpid(), signal.SIGKILL)
        unlink(path, **keys)

    os.fsync, os.replace, os.unlink = dying_fsync, dying_replace, dying_unlink
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
