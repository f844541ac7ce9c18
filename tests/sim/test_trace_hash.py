"""One seed, one run: what the scheduler is told and asks for does not depend on the process it runs in."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import get_args

from greenroom.core import events as ev
from greenroom.core.events import Event
from greenroom.sim.cases import simulate
from greenroom.sim.hooks import TraceHash
from greenroom.sim.workloads import Bursty, Mix, zipf
from tests.sim.settings import Transcript, gpu, host, names, setting, sleeper

ROOT = Path(__file__).parents[2]


def trace_hash(seed: int) -> str:
    models = [sleeper(name, 500 + 200 * number) for number, name in enumerate(names(6))]
    config = setting(*models, devices=(gpu(2_000), gpu(1_500, 1), host(3_000)), jitter=0.2, policy="default")
    mix = Mix(zipf(names(6)), tenants={"x": 1.0, "y": 2.0, "z": 3.0}, priorities={0: 1.0, 1: 2.0, 2: 1.0})
    watcher = TraceHash()
    stats = simulate(config, Bursty(mix, 1.0, 300.0, seed), seed, [watcher])
    assert stats.swaps > 10
    return watcher.hex()


def hash_in_process(hash_seed: str) -> str:
    code = "from tests.sim.test_trace_hash import trace_hash; print(trace_hash(11))"
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=env)
    return run.stdout.strip()


def test_the_same_seed_gives_the_same_hash_in_processes_that_hash_differently() -> None:
    assert hash_in_process("1") == hash_in_process("4242") == trace_hash(11)


def test_another_seed_gives_another_hash() -> None:
    assert trace_hash(11) == trace_hash(11) != trace_hash(12)


def test_the_hash_tells_events_and_effects_apart() -> None:
    one, other = TraceHash(), TraceHash()
    one.told(ev.RequestGone(1.0, "r1"))  # type: ignore[arg-type]
    other.told(ev.RequestGone(1.0, "r2"))  # type: ignore[arg-type]
    assert one.hex() != other.hex()
    before = one.hex()
    one.asked("abort", "m1")
    assert one.hex() != before


def test_events_hold_no_sets_whose_order_could_differ() -> None:
    def kinds(record: type) -> list[str]:
        return [str(field.type) for field in fields(record)] if is_dataclass(record) else []

    assert not [kind for record in get_args(Event) for kind in kinds(record) if "set[" in kind.lower()]


def test_a_transcript_replays_to_the_same_effects() -> None:
    config = setting(
        *(sleeper(name) for name in names(4)), devices=(gpu(2_000), host(2_000)), jitter=0.2, policy="default"
    )
    transcript = Transcript()
    simulate(config, Bursty(Mix(zipf(names(4))), 1.0, 200.0, 5), 5, [transcript])
    again = Replayed()
    scheduler = config.scheduler_for(again)  # type: ignore[arg-type]
    for number, event in enumerate(transcript.events, start=1):
        again.number = number
        scheduler.handle(event)
    assert again.effects == transcript.effects and len(again.effects) > 100
    assert replace(transcript.events[1], now=-1.0) != transcript.events[1]


class Replayed:
    """Effects that are only written down."""

    def __init__(self) -> None:
        self.number = 0
        self.effects: list[tuple[int, str, tuple[object, ...]]] = []

    def __getattr__(self, effect: str) -> object:
        return lambda *details: self.effects.append((self.number, effect, details))
