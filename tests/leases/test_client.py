"""Leases as a program asks for them, and how a process is told from another."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

import greenroom
from greenroom.app import App
from greenroom.errors import BadRequest, GreenroomError, InvalidKey, LeaseDenied, LeaseLost, LeaseUnknown, StoreDown
from greenroom.leases import records
from greenroom.leases.client import LeaseKeeper, open_store, store_url
from greenroom.leases.http_store import HttpStore
from greenroom.leases.records import Lease, LeaseAsk, holder_of, is_alive, is_here
from greenroom.leases.shared.redis_store import RedisStore
from tests.harness import fake, gateway, url
from tests.integration.facts import is_ready
from tests.redis_server import redis_server
from tests.standins.dripping import DRIPS, dripping_server
from tests.waiting import until

ASK = LeaseAsk(id="x", name="train", mib=100, ttl_s=30.0)


class FakeStore:
    """Says what it is told to; a list of errors is said first, one a call."""

    def __init__(self) -> None:
        self.asks: list[LeaseAsk] = []
        self.renewals = 0
        self.released: list[tuple[str, int | None]] = []
        self.errors: list[Exception] = []
        self.takes_s = 0.0
        self.lease = Lease("x", "train", 1, {"gpu0": 100}, 1, False, "held", 30.0, 30.0, None, None, "program")
        self.clock = 1_000.0

    def now(self) -> float:
        return self.clock

    async def acquire(self, ask: LeaseAsk) -> Lease:
        self.asks.append(ask)
        self.clock += self.takes_s
        self._fail()
        return self.lease

    async def renew(self, id: str, token: int) -> Lease:
        self.renewals += 1
        self._fail()
        return self.lease

    async def release(self, id: str, token: int | None = None) -> None:
        self.released.append((id, token))
        self._fail()

    async def leases(self) -> list[Lease]:
        return [self.lease]

    async def close(self) -> None:
        pass

    def _fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


async def kept(store: FakeStore, **said: object) -> LeaseKeeper:
    keeping = LeaseKeeper(store, replace(ASK, **said), store.now)  # type: ignore[arg-type]
    await keeping.acquire()
    return keeping


# --- whose it is ----------------------------------------------------------------------------------------------------


async def test_it_is_ones_own_for_as_long_as_the_store_said_counted_from_before_it_was_asked() -> None:
    store = FakeStore()
    store.takes_s = 4.0
    keeping = await kept(store)
    store.clock = 1_029.9
    assert not keeping.is_lost
    store.clock = 1_030.0
    assert keeping.is_lost
    with pytest.raises(LeaseLost, match="could not be renewed for 30 s"):
        keeping.raise_if_lost()


async def test_after_a_long_wait_it_is_renewed_before_it_is_believed_in() -> None:
    store = FakeStore()
    store.takes_s = 500.0
    keeping = await kept(store)
    assert store.renewals == 1 and not keeping.is_lost


async def test_a_store_that_is_down_for_a_while_does_not_end_it() -> None:
    store = FakeStore()
    store.lease = replace(store.lease, ttl_s=0.4)
    keeping = await kept(store, ttl_s=0.4)
    store.errors = [StoreDown("no"), InvalidKey("Who are you?")]
    beating = asyncio.ensure_future(keeping.keep())
    store.clock += 1.0
    assert keeping.is_lost, "its holder is not known"
    await until(lambda: not keeping.is_lost, "the store is back")
    assert store.renewals >= 3 and keeping.verdict is None
    beating.cancel()


@pytest.mark.parametrize("error", [LeaseLost("Another has it."), LeaseDenied("Somebody else has it by now.")])
async def test_what_the_store_says_is_lost_is_lost_for_good(error: GreenroomError) -> None:
    store = FakeStore()
    store.lease = replace(store.lease, ttl_s=0.3)
    keeping = await kept(store, ttl_s=0.3)
    store.errors = [error]
    await asyncio.wait_for(keeping.keep(), 30)
    assert keeping.is_lost and keeping.verdict is not None
    with pytest.raises(LeaseLost, match=error.message):
        keeping.raise_if_lost()
    await keeping.release()
    assert store.released == [], "it is not ours to give back"


async def test_a_store_that_forgot_it_is_told_again_on_the_same_devices() -> None:
    store = FakeStore()
    store.lease = replace(store.lease, ttl_s=0.3)
    keeping = await kept(store, ttl_s=0.3, wait_s=50.0)
    store.errors = [LeaseUnknown("?")]
    store.lease = replace(store.lease, token=2)
    beating = asyncio.ensure_future(keeping.keep())
    await until(lambda: keeping.lease.token == 2, "told again")
    assert (store.asks[1].id, store.asks[1].devices, store.asks[1].wait_s) == ("x", ("gpu0",), 0.0)
    store.errors = [LeaseUnknown("?"), LeaseDenied("Taken.")]
    await asyncio.wait_for(beating, 30)
    assert keeping.verdict is not None and "Taken." in keeping.verdict.message


async def test_a_recall_is_known_with_the_time_that_is_left() -> None:
    store = FakeStore()
    keeping = await kept(store)
    assert keeping.recall_in_s is None
    store.lease = replace(store.lease, recall_in_s=12.0)
    keeping = await kept(store)
    store.clock += 20.0
    assert keeping.recall_in_s == -8.0


async def test_a_preemptible_holder_asks_often_enough_to_hear_of_a_recall_in_time() -> None:
    store = FakeStore()
    keeping = await kept(store, preemptible=True, grace_s=0.3)
    beating = asyncio.ensure_future(keeping.keep())
    await until(lambda: store.renewals >= 3, "three beats in a fraction of the lease")
    beating.cancel()


async def test_a_store_that_is_down_when_it_is_given_back_is_not_told_and_nothing_breaks() -> None:
    store = FakeStore()
    keeping = await kept(store)
    store.errors = [StoreDown("no")]
    await keeping.release()
    assert store.released == [("x", 1)]


# --- where it is asked for ------------------------------------------------------------------------------------------


def test_the_address_is_what_was_said_or_what_the_environment_says() -> None:
    environ = {"GREENROOM_LEASES": "redis://r", "GREENROOM_URL": "box:8210"}
    assert store_url("http://here", environ) == "http://here"
    assert store_url(None, environ) == "redis://r"
    assert store_url(None, {"GREENROOM_URL": "box:8210"}) == "http://box:8210"
    assert store_url(None, {}) == "http://127.0.0.1:8210"


@pytest.mark.parametrize("bad", ["ftp://x", "http://", "http://user:secret@x", "http://x:99999"])
def test_what_is_no_address_is_refused(bad: str) -> None:
    with pytest.raises(BadRequest) as refused:
        open_store(bad, environ={})
    assert "secret" not in refused.value.message.replace(bad, "")


async def test_a_gateway_that_is_not_there_is_a_store_that_is_down() -> None:
    for call in (HttpStore("http://127.0.0.1:9").leases, lambda: HttpStore("http://127.0.0.1:9").release("x")):
        with pytest.raises(StoreDown, match=r"http://127.0.0.1:9 does not answer"):
            await call()


@pytest.mark.parametrize("body", [b"hello", b"{}", b"[1]", b'{"leases": 7}', b'{"leases": [{}]}', b""])
async def test_an_answer_that_makes_no_sense_is_that_of_no_gateway(body: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StoreDown, match="is no gateway"):
            await HttpStore(f"http://127.0.0.1:{port}").leases()


@pytest.mark.parametrize("kind", DRIPS)
async def test_a_gateway_that_answers_for_ever_is_a_store_that_is_down(kind: str) -> None:
    with dripping_server(kind) as address, pytest.raises(StoreDown, match="does not answer"):
        await asyncio.wait_for(HttpStore(address, answer_max_s=0.3).leases(), 20)


RIGHT = {
    "id": "a",
    "name": "a",
    "token": 1,
    "claim": {"g": 1},
    "priority": 1,
    "preemptible": False,
    "state": "held",
    "ttl_s": 1.0,
    "expires_in_s": 1.0,
    "recall_in_s": None,
    "holder": None,
    "kind": "program",
}


WRONG = ("1e999", "NaN", "[1]", '{"x": "y"}', "[" * 100_000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for field, right in RIGHT.items()
        for value in (WRONG if isinstance(right, str) else (*WRONG, '"x"'))
    ],
)
async def test_a_field_of_another_type_is_that_of_no_gateway(field: str, value: str) -> None:
    told = json.dumps({"leases": [{**RIGHT, field: "@"}]}).replace('"@"', value)
    await test_an_answer_that_makes_no_sense_is_that_of_no_gateway(told.encode())


def test_importing_greenroom_is_light_and_so_is_asking_for_a_lease() -> None:
    program = (
        "import sys, greenroom; assert 'asyncio' not in sys.modules; greenroom.lease(1);"
        "print([m for m in ('pydantic', 'fastapi', 'msgspec', 'redis', 'uvloop', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'leese'"):
        greenroom.leese  # type: ignore[attr-defined]  # noqa: B018


# --- with a real gateway --------------------------------------------------------------------------------------------


def held(app: App) -> list[dict[str, int]]:
    slots = app.loop.scheduler.state.slots.values()
    return [{str(device): mib for device, mib in slot.claim.items()} for slot in slots if slot.lease is not None]


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    async with gateway(tmp_path, {}) as app:
        yield app


async def beside(work: Callable[[], None]) -> None:
    """The program's side, in a thread, because the gateway runs here."""
    await asyncio.wait_for(asyncio.to_thread(work), 60)


