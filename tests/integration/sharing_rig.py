"""Gateways that share GPUs through one Redis: the GPUs are described by a file, and engines take memory there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from greenroom.app import App
from greenroom.core.model import ModelId
from greenroom.leases.records import Lease
from greenroom.leases.shared import stored
from tests.harness import fake, gateway
from tests.redis_server import RedisServer
from tests.standins import fake_gpu

A, B = "GPU-aaaa", "GPU-bbbb"
HOST = "box"
# As short as can be: a new store grants nothing for a little longer than this.
TTL_S = 1.0


def grown_up(server: RedisServer) -> RedisServer:
    """As a store is that has been in use for long: it has no grace for those it might not know any more."""
    wall_us = int(time.time() * 1_000_000)
    words = {"wall": wall_us // 1000, "now": 10**10, "last": wall_us, "birth": wall_us, "version": 1}
    key = stored.keys(HOST)[0]
    server.say("HSET", key, *(str(word) for pair in words.items() for word in pair))
    return server


def described(folder: Path, *gpus: tuple[str, int]) -> Path:
    return fake_gpu.describe(folder / "gpus.json", *(fake_gpu.gpu(uuid, mib) for uuid, mib in gpus))


def taking(name: str, file: Path, mib: int, *switches: str, **keys: Any) -> dict[str, Any]:
    """A model whose engine really takes so much of the GPU it is given."""
    return fake(name, f"--gpu-file={file}", f"--gpu-mib={mib}", *switches, **{"memory_mib": mib, "ttl_s": 0, **keys})


def sections(file: Path, store: str, *, ttl_s: float = TTL_S) -> dict[str, Any]:
    return {
        "gpus": [],
        "memory": {"probe": "file", "file": str(file), "look_every_s": 0.2, "gpu_margin_mib": 0},
        "leases": {"store": store, "host": HOST, "ttl_s": ttl_s},
    }


@contextlib.asynccontextmanager
async def sharing(
    name: str, file: Path, store: str, models: dict[str, Any], *, ttl_s: float = TTL_S, **more: Any
) -> AsyncIterator[App]:
    folder = file.parent / name
    folder.mkdir(exist_ok=True)
    async with gateway(folder, models, **{**sections(file, store, ttl_s=ttl_s), **more}) as app:
        yield app


def store_is_down(app: App) -> bool:
    return app.loop.scheduler.state.store_is_down


def others(app: App) -> dict[str, dict[str, int]]:
    """What this gateway's scheduler knows of the others: by name."""
    return {
        one.holder: {str(key): mib for key, mib in one.claim.items()} for one in app.loop.scheduler.state.ledger.others
    }


def slot_of(app: App, model: str) -> str:
    (slot,) = app.loop.scheduler.state.slots_of(ModelId(model))
    return slot.id


async def in_store(app: App) -> dict[str, Lease]:
    return {lease.name: lease for lease in await app.leasing.leases()}
