"""Virtual time, and answers that share a GPU: how fast each one is while others run beside it, and when it ends.

Owns the clock, and the progress of answers in worlds where speed is not constant (`Timings.speed`). All answers of a
slot are equally fast at any time, so each slot has one clock of work done; an answer ends when that clock has advanced
by its work. When a batch grows or shrinks, or a neighbour on the same GPU becomes busy or idle, the rate of that clock
changes and the next end is scheduled anew. Seconds of work are seconds that the answer would take alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, TypeVar

from greenroom.core.model import Device, DeviceId, DeviceKind, SlotId
from greenroom.sim.config import SpeedCurve
from greenroom.sim.records import Fate, SimCall, SimPlace

Subject = TypeVar("Subject")
# A request and which of its grants is meant: it may be granted anew.
Granted = tuple[SimCall, int]
# After a clock step, `told` is a rounded sum; a timer must not fire that little bit early.
ROUNDING_S = 1e-6


class Clock:
    """Virtual time and what is scheduled in it. `told` is the scheduler's clock, which may be stepped."""

    __slots__ = ("_agenda", "_number", "_offset_s", "now", "told")

    def __init__(self) -> None:
        self.now = 0.0
        self.told = 0.0
        self._offset_s = 0.0
        self._number = 0
        self._agenda: list[tuple[float, int, Callable[[Any], object], Any]] = []

    def arrange(self, after_s: float, action: Callable[[Subject], object], subject: Subject) -> None:
        """Call action(subject) after this many seconds."""
        self.arrange_at(self.now + after_s, action, subject)

    def arrange_at(self, at: float, action: Callable[[Subject], object], subject: Subject) -> None:
        """Call it at this time; at once if that has passed."""
        self._number += 1
        heappush(self._agenda, (max(at, self.now), self._number, action, subject))

    def arrange_when_told(self, at: float, action: Callable[[Subject], object], subject: Subject) -> None:
        """Call it when the scheduler's clock shows this time."""
        self.arrange_at(at - self._offset_s + ROUNDING_S if self._offset_s else at, action, subject)

    def advance(self, until: float) -> bool:
        """Run the next action. Returns False if there is none up to `until`."""
        if not self._agenda or self._agenda[0][0] > until:
            return False
        at, _, action, subject = heappop(self._agenda)
        self.now = at
        self.told = at + self._offset_s
        action(subject)
        return True

    def pass_to(self, now: float) -> None:
        """Advance the time without running anything."""
        self.now = now
        self.told = now + self._offset_s

    def step(self, by_s: float) -> None:
        """The scheduler's clock jumps; real time goes on as before."""
        self._offset_s += by_s
        self.told = self.now + self._offset_s


@dataclass(slots=True, eq=False)
class RunningAnswers:
    """The answers of a busy slot. `done_s` is its clock of work."""

    curve: SpeedCurve | None
    devices: tuple[DeviceId, ...]
    since: float
    batch: int = 0
    done_s: float = 0.0
    rate: float = 1.0
    # By the reading of `done_s` at which each ends.
    due: list[tuple[float, int, Granted]] = field(default_factory=list)
    # The number of the scheduled end; earlier ones are void.
    planned: int = 0

    def advance(self, now: float) -> None:
        self.done_s += (now - self.since) * self.rate
        self.since = now


class Compute:
    """Calls `answered` when an answer ends."""

    def __init__(self, clock: Clock, answered: Callable[[Granted], None]) -> None:
        self._clock = clock
        self._answered = answered
        self._running: dict[SlotId, RunningAnswers] = {}
        self._busy: dict[DeviceId, dict[SlotId, RunningAnswers]] = {}

    def begin(
        self,
        place: SimPlace,
        call: SimCall,
        work_s: float,
        curve: SpeedCurve | None,
        devices: Mapping[DeviceId, Device],
    ) -> None:
        """This slot, which counts the request already, begins its answer. Without a curve its speed is constant."""
        running = self._running.get(place.id)
        is_new = running is None
        if running is None:
            running = self._running[place.id] = RunningAnswers(curve, _computes_on(place, devices), self._clock.now)
            for device in running.devices:
                self._busy.setdefault(device, {})[place.id] = running
        running.advance(self._clock.now)
        heappush(running.due, (running.done_s + work_s, call.number, (call, call.grants)))
        self._changed(running, len(place.running))
        if is_new:
            self._neighbours_changed(running)

    def left(self, slot: SlotId, batch: int) -> None:
        """A request has left this slot, answered or not; so many are left."""
        running = self._running.get(slot)
        if running is None:
            return
        if batch:
            self._changed(running, batch)
            return
        del self._running[slot]
        running.planned += 1
        for device in running.devices:
            del self._busy[device][slot]
        self._neighbours_changed(running)

    def _neighbours_changed(self, beside: RunningAnswers) -> None:
        for device in beside.devices:
            for running in tuple(self._busy[device].values()):
                if running is not beside:
                    self._changed(running, running.batch)

    def _changed(self, running: RunningAnswers, batch: int) -> None:
        """The batch or the neighbours are others now: schedule the next end anew."""
        now = self._clock.now
        running.advance(now)
        running.batch = batch
        if running.curve is not None:
            running.rate = running.curve.speed(batch, self._neighbours(running))
        due = running.due
        while due and not _is_served(due[0][2]):
            heappop(due)
        running.planned += 1
        if due:
            self._clock.arrange((due[0][0] - running.done_s) / running.rate, self._end, (running, running.planned))

    def _neighbours(self, running: RunningAnswers) -> int:
        """Other busy slots on the most crowded of its devices."""
        return max((len(self._busy[device]) for device in running.devices), default=1) - 1

    def _end(self, planned: tuple[RunningAnswers, int]) -> None:
        running, number = planned
        if running.planned == number:
            # Ending it changes the batch, which schedules the next end.
            self._answered(heappop(running.due)[2])


def _is_served(granted: Granted) -> bool:
    call, grants = granted
    return call.fate is Fate.GRANTED and call.grants == grants


def _computes_on(place: SimPlace, devices: Mapping[DeviceId, Device]) -> tuple[DeviceId, ...]:
    """Its GPUs, or the host if it has none."""
    held = [device for device in place.holds if device in devices]
    gpus = tuple(device for device in held if devices[device].kind is DeviceKind.GPU)
    return gpus or tuple(held)