async def test_a_block_holds_memory_while_it_runs(app: App) -> None:
    def program() -> None:
        with greenroom.lease(4_000, name="train", priority="low", url=url(app)) as lease:
            assert (lease.cuda_visible_devices, lease.devices) == ("0", {"gpu0": 4_000})
            assert lease.token > 0 and not lease.lost and not lease.is_over and lease.recall_in_s is None
            lease.raise_if_lost()
            assert held(app) == [{"gpu0": 4_000}]
            (shown,) = [one for one in asyncio.run(HttpStore(url(app)).leases()) if one.id == lease.id]
            assert (shown.name, shown.priority, shown.holder) == ("train", 2, holder_of(os.getpid()))

    await beside(program)
    assert held(app) == []


async def test_the_async_form_is_the_same(app: App) -> None:
    async with greenroom.lease(4_000, url=url(app), ttl_s=1.0) as lease:
        assert lease.cuda_visible_devices == "0"
        # Longer than it lasts without being renewed.
        await asyncio.sleep(1.3)
        assert not lease.lost and held(app) == [{"gpu0": 4_000}]
    assert held(app) == []


async def test_a_program_that_computes_for_long_is_heard_of_meanwhile(app: App) -> None:
    def program() -> None:
        with greenroom.lease(4_000, url=url(app), ttl_s=1.0) as lease:
            time.sleep(1.3)
            assert not lease.lost

    await beside(program)


