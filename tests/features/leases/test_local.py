"""Memory for other programs: held while its holder is heard of, and known again after a restart."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.core.events import ConfigChanged
from greenroom.core.model import Device, DeviceId, DeviceKind, SlotId
from greenroom.errors import BadRequest, LeaseDenied, LeaseLost, LeaseTooLarge, LeaseUnknown, ShuttingDown
from greenroom.features.leases.entry import LeaseEntry, is_behind, may_ask
from greenroom.features.leases.journal import FILE_NAME
from greenroom.leases.records import holder_of
from greenroom.runtime.memory.devices import HOST
from tests.features.leases.leasing_rig import Rig, ask, model, rig
from tests.waiting import until


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds a lease and can be killed."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path) as one:
        yield one


# --- granted --------------------------------------------------------------------------------------------------------


async def test_free_memory_is_granted_at_once(one: Rig) -> None:
    lease = await one.leasing.acquire(ask(mib=4_000, ttl_s=20.0))
    assert (lease.state, lease.kind, dict(lease.claim)) == ("held", "program", {"gpu0": 4_000})
    assert lease.cuda_visible_devices == "0" and 19 < lease.expires_in_s <= 20
    assert one.claims() == [{"gpu0": 4_000}] and one.told == ["lease train"]
    assert [held.id for held in await one.leasing.leases()] == ["train"]


async def test_an_idle_model_leaves_for_it_and_a_busy_one_is_waited_for(tmp_path: Path) -> None:
    async with rig(tmp_path, model("a", 6_000)) as one:
        await one.serve("a")
        waiting = asyncio.ensure_future(one.leasing.acquire(ask(mib=8_000, wait_s=60.0)))
        await until(lambda: one.waiting == 1)
        assert (await one.leasing.find("train")).state == "waiting" and not waiting.done()
        one.finish("a")
        lease = await asyncio.wait_for(waiting, 30)
        assert lease.state == "held" and one.claims() == [{"gpu0": 8_000}]


async def test_a_non_blocking_acquire_evicts_no_model_and_reports_the_numbers(tmp_path: Path) -> None:
    async with rig(tmp_path, model("a", 6_000)) as one:
        await one.serve("a")
        one.finish("a")
        with pytest.raises(LeaseDenied, match=r"8,000 MiB for train: not free now; gpu0 has 4,000 MiB free") as denied:
            await one.leasing.acquire(ask(mib=8_000))
        assert denied.value.beside == {"needed_mib": 8_000, "gpus": 1, "free_mib": {"gpu0": 4_000}}
        assert denied.value.retry_after_s is not None
        assert one.claims() == [{"gpu0": 6_000}] and one.waiting == 0


async def test_a_wait_that_was_too_short_is_denied_with_the_numbers(tmp_path: Path) -> None:
    async with rig(tmp_path, model("a", 6_000)) as one:
        await one.serve("a")
        with pytest.raises(LeaseDenied, match=r"not free within 0.1 s; gpu0 has 4,000 MiB free"):
            await one.leasing.acquire(ask(mib=8_000, wait_s=0.1))
        assert one.waiting == 0 and not await one.leasing.leases()


@pytest.mark.parametrize("wait_s", [0.0, 10.0])
async def test_what_can_never_fit_is_refused_for_good(one: Rig, wait_s: float) -> None:
    with pytest.raises(LeaseTooLarge, match=r"20,000 MiB .* can never be had.* at most 10,000 MiB .* less\.$"):
        await one.leasing.acquire(ask(mib=20_000, wait_s=wait_s))
    with pytest.raises(LeaseTooLarge, match=r"on each of 3 GPUs for train can never be had: there are 1\."):
        await one.leasing.acquire(ask(mib=5, gpus=3, wait_s=wait_s))


async def test_a_non_blocking_acquire_of_memory_held_now_is_not_refused_for_good(tmp_path: Path) -> None:
    async with rig(tmp_path, model("kept", 6_000, pinned=True), gpus=2) as one:
        await one.leasing.acquire(ask("holds", 9_000, devices=("gpu1",)))
        await one.serve("kept")
        with pytest.raises(LeaseDenied, match="not free now") as denied:
            await one.leasing.acquire(ask(mib=9_000))
        assert not isinstance(denied.value, LeaseTooLarge)
        # A pinned model never leaves, so the other GPU is the only one.
        with pytest.raises(LeaseTooLarge, match="at most 4,000 MiB"):
            await one.leasing.acquire(ask(mib=9_000, devices=("gpu0",)))
        with pytest.raises(LeaseTooLarge, match="at most 4,000 MiB"):
            await one.leasing.acquire(ask(mib=9_000, gpus=2))


@pytest.mark.parametrize("wait_s", [0.0, 10.0])
async def test_a_lease_is_told_to_unpin_a_model_only_where_that_would_help(tmp_path: Path, wait_s: float) -> None:
    async with rig(tmp_path, model("kept", 6_000, pinned=True)) as one:
        await one.serve("kept")
        with pytest.raises(LeaseTooLarge, match=r"Ask for less, or unpin a model\.$"):
            await one.leasing.acquire(ask(mib=9_000, wait_s=wait_s))
        with pytest.raises(LeaseTooLarge, match=r"Ask for less\.$"):
            await one.leasing.acquire(ask(mib=11_000, wait_s=wait_s))


async def test_named_devices_are_those_that_are_given(tmp_path: Path) -> None:
    async with rig(tmp_path, gpus=3) as one:
        lease = await one.leasing.acquire(ask(devices=("gpu2",)))
        assert list(lease.claim) == ["gpu2"]
        for devices, gpus, why in [(("gpu7",), 1, "no device gpu7"), (("gpu0", "gpu0"), 2, "2 GPUs are wanted and 1")]:
            with pytest.raises(BadRequest, match=why):
                await one.leasing.acquire(ask("x", devices=devices, gpus=gpus))


async def test_the_hosts_memory_is_not_leased(one: Rig) -> None:
    host = Device(HOST, DeviceKind.HOST, 10_000)
    one.loop.post(ConfigChanged(one.clock(), devices=(*one.state.ledger.devices.values(), host)))
    with pytest.raises(BadRequest, match="A lease is for GPUs"):
        await one.leasing.acquire(ask(devices=("host",)))


async def test_there_are_not_more_leases_than_can_be_kept(tmp_path: Path) -> None:
    async with rig(tmp_path, leases_max=2) as one:
        await one.leasing.acquire(ask("a", 1))
        await one.leasing.acquire(ask("b", 1))
        with pytest.raises(LeaseDenied, match="2 leases are held"):
            await one.leasing.acquire(ask("c", 1))


async def test_a_shutdown_refuses_waiting_leases(tmp_path: Path) -> None:
    async with rig(tmp_path, model("a", 6_000)) as one:
        await one.leasing.acquire(ask("holds", 8_000))
        waiting = asyncio.ensure_future(one.leasing.acquire(ask(mib=8_000, wait_s=60.0)))
        await until(lambda: one.waiting == 1)
        one.shut_down()
        with pytest.raises(ShuttingDown):
            await waiting
        assert [lease.id for lease in await one.leasing.leases()] == ["holds"]


async def test_memory_that_is_free_on_paper_only_is_not_handed_over(one: Rig) -> None:
    one.missing = {DeviceId("gpu0"): 300}
    with pytest.raises(LeaseDenied, match="not free"):
        await one.leasing.acquire(ask())
    assert one.claims() == []
    waiting = asyncio.ensure_future(one.leasing.acquire(ask(wait_s=60.0)))
    await until(lambda: len(one.claims()) == 1)
    looks = one.looks
    await until(lambda: one.looks > looks + 1, "memory is waited for")
    assert not waiting.done()
    one.missing = {}
    assert (await asyncio.wait_for(waiting, 30)).state == "held"


# --- asked for twice, given up --------------------------------------------------------------------------------------


async def test_a_grant_is_given_back_if_its_call_was_cancelled_meanwhile(tmp_path: Path) -> None:
    async with rig(tmp_path) as one:
        waiting = asyncio.ensure_future(one.leasing.acquire(ask()))
        # The scheduler has granted it and it is being written down.
        await until(lambda: bool(one.granted), every_s=0.0)
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert one.claims() == []
    async with rig(tmp_path) as after:
        assert not await after.leasing.leases()


async def test_a_lease_is_given_back_if_its_call_was_cancelled_before_it_was_told(one: Rig) -> None:
    waiting = asyncio.ensure_future(one.leasing.acquire(ask()))
    await until(lambda: "lease train" in one.told, every_s=0.0)
    assert waiting.cancel(), "its caller has not been told yet"
    await asyncio.wait((waiting,))
    assert one.claims() == []


async def test_an_unheard_call_gives_back_a_lease_that_only_it_was_told_of(one: Rig) -> None:
    await one.leasing.acquire(ask(), "first")
    await one.leasing.unheard("train", "somebody else")
    assert len(one.claims()) == 1
    await one.leasing.unheard("train", "first")
    assert one.claims() == []


async def test_an_unheard_call_leaves_the_lease_to_a_repeated_call(one: Rig) -> None:
    # Both are told in the same turn of the loop, as a caller is that lost its connection and asked again.
    calls = [asyncio.ensure_future(one.leasing.acquire(ask(), name)) for name in ("first", "again")]
    held = await asyncio.wait_for(asyncio.gather(*calls), 30)
    await one.leasing.unheard("train", "first")
    assert (await one.leasing.renew("train", held[1].token)).state == "held"
    # And the other way round, where it was held for long.
    await one.leasing.acquire(ask(), "third")
    await one.leasing.unheard("train", "third")
    assert (await one.leasing.renew("train", held[1].token)).state == "held"


# --- released -------------------------------------------------------------------------------------------------------


async def test_a_lease_that_is_withdrawn_while_it_waits_says_so(one: Rig) -> None:
    await one.leasing.acquire(ask("holds", 8_000))
    waiting = asyncio.ensure_future(one.leasing.acquire(ask(mib=8_000, wait_s=60.0)))
    await until(lambda: one.waiting == 1)
    await one.leasing.release("train")
    with pytest.raises(LeaseDenied, match="withdrawn"):
        await waiting


# --- heard of, or not -----------------------------------------------------------------------------------------------


async def test_a_holder_that_is_not_heard_of_has_lost_it(one: Rig) -> None:
    lease = await one.leasing.acquire(ask(ttl_s=0.2))
    await until(lambda: one.claims() == [])
    with pytest.raises(LeaseLost, match=r"is lost: its holder was not heard of for 0.2 s") as lost:
        await one.leasing.renew("train", lease.token)
    assert not isinstance(lost.value, LeaseUnknown)
    assert "lease_gone train" in one.told
    # It may ask anew, and is then known by another token.
    assert (await one.leasing.acquire(ask())).token > lease.token


@pytest.mark.parametrize("still_s", [0.8, 2.0])
async def test_time_in_which_the_gateway_stood_still_is_not_counted_against_holders(one: Rig, still_s: float) -> None:
    lease = await one.leasing.acquire(ask(ttl_s=0.6))
    # No renewal could be received meanwhile.
    time.sleep(still_s)
    # Its timer is due in the next turn.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (await one.leasing.renew("train", lease.token)).state == "held"
    # A holder that is not heard of by a gateway that listens loses it as ever.
    await until(lambda: one.claims() == [])


async def test_a_holder_that_is_killed_gives_its_memory_back_at_once(one: Rig, other: subprocess.Popen[bytes]) -> None:
    lease = await one.leasing.acquire(ask(ttl_s=3_600.0, holder=holder_of(other.pid)))
    assert one.leasing.owners() == {next(iter(one.state.slots)): other.pid}
    other.kill()
    await until(lambda: one.claims() == [])
    with pytest.raises(LeaseLost, match="its holder has ended"):
        await one.leasing.renew("train", lease.token)
    assert one.leasing.owners() == {}


async def test_a_holder_that_never_was_is_refused(tmp_path: Path) -> None:
    mine = holder_of(os.getpid())
    assert mine is not None
    async with rig(tmp_path) as one:
        with pytest.raises(BadRequest, match="no process"):
            await one.leasing.acquire(ask(holder=replace(mine, start_ticks=mine.start_ticks + 1)))


async def test_a_holder_elsewhere_cannot_be_watched_and_is_believed(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    holder = holder_of(other.pid)
    assert holder is not None
    async with rig(tmp_path) as one:
        for number, elsewhere in enumerate([replace(holder, host="far"), replace(holder, pid_ns=1)]):
            lease = await one.leasing.acquire(ask(f"l{number}", 100, holder=elsewhere, ttl_s=3_600.0))
            other.kill()
            other.wait()
            assert (await one.leasing.renew(lease.id, lease.token)).state == "held"
        assert one.leasing.owners() == {}


# --- recalled -------------------------------------------------------------------------------------------------------


async def test_a_recall_is_seen_when_it_is_renewed_or_looked_at_and_is_told_when_overdue(tmp_path: Path) -> None:
    async with rig(tmp_path, model("a", 8_000)) as one:
        lease = await one.leasing.acquire(ask(mib=8_000, priority=2, preemptible=True, grace_s=1.0))
        assert lease.recall_in_s is None
        one.hurry("a")
        shown = await one.leasing.renew("train", lease.token)
        assert shown.recall_in_s is not None and 0 < shown.recall_in_s <= 1.0
        await until(lambda: "lease_overdue train" in one.told)
        overdue = (await one.leasing.find("train")).recall_in_s
        assert overdue is not None and overdue <= 0
        # It is reported, not taken away; the other comes when it has left.
        assert (await one.leasing.find("train")).state == "held" and "a" not in one.granted
        await one.leasing.release("train", lease.token)
        await until(lambda: "a" in one.granted)


# --- written down ---------------------------------------------------------------------------------------------------


async def test_a_restart_keeps_leases_whose_holders_live(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    mine = holder_of(os.getpid())
    async with rig(tmp_path, gpus=2) as before:
        wide = await before.leasing.acquire(ask("wide", 5_000, gpus=2, holder=mine))
        far = await before.leasing.acquire(ask("far", 100, ttl_s=2.0))
        await before.leasing.acquire(ask("dead", 200, holder=holder_of(other.pid)))
        await before.leasing.acquire(ask("over", 300))
        await before.leasing.release("over")
    other.kill()
    other.wait()
    # A pinned model would take all of the memory if it came first.
    greedy = model("greedy", 9_000, preload=True, pinned=True)
    async with rig(tmp_path, greedy, gpus=2, wall=lambda: 0.0) as after:
        assert [lease.id for lease in await after.leasing.leases()] == ["wide", "far"]
        again = await after.leasing.renew("wide", wide.token)
        assert (again.claim, again.token, again.holder) == (wide.claim, wide.token, mine)
        with pytest.raises(LeaseLost, match="its holder has ended"):
            await after.leasing.find("dead")
        # Asking again for what is held is asking once, and leaving before the answer gives nothing back.
        asking = asyncio.ensure_future(after.leasing.acquire(ask("wide", 5_000, gpus=2)))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait((asking,))
        # A holder elsewhere can still renew.
        await until(lambda: len(after.claims()) == 1)
        with pytest.raises(LeaseLost):
            await after.leasing.renew("far", far.token)
        # Tokens grow, also where the clock was set back.
        assert (await after.leasing.acquire(ask("new", 10))).token > max(wide.token, far.token)


async def test_a_restart_gives_no_lease_a_whole_ttl_again(tmp_path: Path) -> None:
    async with rig(tmp_path, wall=lambda: 1_000.0) as before:
        await before.leasing.acquire(ask(ttl_s=600.0))
    for wall_s, lasts_s in [(1_400.0, 500.0), (9_000.0, 300.0), (9_000.0, 300.0), (0.0, 600.0)]:
        async with rig(tmp_path, wall=lambda wall_s=wall_s: wall_s) as after:  # type: ignore[misc]
            assert lasts_s - 30 < (await after.leasing.find("train")).expires_in_s <= lasts_s


async def test_a_holder_that_was_heard_of_keeps_the_time_it_has_over_a_restart(tmp_path: Path) -> None:
    wall_s = 1_000.0
    async with rig(tmp_path, wall=lambda: wall_s) as before:
        lease = await before.leasing.acquire(ask(ttl_s=600.0))
        wall_s, before.ahead_s = 1_500.0, 500.0
        await before.leasing.renew("train", lease.token)
        await until(lambda: '"heard"' in (tmp_path / FILE_NAME).read_text())
    wall_s = 1_900.0
    async with rig(tmp_path, wall=lambda: wall_s) as after:
        # What it had left, and the grace after a restart.
        assert 470 < (await after.leasing.find("train")).expires_in_s < 501
        # And a holder that renews has its whole time again.
        assert (await after.leasing.renew("train", lease.token)).expires_in_s == pytest.approx(600)


async def test_a_lease_whose_gpu_is_gone_after_a_restart_is_lost(tmp_path: Path) -> None:
    async with rig(tmp_path, gpus=2) as before:
        lease = await before.leasing.acquire(ask(devices=("gpu1",)))
    async with rig(tmp_path, gpus=1) as after:
        with pytest.raises(LeaseLost, match="could not be had again"):
            await after.leasing.renew("train", lease.token)
        assert after.claims() == [] and not await after.leasing.leases()
    async with rig(tmp_path, gpus=2) as later:
        assert not await later.leasing.leases()


async def test_tokens_follow_the_clock_where_the_journal_is_gone(tmp_path: Path) -> None:
    async with rig(tmp_path, wall=lambda: 1_000.0) as before:
        first = await before.leasing.acquire(ask("a", 1))
    (tmp_path / FILE_NAME).unlink()
    async with rig(tmp_path, wall=lambda: 1_001.0) as after:
        assert (await after.leasing.acquire(ask("b", 1))).token > first.token


async def test_a_journal_that_cannot_be_written_costs_new_leases_only(tmp_path: Path) -> None:
    file = tmp_path / FILE_NAME
    file.mkdir()
    async with rig(tmp_path, model("a", 6_000)) as one:
        with pytest.raises(LeaseDenied, match=r"could be had, but cannot be written down .*Is a directory"):
            await one.leasing.acquire(ask(mib=8_000))
        assert not await one.leasing.leases()
        # Its memory was given back, and models go on.
        await one.serve("a")
        one.finish("a")
        file.rmdir()
        assert (await one.leasing.acquire(ask(mib=100))).state == "held"


def entry(name: str, *, is_held: bool = False, is_asked: bool = False, **said: object) -> LeaseEntry:
    settled = asyncio.get_running_loop().create_future()
    return LeaseEntry(ask(name, **said), settled, slot=SlotId(name) if is_held else None, is_asked=is_asked)  # type: ignore[arg-type]


async def test_only_the_first_waiter_of_a_device_asks_and_the_most_urgent_asks_first() -> None:
    first, second = entry("first", devices=("gpu0",)), entry("second", devices=("gpu0",))
    elsewhere, urgent = entry("elsewhere", devices=("gpu1",)), entry("urgent", devices=("gpu0",), priority=0)
    line = [entry("held", is_held=True), first, second, elsewhere, urgent]
    assert may_ask(line) == [urgent, first, elsewhere]
    assert is_behind(second, line) and not is_behind(urgent, line)


async def test_those_that_are_held_are_not_passed_again_for_each_that_waits() -> None:
    looked_at: list[str] = []

    class Counted(LeaseEntry):
        @property
        def is_waiting(self) -> bool:
            looked_at.append(self.id)
            return super().is_waiting

    plain = [entry(f"h{number}", is_held=True) for number in range(300)]
    held = [Counted(one.ask, one.settled, slot=one.slot) for one in plain]
    waiting = [entry(f"w{number}", is_asked=number == 0) for number in range(300)]
    assert may_ask([*held, *waiting]) == []
    assert len(looked_at) <= 2 * len(held)
