"""Two real gateways that share a GPU which nothing measures, while each part in turn is stopped, stalled or cut off.

Each gateway has a pinned model, and only one of the two fits. So there is always one which the other gateway would load
if it could: an overlap is seen as two living engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from greenroom.leases.shared.renewer import NAME_IN_PS
from greenroom.process import proc
from tests.harness import GatewayProcess, write_config
from tests.integration.sharing_rig import HOST, described, grown_up, taking
from tests.leases.history.proxy import Proxy
from tests.redis_server import RedisServer, redis_server
from tests.waiting import until

GPU, GPU_MIB, MODEL_MIB = "gpu0", 10_000, 6_000
NAMES = ("one", "two")
TTL_S = 2.0
# A lease lapses a third of its TTL late, and only at the next look at it.
LAPSES_S = TTL_S * 4 / 3
OVERLAP_MAX_S = 2.0
LOOK_EVERY_S = 0.02
JUMPS_S = (3_600, -3_600, 365 * 86_400, 0)
GAVE_WAY = "another holder was granted the memory of a model, which leaves"
# Sent to a gateway, it holds its interpreter in one call of C, as a request can that is parsed at once.
STALL = signal.SIGUSR1
_STALLING = f"""
import ctypes, os, signal
def stall(number, frame):
    with open(os.environ["STALL_FILE"]) as file:
        ctypes.PyDLL(None).usleep(int(float(file.read()) * 1e6))
