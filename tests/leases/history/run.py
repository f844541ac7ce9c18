"""One run of the history test: programs, faults, an observer, and the end in which all must be well.

Also a program: `python -m tests.leases.history.run --seconds 300` prints what happened.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from greenroom.errors import GreenroomError
from greenroom.leases.records import Lease, LeaseAsk
from greenroom.leases.shared.redis_store import RedisStore
from tests.leases.history import checker
from tests.leases.history.client import BUSY
from tests.leases.history.events import DEVICES, GPU_MIB, HOST, Event, Log, read
from tests.leases.history.nemesis import Nemesis
from tests.leases.history.proxy import Proxy
from tests.redis_server import RedisServer, redis_server

CLIENTS = 8
TTL_S = 2.0
LOOK_EVERY_S = 0.25
# When the faults are over, programs still release what they hold, and what dead ones held lapses.
SETTLE_S = 60.0
_ROOT = Path(__file__).resolve().parents[3]


class ClientProgram:
    """One client, and its successors after it was killed."""

    def __init__(self, name: str, proxy: Proxy, ends_at: float, seed: int, folder: Path) -> None:
        self.name = name
        self.proxy = proxy
        self._ends_at = ends_at
        self._seed = seed
        self._folder = folder
        self._lives = 0
        self._process = self._spawned()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def replace(self) -> None:
        self._process.wait()
        self._process = self._spawned()

    async def ended(self, timeout_s: float) -> int | None:
        try:
            return await asyncio.to_thread(self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _spawned(self) -> subprocess.Popen[bytes]:
        self._lives += 1
        name = f"{self.name}.{self._lives}"
        log = self._folder / f"{name}.jsonl"
        argv = [sys.executable, "-m", "tests.leases.history.client", "--name", name, "--url", self.proxy.url]
        argv += ["--ttl-s", str(TTL_S), "--ends-at", str(self._ends_at), "--seed", str(self._seed + self._lives)]
        # Ignored until the program heeds it.
        ignore = partial(signal.signal, BUSY, signal.SIG_IGN)
        return subprocess.Popen([*argv, "--log", str(log)], cwd=_ROOT, env=os.environ, preexec_fn=ignore)


@dataclass(frozen=True, slots=True)
class Result:
    wrong: list[str]
    faults: dict[str, int]
    counts: dict[str, int]
    said: dict[str, int]

    def told(self) -> str:
        lines = ["faults:", *(f"  {kind:12} {count}" for kind, count in sorted(self.faults.items()))]
        lines += ["operations:", *(f"  {kind:16} {count}" for kind, count in sorted(self.counts.items()))]
        lines += ["what programs were told when there was no answer:"]
        lines += [f"  {count:6} {text}" for text, count in sorted(self.said.items())]
        return "\n".join([*lines, f"wrong: {len(self.wrong)}", *(f"  {text}" for text in self.wrong)])


async def run(folder: Path, seconds: float, seed: int) -> Result:
    logs = folder / "logs"
    logs.mkdir()
    log = Log(logs / "runner.jsonl")
    with redis_server(folder / "redis", has_own_clock=True) as server:
        ends_at = time.monotonic() + seconds
        proxies = [Proxy(server.port) for _ in range(CLIENTS)]
        for proxy in proxies:
            await proxy.start()
        programs = [
            ClientProgram(f"c{n}", proxy, ends_at, seed * 1_000 + n * 100, logs) for n, proxy in enumerate(proxies)
        ]
        nemesis = Nemesis(server, list(programs), TTL_S, seed, log)
        watcher = asyncio.create_task(_watch(server, log), name="watcher")
        try:
            await nemesis.rage(ends_at)
            codes = [await program.ended(SETTLE_S) for program in programs]
            log.note(await _end(server, codes))
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            for program in programs:
                program.kill()
            for proxy in proxies:
                await proxy.close()
    events = read(logs)
    counts = collections.Counter(f"{event.op} {event.phase}" for event in events)
    said = collections.Counter(
        event.text.replace(str(server.port), "…") for event in events if event.phase == "unknown"
    )
    return Result(checker.check(events, DEVICES), nemesis.counts, dict(counts), _by_meaning(said))


def _by_meaning(said: collections.Counter[str]) -> dict[str, int]:
    """Without the address, which differs from program to program."""
    found: collections.Counter[str] = collections.Counter()
    for text, count in said.items():
        found[text.partition("/0 ")[2] or text] += count
    return dict(found)


async def _watch(server: RedisServer, log: Log) -> None:
    """Look at all leases again and again, directly."""
    store = RedisStore(server.url, HOST, ttl_s=TTL_S)
    try:
        while True:
            began = time.monotonic()
            with contextlib.suppress(GreenroomError):
                for lease in await store.leases():
                    log.note(_seen(lease, began))
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        await store.close()


def _seen(lease: Lease, began: float) -> Event:
    now, claim = time.monotonic(), dict(lease.claim)
    return Event(now, "watcher", "seen", lease.state, lease.id, lease.token, lease.ttl_s, claim, f"{began:.6f}")


async def _end(server: RedisServer, codes: list[int | None]) -> Event:
    """All programs have ended well, nothing is held any more, and everything can be had at once."""
    store = RedisStore(server.url, HOST, ttl_s=TTL_S, offers=DEVICES)
    try:
        lease = await store.acquire(LeaseAsk("end", "end", GPU_MIB, gpus=len(DEVICES), priority=9, wait_s=SETTLE_S))
        left = [one.id for one in await store.leases() if one.id != lease.id]
        is_well = not left and codes == [0] * CLIENTS
        return Event(
            time.monotonic(), "runner", "end", "ok" if is_well else "refused", text=f"left {left}, ended {codes}"
        )
    except GreenroomError as error:
        return Event(time.monotonic(), "runner", "end", "refused", text=error.message)
    finally:
        await store.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="greenroom-history-") as folder:
        result = asyncio.run(run(Path(folder), given.seconds, given.seed))
    sys.stdout.write(f"{CLIENTS} programs, {given.seconds:.0f} s, seed {given.seed}, TTL {TTL_S} s\n{result.told()}\n")
    raise SystemExit(1 if result.wrong else 0)


if __name__ == "__main__":
    main()
