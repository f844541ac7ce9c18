"""One fixed mixed scenario, played for the anomaly loop and for replay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from greenroom.core.effects import Effects
from greenroom.core.events import Limits
from greenroom.core.model import DeviceId, MoveKind, Need
from tests.core.world import HOST, Engine, World, gpu, host, model

DEVICES = (gpu(0, 8_000, 500), gpu(1, 6_000, 500), host(9_000))
MODELS = (
    model("chat", 5_000, concurrency=2, asleep=Need(300, 3_000), ttl_s=60.0),
    model("embed", 1_000, preload=True, pinned=True),
    model("code", 6_000, asleep=Need(0, 4_000)),
    model("wide", 9_000, can_split=True),
    model("vision", 4_000, sizes_itself=True, host_mib=1_000, concurrency=2),
    model("remote", 0, concurrency=4),
)


def mixed_scenario(
    prepare: Callable[[World], None] = lambda world: None, scheduler: Callable[[Effects], Any] | None = None
) -> World:
    """Requests of all kinds, operators, leases, strangers and a new revision, over two GPUs that hold a third of it."""
    world = World(plays=True, limits=Limits(queue_depth_max=60), devices=DEVICES, scheduler=scheduler)
    prepare(world)
    world.config(*MODELS)
    world.engines["vision"] = Engine(load_s=8.0, seen={DeviceId("gpu0"): 4_400})
    names = ["chat", "embed", "code", "remote", "chat", "vision", "wide", "embed"]
    for number in range(32):
        name = names[number * 5 % len(names)]
        spare = ("chat",) if number % 7 == 0 and name != "chat" else ()
        arrive = partial(
            world.arrive,
            f"r{number}",
            name,
            *spare,
            takes_s=0.5 + number % 4,
            priority=(1, 1, 0, 2)[number % 4],
            tenant=f"t{number % 3}",
            within_s=400.0 if number % 5 else None,
        )
        world.later(number * 1.7, arrive)
    world.later(12.0, lambda: world.ask("load", MoveKind.LOAD, "code"))
    world.later(20.0, lambda: world.ask_lease("train", 3_000, priority=2, preemptible=True, within_s=300.0))
    world.later(30.0, lambda: world.ask("sleep", MoveKind.SLEEP, "chat", grace_s=2.0))
    world.later(33.0, lambda: world.memory({DeviceId("gpu1"): 2_000, HOST: 500}))
    world.later(45.0, lambda: world.config(model("chat", 5_500, revision=2, concurrency=2, asleep=Need(300, 3_000))))
    world.later(52.0, lambda: world.memory({DeviceId("gpu1"): 0}))
    world.later(60.0, lambda: world.ask("unload", MoveKind.UNLOAD, "vision", grace_s=1.0))
    world.later(66.0, lambda: world.ask("prepare", MoveKind.PREPARE, "code"))
    world.run(600.0)
    return world


def finish(world: World) -> None:
    """End what has no end of its own, then stop."""
    for call in list(world.calls_by_id.values()):
        if call.is_lease and call.fate.value == "granted":
            world.end_lease(call.id)
    world.run()
    world.shut_down(5.0)
    world.run()
