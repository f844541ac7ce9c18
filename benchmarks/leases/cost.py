"""What a lease costs in Redis: acquire and release over one connection, beside bare SET and DEL in the same run.

Starts a Redis of its own on a free port. `pair` is one acquire and one release, one after the other; `load` is what a
gateway adds to a swap: pend, the release of the victim, hold. Of several rounds the best counts, because other load on
the machine can only add; the ratio to bare commands shows what a slow machine does not explain. The goal is judged by
the rate where the machine was quiet, and by the median time of one pair where it was not; the output says which.

    python -m benchmarks.leases.cost [--pairs 3000] [--rounds 3]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable

import redis.asyncio as aioredis
import uvloop

from benchmarks.rig.processes import free_port, running
from benchmarks.rig.result import Run, options_of
from greenroom.leases.records import LeaseAsk
from greenroom.leases.shared.redis_store import RedisStore
from greenroom.leases.shared.stored import SlotAsk

LIVE = (10, 200)
GOALS = {"pairs_per_s_min": 1_000.0, "load_p50_ms_max": 5.0}
DEVICES = {f"gpu{number}": 80_000 for number in range(8)}
GATEWAY = "bench"
QUIET_SHARE = 0.8
# Small, so that all live leases fit.
LEASE_MIB = 100


async def timed(step: Callable[[int], Awaitable[object]], count: int) -> dict[str, float]:
    """So many steps one after the other: steps a second, and how long one takes."""
    took: list[float] = []
    began = time.perf_counter()
    for number in range(count):
        at = time.perf_counter()
        await step(number)
        took.append(time.perf_counter() - at)
    whole_s = time.perf_counter() - began
    took.sort()
    return {
        "per_s": round(count / whole_s),
        "p50_ms": round(1e3 * took[count // 2], 3),
        "p99_ms": round(1e3 * took[count * 99 // 100], 3),
    }


async def bare(client: aioredis.Redis, count: int) -> dict[str, float]:
    async def step(number: int) -> None:
        await client.set(f"bare-{number}", "x")
        await client.delete(f"bare-{number}")

    return await timed(step, count)


async def pairs(store: RedisStore, count: int) -> dict[str, float]:
    async def step(number: int) -> None:
        lease = await store.acquire(LeaseAsk(f"pair-{number}", "pair", LEASE_MIB))
        await store.release(lease.id, lease.token)

    return await timed(step, count)


async def loads(store: RedisStore, count: int) -> dict[str, float]:
    """Swaps of one slot for another on a full GPU: the newcomer of one swap is the victim of the next."""
    whole = 40_000
    held = await store.hold(SlotAsk("slot-0", "slot", {"full": whole}), gateway=GATEWAY)

    async def step(number: int) -> None:
        nonlocal held
        newcomer = SlotAsk(f"slot-{number + 1}", "slot", {"full": whole})
        await store.pend(newcomer, [held.id], gateway=GATEWAY, pending_s=30)
        await store.release(held.id, held.token, kind="slot")
        held = await store.hold(newcomer, gateway=GATEWAY)

    figures = await timed(step, count)
    await store.release(held.id, held.token, kind="slot")
    return figures


def better(one: dict[str, float], other: dict[str, float] | None) -> dict[str, float]:
    return one if other is None or one["per_s"] > other["per_s"] else other


def is_quiet(figures: dict[str, float]) -> bool:
    """On a quiet machine the mean time of a step is its median."""
    return figures["per_s"] * figures["p50_ms"] >= QUIET_SHARE * 1e3


def judged_rate(figures: dict[str, float]) -> float:
    return figures["per_s"] if is_quiet(figures) else round(1e3 / figures["p50_ms"])


async def measure(url: str, live: int, count: int, rounds: int) -> dict[str, dict[str, float]]:
    store = RedisStore(url, f"live-{live}", grace_s=0)
    client = aioredis.from_url(url)
    await store.publish(GATEWAY, {**DEVICES, "full": 40_000}, {})
    for number in range(live):
        await store.acquire(LeaseAsk(f"live-{number}", "live", LEASE_MIB, devices=tuple(DEVICES), ttl_s=30))
    best: dict[str, dict[str, float]] = {}
    for number in range(rounds):
        for lease in await store.leases():
            await store.renew(lease.id, lease.token)
        for name, figures in (
            ("bare", await bare(client, count)),
            ("pair", await pairs(store, count)),
            ("load", await loads(store, count // 3)),
        ):
            best[name] = better(figures, best.get(name))
            print(f"round {number + 1} live {live:3} {name:5} {figures}", flush=True)
    await store.close()
    await client.aclose()
    return best


async def everything(run: Run, url: str, count: int, rounds: int) -> None:
    figures = {str(live): await measure(url, live, count, rounds) for live in LIVE}
    for of_live in figures.values():
        of_live["pair"]["of_bare"] = round(of_live["pair"]["per_s"] / of_live["bare"]["per_s"], 2)
        of_live["pair"]["judged_per_s"] = judged_rate(of_live["pair"])
        print(f"judged by the {'rate' if is_quiet(of_live['pair']) else 'median: the machine was busy'}", flush=True)
    met = all(
        of_live["pair"]["judged_per_s"] >= GOALS["pairs_per_s_min"]
        and of_live["load"]["p50_ms"] < GOALS["load_p50_ms_max"]
        for of_live in figures.values()
    )
    run.report(figures, GOALS, met)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--pairs", type=int, default=3_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        sys.exit("redis-server was not found. Type: apt-get install redis-server")
    port, run = free_port(), Run("leases", given)
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as folder:
        argv = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with running(argv, port):
            uvloop.run(everything(run, f"redis://127.0.0.1:{port}", given.pairs, given.rounds))


if __name__ == "__main__":
    main()
