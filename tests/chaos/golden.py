"""Everything the scheduler is told and asks for in many runs, as one hash a run, compared with hashes that are kept.

    python -m tests.chaos.golden [--seeds N] [--jobs N] [--only KIND] [--write]

plays scheduling workloads, fault seeds, the replay scenario and gateways that share a store, and compares each hash
with `golden.json`. Equal hashes mean equal decisions. `--write` keeps the hashes of this tree instead, only for
changes that are meant to decide otherwise. The text that is hashed names no modules, and `RENAMED`,
`DROPPED` and `NEW_FACTS` map the records of today to the words of the kept hashes, so that renaming a record or a field
changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.scheduling.grid.workloads import GENERATED, generated
from greenroom.core import events as ev
from greenroom.core.contract import Scheduler
from greenroom.core.effects import Reason
from greenroom.core.explain import Explanation
from greenroom.core.model import Device, DeviceId, DeviceKind, ModelId, ModelSpec, Need, RequestId, TenantId
from greenroom.core.scheduler import DefaultScheduler
from greenroom.sim.config import SimConfig, SimModel, Timings
from greenroom.sim.hooks import Watcher
from greenroom.sim.world import World
from tests.chaos.checks.base import EFFECTS, Checkers
from tests.chaos.play import Play
from tests.chaos.scenario import draw_scenario
from tests.core.runs.scenarios import finish, mixed_scenario
from tests.sim.shared.gateway import Gateway
from tests.sim.shared.play import play as play_shared

KEPT = Path(__file__).with_name("golden.json")
SEEDS, SHARED_SEEDS = 200, 40
POLICIES = ("default", "fifo")
# Slots of the GPU, seconds a load takes, how far time is stretched, and whether models can sleep.
MACHINES = ((2, 5.0, 4.0, False), (4, 1.0, 1.0, True))
# Every so many events questions are asked, too: what they answer is part of the hash.
ASKED_EVERY = 40

# Words of today and the words under which they are hashed: records by name, fields by record and name.
RENAMED: Mapping[str, str] = {}
# Fields that are no longer there, or were not when the hashes were made.
DROPPED: frozenset[str] = frozenset(
    {
        *("MoveDone.concurrency", "ModelSpec.split_counts", "ModelSpec.exclusive", "ModelSpec.parts"),
        *("ModelSpec.beside_mib", "ModelSpec.version_of", "ModelSpec.held", "Rejection.beside"),
        *("Limits.tenant_depths", "Limits.tenant_depth_max", "Limits.others_share_depth"),
        *("RequestArrived.choice", "ModelSpec.is_remote", "ServeDone.was_busy", "Rejection.room_s"),
        *("Rejection.pinned", "Rejection.leases", "OtherLease.is_model", "MemoryChanged.taken"),
    }
)
# Facts of a reason that were not told when the hashes were made.
NEW_FACTS: Mapping[str, frozenset[str]] = {"leaving": frozenset({"cause", "for_model", "for_request"})}


def said(value: Any) -> str:
    """The text of a value: the same in every process and whatever module its class is in."""
    if isinstance(value, Enum):
        return f"{value.value}"
    if isinstance(value, str | int | float | None):
        return repr(value) if isinstance(value, float) else f"{value}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{said(key)}:{said(one)}" for key, one in value.items()) + "}"
    if isinstance(value, frozenset):
        return "{" + ",".join(sorted(said(one) for one in value)) + "}"
    if isinstance(value, tuple | list):
        return "(" + ",".join(said(one) for one in value) + ")"
    if isinstance(value, Reason) and (new := NEW_FACTS.get(value.why)):
        value = replace(value, facts=tuple(fact for fact in value.facts if fact[0] not in new))
    assert is_dataclass(value), value
    return _record(value)


def _record(value: Any) -> str:
    name = type(value).__name__
    texts = []
    for key in _names(type(value)):
        word = f"{name}.{key}"
        if word not in DROPPED:
            texts.append(f"{RENAMED.get(word, key)}={said(getattr(value, key))}")
    return f"{RENAMED.get(name, name)}({','.join(sorted(texts))})"


_NAMES: dict[type[Any], tuple[str, ...]] = {}


def _names(kind: type[Any]) -> tuple[str, ...]:
    if kind not in _NAMES:
        _NAMES[kind] = tuple(field.name for field in fields(kind))
    return _NAMES[kind]


class Golden(Watcher):
    """Hashes events, effects with their reasons, and some answers of the scheduler to questions."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._events = 0
        self.scheduler: Scheduler | None = None

    def told(self, event: ev.Event) -> None:
        self._hash.update(said(event).encode())
        self._events += 1
        if self.scheduler is not None and self._events % ASKED_EVERY == 0:
            self._ask(self.scheduler, event.now)

    def asked(self, effect: str, *details: object) -> None:
        self._hash.update(f"{effect} {said(details)}\n".encode())

    def hex(self) -> str:
        return self._hash.hexdigest()

    def _ask(self, scheduler: Scheduler, now: float) -> None:
        models = sorted(model for model in scheduler.view.learned() if not model.startswith(" "))
        if models:
            model = models[self._events // ASKED_EVERY % len(models)]
            arrival = ev.RequestArrived(now, RequestId("golden"), (ModelId(model),), 1, TenantId("golden"))
            self._hash.update(_explained(scheduler.view.explanation(arrival)).encode())


def _explained(one: Explanation) -> str:
    plan = one.plan
    facts = [type(plan).__name__, *(said(getattr(plan, name, "")) for name in ("slot", "model", "why", "until", "on"))]
    facts += [said(getattr(plan, name, "")) for name in ("behind", "kind", "claim", "wakes", "code", "retry_after_s")]
    return " ".join([*facts, *(said(getattr(one, name)) for name in _names(Explanation) if name != "plan")])


# --- runs -----------------------------------------------------------------------------------------------------------


def workload_hash(name: str) -> str:
    """One scheduling workload on one machine: `poisson/default/0`."""
    workload_name, policy, machine = name.split("/")
    slots, swap_s, stretch, sleeps = MACHINES[int(machine)]
    workload, models = generated(workload_name, stretch, 0)
    made = []
    for number, model in enumerate(models):
        asleep = Need(0, 1_000) if sleeps else None
        spec = ModelSpec(ModelId(model), need=Need(600 + 200 * (number % 3) if sleeps else 1_000), need_asleep=asleep)
        made.append(SimModel(spec, Timings(load_s=swap_s, unload_s=0.0)))
    devices = [Device(DeviceId("gpu0"), DeviceKind.GPU, slots * 1_000)]
    devices += [Device(DeviceId("host"), DeviceKind.HOST, 5_000)] if sleeps else []
    golden = Golden()
    world = World(SimConfig(tuple(made), tuple(devices), ev.Limits(queue_depth_max=10**6), policy), 0, None, [golden])
    golden.scheduler = world.scheduler
    workload.begin(world)
    world.run()
    return golden.hex()


def fault_hash(seed: str) -> str:
    """One fault seed, without the checkers that judge it."""
    golden, one = Golden(), Play(draw_scenario(int(seed), exclusives=False, tasks=False), hashed=True)
    one.checkers, one._hash = Checkers([]), golden  # type: ignore[assignment]
    begun = one._begun

    def watched() -> World:
        world = begun()
        golden.scheduler = world.scheduler
        return world

    one._begun = watched  # type: ignore[method-assign]
    return one.to_the_end().trace


def replay_hash(_: str) -> str:
    """The scenario of the replay test."""
    world = mixed_scenario()
    finish(world)
    golden = Golden()
    for event in world.events:
        golden.told(event)
    for call in world.calls:
        golden.asked("", *_details(call))
    return golden.hex()


def _details(call: Any) -> tuple[object, ...]:
    return tuple(call) if isinstance(call, tuple | list) else (call,)


def shared_hash(seed: str) -> str:
    """Gateways that share a store: all of them in one hash."""
    golden, handle = Golden(), DefaultScheduler.handle

    def handled(self: DefaultScheduler, event: ev.Event) -> None:
        golden.told(event)
        handle(self, event)

    def noting(name: str, effect: Callable[..., None]) -> Callable[..., None]:
        def noted(self: Gateway, *details: object) -> None:
            golden.asked(name, self.name, *details)
            effect(self, *details)

        return noted

    with mock.patch.object(DefaultScheduler, "handle", handled):
        patches = [mock.patch.object(Gateway, name, noting(name, getattr(Gateway, name))) for name in EFFECTS]
        for patch in patches:
            patch.start()
        try:
            played = play_shared(int(seed))
        finally:
            for patch in patches:
                patch.stop()
    golden.asked("served", played.served, played.leases)
    return golden.hex()


RUNS: Mapping[str, Callable[[str], str]] = {
    "workload": workload_hash,
    "fault": fault_hash,
    "replay": replay_hash,
    "shared": shared_hash,
}


def all_runs(seeds: int) -> Iterator[str]:
    yield "replay:mixed"
    for name in GENERATED:
        for policy in POLICIES:
            yield from (f"workload:{name}/{policy}/{machine}" for machine in range(len(MACHINES)))
    yield from (f"fault:{seed}" for seed in range(seeds))
    yield from (f"shared:{seed}" for seed in range(min(seeds, SHARED_SEEDS)))


def hash_of(run: str) -> str:
    kind, _, name = run.partition(":")
    return RUNS[kind](name)


def _outcome(run: str) -> tuple[str, str]:
    return run, hash_of(run)


def kept() -> dict[str, str]:
    return dict(json.loads(KEPT.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.golden", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help="so many fault seeds (default 200)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="on so many cores (default: all)")
    parser.add_argument("--only", choices=sorted(RUNS), help="only runs of this kind")
    parser.add_argument("--write", action="store_true", help="keep the hashes of this tree")
    options = parser.parse_args()
    runs = [run for run in all_runs(options.seeds) if options.only in (None, run.partition(":")[0])]
    with get_context("spawn").Pool(options.jobs) as pool:
        found = dict(pool.imap_unordered(_outcome, runs, 1))
    if options.write:
        KEPT.write_text(json.dumps({**(kept() if KEPT.exists() else {}), **found}, indent=0, sort_keys=True) + "\n")
        sys.stdout.write(f"{len(found)} hashes kept\n")
        return 0
    known = kept()
    others = [run for run in runs if found[run] != known.get(run)]
    sys.stdout.write("".join(f"{run}: {found[run]}, kept is {known.get(run)}\n" for run in others[:20]))
    sys.stdout.write(f"{len(runs) - len(others)} of {len(runs)} hashes are the same\n")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