signal.signal({int(STALL)}, stall)
"""


@dataclass(slots=True)
class Fault:
    """What was broken, and from when to when. One that is harmless must not cost any engine its lease."""

    kind: str
    is_harmless: bool
    begins_at: float
    ends_at: float = float("inf")


@dataclass(slots=True)
class History:
    """`looks` are the engines of each moment that they changed: when, pid by gateway. `late_s`: the longest look."""

    faults: list[Fault] = field(default_factory=list)
    looks: list[tuple[float, dict[int, str]]] = field(default_factory=list)
    late_s: float = 0.0

    def overlaps(self, now: float) -> Iterator[tuple[float, float]]:
        """From when to when more than one engine lived."""
        ends = [at for at, _ in self.looks[1:]] + [now]
        begins_at: float | None = None
        for (at, engines), end in zip(self.looks, ends, strict=True):
            if len(engines) > 1 and begins_at is None:
                begins_at = at
            if begins_at is not None and (len(engines) < 2 or end == now):
                yield begins_at, at if len(engines) < 2 else now
                begins_at = None

    def wrong(self, now: float) -> list[str]:
        found = []
        for begins_at, ends_at in self.overlaps(now):
            causes = [one for one in self.faults if one.begins_at <= begins_at and not one.is_harmless]
            over_s = ends_at - max([begins_at, *(min(one.ends_at, now) for one in causes)])
            if over_s > OVERLAP_MAX_S + self.late_s or not causes:
                found.append(f"two engines for {over_s:.2f} s after the end of {causes[-1:] or 'nothing'}")
        return found


class Gateways:
    def __init__(self, folder: Path, redis: RedisServer, seed: int) -> None:
        self._random = random.Random(seed)
        self._folder = folder
        self._redis = grown_up(redis)
        # Engines note there that they live. There is room for all: nothing but leases keeps them apart.
        self._gpus = described(folder, (GPU, 10 * GPU_MIB))
        self.history = History()
        self.proxies = {name: Proxy(redis.port) for name in NAMES}
        self.gateways: dict[str, GatewayProcess] = {}
        self._jumped_at = 0.0
        self._stall_file = folder / "stall_s"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        (self._folder / "sitecustomize.py").write_text(_STALLING)
        inside = ("env", f"PYTHONPATH={self._folder}", f"STALL_FILE={self._stall_file}")
        watcher = asyncio.create_task(self._watch(), name="watcher")
        try:
            await asyncio.gather(*(self._start(name, inside) for name in NAMES))
            await until(lambda: self._engines(), "one of them is loaded")
            yield
        finally:
            for gateway in self.gateways.values():
                gateway.kill()
            watcher.cancel()
            for proxy in self.proxies.values():
                await proxy.close()
            assert all(gateway.nothing_left() for gateway in self.gateways.values()), "engines were left behind"

    async def _start(self, name: str, inside: Sequence[str]) -> None:
        await self.proxies[name].start()
        config = self._config(self._folder / name, name, self.proxies[name].url)
        self.gateways[name] = await asyncio.to_thread(GatewayProcess, config.parent, config, inside)

    def _config(self, folder: Path, name: str, store: str) -> Path:
        folder.mkdir()
        model = taking(name, self._gpus, MODEL_MIB, pinned=True, preload=True)
        gpus = [{"memory_mib": GPU_MIB, "margin_mib": 0}]
        leases = {"store": store, "host": HOST, "ttl_s": TTL_S}
        return write_config(folder, {name: model}, gpus=gpus, leases=leases)

    # --- what is seen -----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            if (engines := self._engines()) != (self.history.looks[-1][1] if self.history.looks else {}):
                self.history.looks.append((time.monotonic(), engines))
            await asyncio.sleep(LOOK_EVERY_S)
            self.history.late_s = max(self.history.late_s, time.monotonic() - began - LOOK_EVERY_S)

    def _engines(self) -> dict[int, str]:
        """Living engines, by pid, each with the name of its model, which is its gateway's."""
        folder = Path(f"{self._gpus}.d")
        pids = [int(name) for name in os.listdir(folder) if name.isdigit()] if folder.exists() else []
        return {pid: name for pid in pids if (name := _name_of(pid)) in NAMES}

    def holder(self) -> str:
        """The gateway whose model is loaded."""
        return next(iter(self._engines().values()), self._random.choice(NAMES))

    def said(self, event: str) -> int:
        lines = [line for gateway in self.gateways.values() for line in gateway.lines()]
        return sum(json.loads(line).get("event") == event for line in lines if line.startswith("{"))

    # --- what goes wrong --------------------------------------------------------------------------------------------

    async def rage(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        for fault, is_harmless in self._rounds():
            if time.monotonic() > ends_at:
                return
            before = self._engines()
            one = Fault(fault.__name__.strip("_"), is_harmless, time.monotonic())
            self.history.faults.append(one)
            await fault()
            one.ends_at = time.monotonic()
            # Whatever it has caused is over, and one of the two is loaded.
            await asyncio.sleep(OVERLAP_MAX_S)
            await until(lambda: len(self._engines()) == 1, f"one engine is left after {one}")
            if is_harmless:
                assert self._engines() == before, f"{one.kind} cost an engine its lease: {before} {self._engines()}"

    def _rounds(self) -> Iterator[tuple[Callable[[], Awaitable[None]], bool]]:
        harmless = [self._stalled_loop, self._stopped_gateway, self._stopped_renewer, self._killed_renewer]
        harmless += [self._stopped_redis, self._slow_redis, self._jumped_clock]
        faults = [(one, True) for one in harmless] + [(self._stopped_both, False), (self._cut_off, False)]
        while True:
            self._random.shuffle(faults)
            yield from faults

    def _longer(self) -> float:
        """Longer than a lease lasts."""
        return LAPSES_S + self._random.uniform(1.0, 2.5)

    async def _stalled_loop(self) -> None:
        seconds = self._longer()
        self._stall_file.write_text(str(seconds))
        os.kill(self._gateway(), STALL)
        await asyncio.sleep(seconds)

    async def _stopped_gateway(self) -> None:
        await self._stop([self._gateway()])

    async def _stopped_renewer(self) -> None:
        await self._stop([await self._renewer()])

    async def _stopped_both(self) -> None:
        await self._stop([self._gateway(), await self._renewer()])

    async def _killed_renewer(self) -> None:
        pid = await self._renewer()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: self._renewers() - {pid}, "there is another")

    async def _stopped_redis(self) -> None:
        self._redis.pause()
        await asyncio.sleep(self._longer())
        self._redis.go_on()

    async def _slow_redis(self) -> None:
        """A renewal takes a quarter of a TTL, there and back: a busy machine adds to it what it likes."""
        for proxy in self.proxies.values():
            proxy.delay_s = self._random.uniform(0.1, 0.25)
        await asyncio.sleep(self._longer())
        for proxy in self.proxies.values():
            proxy.flow()

    async def _jumped_clock(self) -> None:
        """One jump within a TTL takes nothing away, so there are never two."""
        await asyncio.sleep(max(0.0, self._jumped_at + 2 * TTL_S - time.monotonic()))
        self._redis.set_clock(self._random.choice(JUMPS_S))
        self._jumped_at = time.monotonic()

    async def _cut_off(self) -> None:
        proxy = self.proxies[self.holder()]
        proxy.refuses = True
        proxy.cut()
        await asyncio.sleep(self._longer())
        proxy.flow()

    async def _stop(self, pids: Sequence[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self._longer())
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    def _gateway(self) -> int:
        return self.gateways[self.holder()].process.pid

    async def _renewer(self) -> int:
        """The process that renews for the gateway whose model is loaded."""
        await until(self._renewers, "it has one")
        return min(self._renewers())

    def _renewers(self) -> set[int]:
        return {pid for pid in proc.below(self._gateway()) if _comm_of(pid) == NAME_IN_PS}


def _comm_of(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "comm").read_text().strip()
    except OSError:
        return ""


def _name_of(pid: int) -> str:
    """What a living engine is named; nothing once it has ended."""
    try:
        words = Path("/proc", str(pid), "cmdline").read_bytes().decode().split("\0")
        return words[words.index("--name") + 1]
    except (OSError, ValueError):
        return ""


async def run(folder: Path, seconds: float, seed: int) -> tuple[History, list[str]]:
    """The history, and what is wrong with it."""
    with redis_server(folder / "redis", has_own_clock=True) as redis:
        gateways = Gateways(folder, redis, seed)
        async with gateways.running():
            await gateways.rage(seconds)
            history, now = gateways.history, time.monotonic()
            wrong, overlaps = history.wrong(now), list(history.overlaps(now))
            if gateways.said(GAVE_WAY) < len(overlaps):
                wrong.append(f"{len(overlaps)} overlaps, of which {gateways.said(GAVE_WAY)} were said")
            return history, wrong


# Of two histories; see tests/leases/test_lease_history.py.
SECONDS = 60.0
KINDS = 9


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_no_overlap_outlasts_its_cause_or_comes_of_a_part_with_a_stand_in(tmp_path: Path, seed: int) -> None:
    history, wrong = await run(tmp_path, SECONDS, seed)
    assert not wrong, history
    assert len({fault.kind for fault in history.faults}) >= KINDS - 1, history.faults


def test_an_overlap_that_outlasts_its_cause_is_found() -> None:
    both, one = {1: "one", 2: "two"}, {2: "two"}
    cause = Fault("stopped_both", False, 1.0, 5.0)
    well = History([cause], [(0.0, {1: "one"}), (4.0, both), (6.9, one)])
    assert not well.wrong(100.0)
    late = History([cause], [(0.0, {1: "one"}), (4.0, both), (7.1, one)])
    assert late.wrong(100.0)
    assert History([cause], [(4.0, both)]).wrong(100.0), "it has not ended"
    assert History([Fault("slow_redis", True, 1.0, 5.0)], [(4.0, both), (4.5, one)]).wrong(100.0), "no cause"
