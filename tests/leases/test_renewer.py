"""A gateway that falls silent keeps its leases: a process beside it renews them, for as long as the gateway lives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from greenroom.errors import StoreDown
from greenroom.features.leases.renewer import RenewerProcess
from greenroom.leases.shared.redis_store import RedisStore
from greenroom.leases.shared.renewer import NAME_IN_PS
from greenroom.process import proc
from tests.leases.redis_rig import DEVICES, Opener, ask, claims, slot, until_claims
from tests.redis_server import RedisServer
from tests.waiting import until

TTL_S = 1.0
# A lease lapses a third of its TTL late, and a renewal may have come just before.
LAPSES_S = 3 * TTL_S


class Gateway:
    """What a gateway does with its store, as far as leases are renewed in its place."""

    def __init__(self, url: str) -> None:
        self.store = RedisStore(
            url, "box", ttl_s=TTL_S, grace_s=0.0, offers=DEVICES, renewer=RenewerProcess(url, "box", TTL_S)
        )

    async def begin(self) -> None:
        self.store.beat()
        await self.store.publish("one", DEVICES, {})
        await until(renewers, "the process runs")


def renewers() -> list[int]:
    """Those of this process that run."""
    return [pid for pid in proc.below(os.getpid()) if named(pid) == NAME_IN_PS]


def named(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "comm").read_text().strip()
    except OSError:
        return ""


@pytest.fixture
async def gateway(server: RedisServer) -> AsyncIterator[Gateway]:
    gateway = Gateway(server.url)
    await gateway.begin()
    yield gateway
    await gateway.store.close()
    await until(lambda: not renewers(), "the process has ended")


async def silent(looks: RedisStore, seconds: float = LAPSES_S) -> None:
    """The gateway does nothing for so long; others use the store, so that its time passes."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        # A store that stands still, as some tests have it, stays so.
        with contextlib.suppress(StoreDown):
            await looks.leases()
        await asyncio.sleep(0.1)


async def test_leases_of_a_silent_gateway_are_renewed(gateway: Gateway, client: Opener) -> None:
    lease = await gateway.store.hold(slot("one/s1", 6_000), gateway="one")
    await silent(client(ttl_s=TTL_S))
    assert await claims(client(ttl_s=TTL_S)) == {"one/s1": ("held", 6_000)}
    assert (await gateway.store.renew_all([(lease.id, lease.token)])) == {lease.id: True}


@pytest.mark.slow
async def test_what_was_given_back_before_is_not_renewed(gateway: Gateway, client: Opener) -> None:
    await gateway.store.hold(slot("one/s1", 6_000), gateway="one")
    await gateway.store.hold(slot("one/s2", 1_000), gateway="one")
    await gateway.store.release("one/s1", kind="slot")
    await silent(client(ttl_s=TTL_S))
    assert await claims(client(ttl_s=TTL_S)) == {"one/s2": ("held", 1_000)}


@pytest.mark.slow
async def test_a_store_that_was_emptied_meanwhile_learns_of_them_again(
    gateway: Gateway, client: Opener, server: RedisServer
) -> None:
    await gateway.store.hold(slot("one/s1", 6_000), gateway="one")
    server.restart_empty()
    await until_claims(client(ttl_s=TTL_S), {"one/s1": ("held", 6_000)})


@pytest.mark.slow
async def test_a_program_that_renewed_through_the_gateway_keeps_its_lease(gateway: Gateway, client: Opener) -> None:
    kept = await gateway.store.acquire(ask("kept", 1_000))
    await gateway.store.acquire(ask("gone", 1_000))
    # Its holder is not heard of while the gateway listens, so that its lease ends as ever.
    while len(await claims(gateway.store)) > 1:
        await gateway.store.renew("kept", kept.token)
        gateway.store.beat()
        await asyncio.sleep(0.1)
    await silent(client(ttl_s=TTL_S))
    assert await claims(client(ttl_s=TTL_S)) == {"kept": ("held", 1_000)}

    async def is_gone() -> bool:
        gateway.store.beat()
        return await claims(gateway.store) == {}

    await until(is_gone, "it ends once the gateway listens again", every_s=0.1)


@pytest.mark.slow
async def test_one_that_was_killed_is_replaced_and_told_everything(gateway: Gateway, client: Opener) -> None:
    await gateway.store.hold(slot("one/s1", 6_000), gateway="one")
    (killed,) = renewers()
    os.kill(killed, signal.SIGKILL)

    def is_replaced() -> bool:
        gateway.store.beat()
        return bool(set(renewers()) - {killed})

    await until(is_replaced, "there is another", every_s=0.1)
    lease = await gateway.store.hold(slot("one/s1", 6_000), gateway="one")
    await silent(client(ttl_s=TTL_S))
    assert (await gateway.store.renew_all([(lease.id, lease.token)])) == {lease.id: True}


async def test_one_that_cannot_be_started_is_started_later(server: RedisServer) -> None:
    gateway = Gateway(server.url)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        gateway.store.beat()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    def is_started() -> bool:
        gateway.store.beat()
        return bool(renewers())

    await until(is_started, "it runs", every_s=0.1)
    await gateway.store.close()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["timeout=2", "max_connections=3", "db=0"])
async def test_it_takes_the_options_of_the_address_that_a_gateway_takes(
    server: RedisServer, client: Opener, option: str
) -> None:
    gateway = Gateway(f"{server.url}?{option}")
    await gateway.begin()
    await gateway.store.hold(slot("one/s1", 6_000), gateway="one")
    await silent(client(ttl_s=TTL_S))
    assert await claims(client(ttl_s=TTL_S)) == {"one/s1": ("held", 6_000)}
    await gateway.store.close()


@pytest.mark.slow
async def test_leases_of_a_killed_gateway_end(client: Opener, server: RedisServer) -> None:
    program = (
        "import asyncio, sys, time\n"
        "from tests.leases.test_renewer import Gateway, slot\n"
        "async def main():\n"
        f"    gateway = Gateway({server.url!r})\n"
        "    await gateway.begin()\n"
        "    await gateway.store.hold(slot('one/s1', 6_000), gateway='one')\n"
        "    print('holds', flush=True)\n"
        "    time.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    gone = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    try:
        assert gone.stdout is not None
        assert await asyncio.to_thread(gone.stdout.readline) == b"holds\n"
        looks = client(ttl_s=TTL_S)
        await silent(looks)
        assert await claims(looks) == {"one/s1": ("held", 6_000)}
    finally:
        gone.kill()
        gone.wait()
    await until_claims(looks, {})
