"""Two real gateways, one Redis and one set of GPUs under random load, while each in turn is killed.

Callers ask both gateways for their models; a trainer asks for a share of a GPU again and again; a nemesis kills
engines, gateways and the trainer and stops Redis for a moment. Memory is taken in a file by engines and trainer alike,
and taking more than there is fails, so that a start of ours that exceeds a GPU cannot go unnoticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness import GatewayProcess, write_config
from tests.integration.leases.trainer import Trainer
from tests.integration.sharing_rig import HOST, A, B, described, grown_up, sections, taking
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE_S, until

GPU_MIB = 10_000
MODELS_MIB = {"small": 3_000, "middle": 5_000, "large": 7_000}
TRAINER_MIB = 6_000
TTL_S = 2.0
CALLERS = 2
CALL_MAX_S = 60.0
# Faults go on until so much was seen, however slow the machine, but not for ever.
ANSWERS = 10
WAITS = 2
AT_MOST_S = 240.0


@dataclass(slots=True)
class Findings:
    """What was seen. `statuses` counts answers; `over` are moments in which a GPU held more than it has."""

    statuses: dict[int, int] = field(default_factory=dict)
    waits_s: list[float] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    full: int = 0
    samples: int = 0


class Chaos:
    def __init__(self, folder: Path, redis: RedisServer, seed: int) -> None:
        self._random = random.Random(seed)
        self._redis = grown_up(redis)
        self._gpus = described(folder, (A, GPU_MIB), (B, GPU_MIB))
        self.found = Findings()
        self.names = ("one", "two")
        self._configs = {name: self._config(folder / name, name) for name in self.names}
        self.gateways = {name: GatewayProcess(config.parent, config) for name, config in self._configs.items()}
        self._ends_at = 0.0
        self._ends_by = 0.0
        self._trainer: Trainer | None = None

    def _config(self, folder: Path, name: str) -> Path:
        folder.mkdir()
        models = {size: taking(f"{name}-{size}", self._gpus, mib) for size, mib in MODELS_MIB.items()}
        return write_config(folder, models, **sections(self._gpus, self._redis.url, ttl_s=TTL_S))

    async def run(self, seconds: float) -> None:
        """Faults for so long, and then until enough was seen."""
        self._ends_at = time.monotonic() + seconds
        self._ends_by = time.monotonic() + AT_MOST_S
        actors = [self._observe(), self._nemesis(), self._train()]
        actors += [self._call(name, random.Random(seed)) for name in self.names for seed in range(CALLERS)]
        await asyncio.gather(*actors)

    async def quiet_down(self) -> None:
        """Without faults all are served: each model of each gateway, and the trainer."""
        for name in self.names:
            for model in MODELS_MIB:
                await self._until_served(name, model)
        began = time.monotonic()
        trainer = self._trainer = self._new_trainer()
        try:
            await until(lambda: trainer.holds, "the trainer's lease, with only idle models in its way")
            self.found.waits_s.append(time.monotonic() - began)
        finally:
            trainer.kill()

    async def _until_served(self, name: str, model: str) -> None:
        async def is_served() -> bool:
            return await self._ask(name, model) == 200

        await until(is_served, f"{name} serves {model}", every_s=0.2)

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.kill()
        for gate in self.gateways.values():
            gate.kill()
        assert all(gate.nothing_left() for gate in self.gateways.values()), "engines were left behind"

    @property
    def out_of_memory(self) -> list[str]:
        """Loads that found less memory than they were granted."""
        lines = [
            line
            for name in self.names
            for line in (self._configs[name].parent / "gateway.log").read_text().splitlines()
        ]
        return [line for line in lines if '"no_memory"' in line or "out of memory" in line]

    @property
    def _is_over(self) -> bool:
        now, found = time.monotonic(), self.found
        has_seen = found.statuses.get(200, 0) >= ANSWERS and len(found.waits_s) >= WAITS
        return now >= self._ends_by or (has_seen and now >= self._ends_at)

    # --- actors -----------------------------------------------------------------------------------------------------

    async def _call(self, name: str, chance: random.Random) -> None:
        while not self._is_over:
            status = await self._ask(name, chance.choice(list(MODELS_MIB)))
            self.found.statuses[status] = self.found.statuses.get(status, 0) + 1
            await asyncio.sleep(chance.uniform(0.0, 0.6))

    async def _ask(self, name: str, model: str) -> int:
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        return await asyncio.to_thread(_post, f"{self.gateways[name].url}/v1/chat/completions", body)

    async def _train(self) -> None:
        while not self._is_over:
            began = time.monotonic()
            trainer = self._trainer = self._new_trainer()
            await self._until_heard(trainer)
            if trainer.holds:
                self.found.waits_s.append(time.monotonic() - began)
            self.found.full += any(line.startswith("full") for line in trainer.said)
            await asyncio.sleep(self._random.uniform(0.3, 1.5))
            if self._random.random() < 0.5 and trainer.process.poll() is None:
                trainer.finish()
                await asyncio.to_thread(trainer.process.wait, PATIENCE_S)
            trainer.kill()
            await asyncio.sleep(self._random.uniform(0.0, 1.0))

    async def _until_heard(self, trainer: Trainer) -> None:
        with contextlib.suppress(AssertionError):
            await until(
                lambda: trainer.said or trainer.process.poll() is not None or self._is_over, "it said something"
            )

    def _new_trainer(self) -> Trainer:
        return Trainer(self._redis.url, HOST, TRAINER_MIB, TTL_S, self._gpus, "normal")

    async def _nemesis(self) -> None:
        faults = [self._kill_engine] * 6 + [self._kill_gateway, self._stop_redis]
        while not self._is_over:
            await asyncio.sleep(self._random.uniform(0.5, 2.0))
            await self._random.choice(faults)()

    async def _kill_engine(self) -> None:
        pids = [pid for pid in self._users() if self._trainer is None or pid != self._trainer.process.pid]
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(pids), signal.SIGKILL)

    async def _kill_gateway(self) -> None:
        name = self._random.choice(self.names)
        self.gateways[name].kill()
        config = self._configs[name]
        self.gateways[name] = await asyncio.to_thread(GatewayProcess, config.parent, config)

    async def _stop_redis(self) -> None:
        self._redis.pause()
        await asyncio.sleep(self._random.uniform(0.2, 2.0))
        self._redis.go_on()

    async def _observe(self) -> None:
        while not self._is_over:
            self.found.samples += 1
            used: dict[str, int] = {}
            for pid in self._users():
                for device, mib in self._uses(pid).items():
                    used[device] = used.get(device, 0) + mib
            self.found.over += [f"{device}: {mib}" for device, mib in used.items() if mib > GPU_MIB]
            await asyncio.sleep(0.05)

    def _users(self) -> list[int]:
        folder = Path(f"{self._gpus}.d")
        pids = [int(name) for name in os.listdir(folder) if name.isdigit()] if folder.exists() else []
        return [pid for pid in pids if _lives(pid)]

    def _uses(self, pid: int) -> dict[str, int]:
        try:
            found: dict[str, int] = json.loads(Path(f"{self._gpus}.d", str(pid)).read_text())
        except FileNotFoundError:
            return {}
        return found


def _post(address: str, body: Any) -> int:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=CALL_MAX_S) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        # Its gateway was killed, perhaps in the middle of its answer.
        return 0


def _lives(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZXx"
    except OSError:
        return False
