"""Watches memory: looks at the GPUs from time to time, and whenever something has happened.

Owns the last look, the peak of each slot, and the event that tells the scheduler what changed. A probe that fails costs
a warning: the last look is kept, and plans go on by claims. A look blocks, so it runs in a thread, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from greenroom.base.detached import run_detached
from greenroom.base.repeated import Repeated
from greenroom.core.events import Event, MemoryChanged
from greenroom.core.model import NO_CLAIM, Claim, DeviceId, SlotId, larger
from greenroom.errors import ProbeFailed
from greenroom.process import proc
from greenroom.runtime.memory.devices import HOST
from greenroom.runtime.memory.readings import (
    THIS_MACHINE,
    Attribution,
    GpuReading,
    Owner,
    Probe,
    Reading,
    attribute,
    not_back,
    short_of,
)
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.timeouts import TIMEOUTS, MemoryTimeouts
from greenroom.runtime.workers.hosted_slots import HostedSlots
from greenroom.telemetry.logs import get_logger

_log = get_logger("memory")

# Looks are at least this far apart, unless a caller waits for one.
GAP_S = 0.1
# What a swap of hosted slots takes, without the copies that go on in the background.
SWAP_S = 0.05
# How often memory is polled while a caller waits for it.
AGAIN_S = 0.05
# Host use changes all the time; only a change of this size is reported.
HOST_STEP_MIB = 64
# Peaks kept of slots that have gone.
GONE_KEPT_MAX = 256
# The log at start names this many strangers on each GPU, the largest first.
STRANGERS_TOLD_MAX = 16


class Owners(Protocol):
    def __call__(self) -> Mapping[str, Owner]:
        """All owners of memory, by slot id."""

    def by_identity(self, identity: str) -> str | None:
        """The slot with this process identity."""


@dataclass(frozen=True, slots=True)
class MemoryLook:
    """One look, and how its memory was attributed."""

    at: float
    reading: Reading
    shares: Attribution = field(default_factory=Attribution)
    names: Mapping[int, str] = field(default_factory=dict)  # Of strangers, by pid.


class MemoryWatch:
    def __init__(
        self,
        probe: Probe,
        owners: Owners,
        loop: SchedulerLoop,
        every_s: float,
        first: Reading,
        hosted: HostedSlots | None = None,
        timeouts: MemoryTimeouts = TIMEOUTS.memory,
    ) -> None:
        self._timeouts = timeouts
        self._probe = probe
        self._owners = owners
        self._loop = loop
        self._every_s = every_s
        self._hosted = hosted or HostedSlots()
        # What plans keep free for workers on each GPU; only their use beyond it is reported.
        self.set_aside_mib: Mapping[DeviceId, int] = {}
        self.last = MemoryLook(loop.clock(), first)
        # Called after each look, which may have shown new peaks.
        self.on_look: Callable[[], None] = lambda: None
        # Why the probe fails; None while it works.
        self.failure: str | None = None
        self._told = Attribution()
        self._peaks: dict[str, Claim] = {}
        self._missing: frozenset[str] = frozenset()
        self._watching = Repeated(self._look_soon, "looking at memory", lambda: every_s, _log.failed)
        self._one_look = asyncio.Lock()
        # No look starts before the last one has ended: a stuck driver would take thread after thread.
        self._looking: asyncio.Task[MemoryLook] | None = None

    @property
    def kind(self) -> str:
        """The kind of the probe."""
        return self._probe.kind

    @property
    def reading(self) -> Reading:
        """What was seen last."""
        return self.last.reading

    @property
    def sees_pids(self) -> bool:
        """Whether memory is attributed by process on every GPU, rather than estimated from what was declared."""
        return not self.last.shares.unseen

    def tell_first(self) -> None:
        """Tell the scheduler what was seen at the start, before it loads anything, and log the strangers."""
        self.last = look = self._shared_out(self.last.reading, self._owners(), self._owners.by_identity)
        for device, by_pid in look.shares.strangers.items():
            for pid, mib in sorted(by_pid.items(), key=lambda use: -use[1])[:STRANGERS_TOLD_MAX]:
                _log.info("a stranger uses GPU memory", gpu=device, pid=pid, name=look.names.get(pid), mib=mib)
        self._tell(look.shares)

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._watching.wake()
        self._watching.start()

    async def close(self) -> None:
        await self._watching.cancel()
        if self._looking is None or self._looking.done():
            self._probe.close()

    def post_and_look(self, event: Event) -> None:
        """For moves, lost engines and leases, which change what is used: post the event, and look soon."""
        self._loop.post(event)
        self.nudge()

    def host_available_mib(self) -> int:
        """By the last look."""
        return self.last.reading.host.available_mib

    def nudge(self) -> None:
        """Look soon: something has happened."""
        self._watching.wake()

    async def _look_soon(self) -> None:
        if self._hosted.there:
            # A swap is two moves in a row: a look between them would see neither, and delay the second.
            await asyncio.sleep(min(SWAP_S, self._every_s))
        await self.look_now()
        await asyncio.sleep(min(GAP_S, self._every_s))

    # --- looking ----------------------------------------------------------------------------------------------------

    async def look_now(self) -> Reading:
        """Look, and tell the scheduler what changed. The last reading again if the probe fails; never raises."""
        async with self._one_look:
            try:
                stirs = dict(self._hosted.stirs)
                look = await self._looked()
            except (ProbeFailed, OSError) as error:
                self._fail(str(error))
                return self.last.reading
            self._recover()
            if self._hosted.there or self._hosted.stirs:
                look = self._settled(look, self._hosted.stirred_since(stirs))
            self._take(look)
        return self.last.reading

    async def _looked(self) -> MemoryLook:
        """A new look. A look that an earlier caller gave up is waited for first; its result is outdated."""
        if self._looking is not None:
            await self._until_ended(self._looking)
        owners, by_identity = self._owners(), self._owners.by_identity
        work = run_detached(lambda: self._look(owners, by_identity), "look at memory")
        self._looking = looking = asyncio.get_running_loop().create_task(work, name="look at memory")
        await self._until_ended(looking)
        self._looking = None
        return looking.result()

    async def _until_ended(self, looking: asyncio.Task[MemoryLook]) -> None:
        look_s = self._timeouts.look_s
        done, _ = await asyncio.wait((looking,), timeout=look_s)
        if not done:
            raise ProbeFailed(f"The {self.kind} probe has not answered for {look_s:g} s.")
        if not looking.cancelled():
            # The error of a look that was given up is not reported.
            looking.exception()

    def _look(self, owners: Mapping[str, Owner], by_identity: proc.ByIdentity) -> MemoryLook:
        """Runs in a thread: touches nothing of the scheduler."""
        return self._shared_out(self._probe.look(), owners, by_identity)

    def _shared_out(self, reading: Reading, owners: Mapping[str, Owner], by_identity: proc.ByIdentity) -> MemoryLook:
        roots = {pid: name for name, owner in owners.items() for pid in owner.roots}
        pids = {pid for gpu in reading.gpus for pid in gpu.processes or ()}
        shares = attribute(reading, owners, proc.owners_of(pids, roots, by_identity) if pids else {})
        shares = replace(shares, seen={**shares.seen, **_host_use(owners, shares.seen, roots)})
        return MemoryLook(self._loop.clock(), reading, shares, _names(shares))

    def _settled(self, look: MemoryLook, stirred: frozenset[DeviceId]) -> MemoryLook:
        """Keep the last figures of GPUs where workers mapped or unmapped memory during the look."""
        told = self._hosted.told()
        seen = {owner: told.get(owner, claim) for owner, claim in look.shares.seen.items()}
        last = self.last.shares
        shares = replace(
            look.shares,
            seen=seen,
            foreign_mib={**look.shares.foreign_mib, **{gpu: last.foreign_mib.get(gpu, 0) for gpu in stirred}},
            own_mib={**look.shares.own_mib, **{gpu: last.own_mib.get(gpu, 0) for gpu in stirred}},
        )
        return replace(look, shares=shares)

    def _take(self, look: MemoryLook) -> None:
        self._tell_of_missing(look.reading)
        self.last = look
        for owner, seen in look.shares.seen.items():
            if seen:
                # Moved to the end, so that peaks of slots that have gone are dropped in the order in which they went.
                self._peaks[owner] = larger(self._peaks.pop(owner, NO_CLAIM), seen)
        for owner in list(self._peaks)[: max(0, len(self._peaks) - len(look.shares.seen) - GONE_KEPT_MAX)]:
            del self._peaks[owner]
        self._tell(look.shares)
        self.on_look()

    def _tell(self, now: Attribution) -> None:
        """Post one event for all that changed."""
        told, others = self._told, self._others_mib(now)
        foreign = {device: mib for device, mib in others.items() if mib != told.foreign_mib.get(device, 0)}
        known = {owner: told.seen.get(owner, NO_CLAIM) for owner in now.seen}
        news = {owner: claim for owner, claim in now.seen.items() if _is_news(claim, known[owner])}
        self._told = Attribution(others, known | news)
        if foreign or news:
            seen = {SlotId(owner): claim for owner, claim in news.items()}
            self._loop.post(MemoryChanged(self._loop.clock(), foreign, seen or None))

    async def glance(self, gpu: DeviceId) -> GpuReading | None:
        """The current use of this GPU alone; nothing is posted. None if it cannot be seen."""
        if self.failure is not None:
            return None
        try:
            async with asyncio.timeout(self._timeouts.glance_s):
                return await run_detached(lambda: self._probe.glance(gpu), "glance at memory")
        except (ProbeFailed, OSError):
            # It does not answer in time, or there is no thread to ask it. The next look finds out whether this lasts.
            return None

    def _others_mib(self, now: Attribution) -> dict[DeviceId, int]:
        """Use of no slot: by strangers, and by workers for themselves beyond what is set aside for them."""
        own = {gpu: max(0, mib - self.set_aside_mib.get(gpu, 0)) for gpu, mib in now.own_mib.items()}
        return {gpu: mib + own.get(gpu, 0) for gpu, mib in now.foreign_mib.items()}

    # --- what was seen ----------------------------------------------------------------------------------------------

    def seen_of(self, slot: SlotId) -> Claim:
        """What this slot used at the last look, on devices where that can be seen."""
        return self.last.shares.seen.get(slot, NO_CLAIM)

    def peak_of(self, slot: SlotId) -> Claim:
        """The most that this slot was ever seen to use."""
        return self._peaks.get(slot, NO_CLAIM)

    async def back(self, before: Reading, released: Claim, timeout_s: float) -> Claim:
        """Wait until what a stopped slot used is free again. Returns what is still missing at the timeout."""
        return await self._until_there(lambda now: not_back(before, now, released), timeout_s)

    async def room_for(self, claim: Claim, timeout_s: float) -> Claim:
        """Wait until this much is really free, whatever the ledger says. Returns what is missing at the timeout."""
        return await self._until_there(lambda now: short_of(now, claim), timeout_s)

    async def _until_there(self, missing_at: Callable[[Reading], Claim], timeout_s: float) -> Claim:
        """Poll until nothing is missing. Where memory cannot be looked at, nothing counts as missing."""
        deadline = self._loop.clock() + timeout_s
        while True:
            missing = missing_at(await self.look_now())
            if self.failure is not None:
                return NO_CLAIM
            if not missing or self._loop.clock() >= deadline:
                return missing
            await asyncio.sleep(AGAIN_S)

    # --- what goes wrong --------------------------------------------------------------------------------------------

    def _fail(self, why: str) -> None:
        if self.failure is None:
            _log.warning("memory of GPUs cannot be looked at; the last figures are kept", why=why)
        self.failure = why

    def _recover(self) -> None:
        if self.failure is not None:
            _log.info("memory of GPUs can be looked at again")
        self.failure = None

    def _tell_of_missing(self, now: Reading) -> None:
        """Log GPUs that vanished or are back. A GPU that fell off the bus keeps its last figure."""
        before = frozenset(gpu.uuid for gpu in self.last.reading.gpus) | self._missing
        missing = before - {gpu.uuid for gpu in now.gpus}
        for uuid in sorted(missing - self._missing):
            _log.warning("GPU is no longer seen", gpu=uuid)
        for uuid in sorted(self._missing - missing):
            _log.info("GPU is seen again", gpu=uuid)
        self._missing = missing


def _names(shares: Attribution) -> dict[int, str]:
    """The process names of strangers."""
    strangers = {pid for by_pid in shares.strangers.values() for pid in by_pid}
    return {pid: name for pid in sorted(strangers) if (name := proc.name_of(pid)) is not None}


def _host_use(owners: Mapping[str, Owner], seen: Mapping[str, Claim], roots: Mapping[int, str]) -> dict[str, Claim]:
    """Host use of owners that were given host memory. Reads the process table only if there are any."""
    wanted = {pid: name for pid, name in roots.items() if owners[name].held.get(HOST)}
    trees = proc.trees(wanted) if wanted else {}
    return {
        name: {**seen.get(name, NO_CLAIM), HOST: used_mib}
        for name, pids in trees.items()
        if (used_mib := THIS_MACHINE.used_mib(pids))
    }


def _is_news(now: Claim, told: Claim) -> bool:
    if now.keys() != told.keys():
        return True
    return any(abs(mib - told[device]) >= (HOST_STEP_MIB if device == HOST else 1) for device, mib in now.items())