async def test_an_error_in_the_block_gives_it_back_too(app: App) -> None:
    def program() -> None:
        with greenroom.lease(4_000, url=url(app)):
            raise ValueError("out of ideas")

    with pytest.raises(ValueError, match="out of ideas"):
        await beside(program)
    assert held(app) == []


async def test_a_denial_is_an_error_with_numbers_and_nothing_is_left(app: App) -> None:
    def program() -> None:
        with greenroom.lease(40_000, url=url(app)):
            raise AssertionError("it cannot be had")

    with pytest.raises(LeaseDenied) as denied:
        await beside(program)
    assert denied.value.beside["needed_mib"] == 40_000
    assert held(app) == []


async def test_a_lease_call_that_is_cancelled_while_it_waits_leaves_the_queue(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a", memory_mib=8_000, pinned=True, preload=True)}) as app:
        await until(lambda: is_ready(app, "a"), "the model")

        async def program() -> None:
            async with greenroom.lease(2_001, url=url(app), wait_s=60.0):
                raise AssertionError("a pinned model does not leave")

        # What is pinned never leaves, so this is refused at once rather than waited for.
        with pytest.raises(LeaseDenied):
            await program()
        async with greenroom.lease(2_000, url=url(app)):
            waiting = asyncio.ensure_future(_take(app, 1_000))
            await until(lambda: bool(list(app.loop.scheduler.state.waitlist)), "the waiter")
            waiting.cancel()
            await until(lambda: not list(app.loop.scheduler.state.waitlist), "its end")


async def _take(app: App, mib: int) -> None:
    async with greenroom.lease(mib, url=url(app), wait_s=60.0):
        raise AssertionError("no model leaves for it")


async def test_a_lease_is_used_once(app: App) -> None:
    lease = greenroom.lease(10, url=url(app))
    with pytest.raises(BadRequest, match="not held yet"):
        lease.raise_if_lost()
    async with lease:
        pass
    with pytest.raises(BadRequest, match="used once"):
        async with lease:
            pass


PROGRAM = """
import os, sys, time
import greenroom
with greenroom.lease(4_000, url=sys.argv[1], ttl_s=1.0) as lease:
    {body}
"""


def program(app: App, body: str) -> subprocess.Popen[str]:
    code = PROGRAM.format(body=body)
    return subprocess.Popen([sys.executable, "-c", code, url(app)], stdout=subprocess.PIPE, text=True)


async def test_a_fork_does_not_give_back_what_is_its_parents(tmp_path: Path) -> None:
    body = """
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    print("forked", flush=True)
    sys.stdin.readline()
    """
    async with gateway(tmp_path, {}) as app:
        code = PROGRAM.format(body=body.strip())
        process = subprocess.Popen(
            [sys.executable, "-c", code, url(app)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdin is not None
        assert (await asyncio.to_thread(process.stdout.readline)) == "forked\n"
        assert held(app) == [{"gpu0": 4_000}]
        await asyncio.to_thread(process.communicate, "\n", 30)
        assert process.returncode == 0
        await until(lambda: held(app) == [], "given back")


async def test_a_holder_that_was_paused_past_its_time_finds_it_lost(tmp_path: Path) -> None:
    body = """
    print("holds", flush=True)
    while not lease.lost:
        time.sleep(0.01)
    while not lease.is_over:
        time.sleep(0.01)
    try:
        lease.raise_if_lost()
    except greenroom.errors.LeaseLost:
        print("lost", flush=True)
    """
    async with gateway(tmp_path, {}) as app:
        with program(app, body.strip()) as process:
            assert process.stdout is not None
            assert (await asyncio.to_thread(process.stdout.readline)) == "holds\n"
            process.send_signal(signal.SIGSTOP)
            await until(lambda: held(app) == [], "the lease is over")
            process.send_signal(signal.SIGCONT)
            assert (await asyncio.to_thread(process.stdout.readline)) == "lost\n"
            assert await asyncio.to_thread(process.wait, 30) == 0


async def test_a_holder_that_is_killed_gives_back_at_once(app: App) -> None:
    with program(app, "print('holds', flush=True); time.sleep(600)") as process:
        assert process.stdout is not None
        assert (await asyncio.to_thread(process.stdout.readline)) == "holds\n"
        process.kill()
        await until(lambda: held(app) == [], "given back")


async def test_an_interrupt_while_it_waits_gives_up(tmp_path: Path) -> None:
    async with gateway(tmp_path, {}) as app, greenroom.lease(8_000, url=url(app)):
        with program(app, "pass") as process:
            await until(lambda: bool(list(app.loop.scheduler.state.waitlist)), "it waits")
            process.send_signal(signal.SIGINT)
            await until(lambda: not list(app.loop.scheduler.state.waitlist), "it has given up")
            assert await asyncio.to_thread(process.wait, 30) != 0


async def test_leases_in_redis_are_asked_for_in_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREENROOM_HOST", "box")
    # A store that is new grants nothing for a while; here nothing can have been held before.
    without_grace = functools.partial(RedisStore, grace_s=0)
    monkeypatch.setattr("greenroom.leases.shared.redis_store.RedisStore", without_grace)
    with redis_server(tmp_path / "redis") as server:
        monkeypatch.setenv("GREENROOM_LEASES", server.url)
        gateway_side = RedisStore(server.url, "box", grace_s=0, offers={"gpu0": 10_000})
        first = await gateway_side.acquire(replace(ASK, id="first", mib=1_000))
        await gateway_side.release("first", first.token)

        def work() -> None:
            with greenroom.lease(4_000, name="train", wait_s=30.0) as lease:
                assert lease.devices == {"gpu0": 4_000} and lease.token > first.token and not lease.lost

        await beside(work)
        assert await gateway_side.leases() == []
        await gateway_side.close()


def test_this_process_is_here_and_lives() -> None:
    mine = holder_of(os.getpid())
    assert mine is not None and (mine.pid, mine.host) == (os.getpid(), os.uname().nodename)
    assert is_here(mine) and is_alive(mine)


def test_another_with_the_same_number_is_not_the_same() -> None:
    mine = holder_of(os.getpid())
    assert mine is not None
    assert not is_alive(replace(mine, start_ticks=mine.start_ticks - 1))
    assert not is_here(replace(mine, host="far")) and not is_here(replace(mine, pid_ns=mine.pid_ns + 1))


def test_an_ended_process_is_not_alive_before_its_parent_collects_it() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        other = holder_of(process.pid)
        assert other is not None and is_alive(other)
        process.kill()
        # Its end is known without being collected: nothing has waited for it yet.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(other) and holder_of(process.pid) is None
    assert not is_alive(other)


def test_there_is_no_holder_that_never_was() -> None:
    assert holder_of(2**22 + 1) is None


def test_whether_a_holder_is_here_is_answered_without_looking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = holder_of(os.getpid())
    assert mine is not None
    monkeypatch.setattr(records, "_PROC", tmp_path)
    assert is_here(mine) and not is_here(replace(mine, host="far"))
    assert holder_of(os.getpid()) is None
