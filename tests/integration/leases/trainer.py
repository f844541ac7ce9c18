"""A program that trains: it holds a lease, takes its memory on the GPU it was given, and says what happens to it.

Run as a process of its own: `trainer.py STORE_URL HOST MIB TTL_S GPU_FILE PRIORITY`. It says "holds TOKEN", "full" if
the memory it was granted was not there, and "lost". A line on its standard input ends it in good order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]


class Trainer:
    """The process, as a test sees it."""

    def __init__(self, url: str, host: str, mib: int, ttl_s: float, gpus: Path, priority: str) -> None:
        # Not with its folder before the standard library: a test beside it may be named like one of its modules.
        argv = [sys.executable, "-P", __file__, url, host, str(mib), str(ttl_s), str(gpus), priority]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.said: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())

    @property
    def holds(self) -> bool:
        return any(line.startswith("holds") for line in self.said)

    @property
    def token(self) -> int:
        return int(next(line for line in self.said if line.startswith("holds")).split()[1])

    def finish(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("done\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@contextmanager
def trainer(
    url: str, host: str, mib: int, gpus: Path, *, ttl_s: float = 1.0, priority: str = "normal"
) -> Iterator[Trainer]:
    one = Trainer(url, host, mib, ttl_s, gpus, priority)
    try:
        yield one
    finally:
        one.kill()


def main() -> None:
    import greenroom
    from greenroom.leases import client
    from greenroom.leases.shared.redis_store import RedisStore
    from tests.standins import fake_gpu

    url, _, mib, ttl_s, gpus, priority = sys.argv[1:]
    # A new store grants nothing for as long as a lease may last; that is the same short time in all tests.
    client._redis_store = lambda url, host: RedisStore(url, sys.argv[2], ttl_s=float(ttl_s))
    done = threading.Event()
    threading.Thread(target=_hear, args=(done,), daemon=True).start()
    with greenroom.lease(int(mib), name="train", priority=priority, ttl_s=float(ttl_s), wait_s=300, url=url) as lease:
        os.environ["CUDA_VISIBLE_DEVICES"] = lease.cuda_visible_devices
        _say("holds" if fake_gpu.take(gpus, int(mib)) else "full", lease.token)
        while not done.wait(0.02):
            if lease.is_over:
                _say("lost")
                done.wait()
        fake_gpu.leave(gpus)


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def _hear(done: threading.Event) -> None:
    sys.stdin.readline()
    done.set()


if __name__ == "__main__":
    main()
