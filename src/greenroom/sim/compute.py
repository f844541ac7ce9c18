"""Answers that share a GPU: how fast each one is while others run beside it, and when it ends.

Owns the progress of answers in worlds where speed is not constant (`Timings.speed`). All answers of a slot are equally
fast at any time, so each slot has one clock of work done; an answer ends when that clock has advanced by its work. When
a batch grows or shrinks, or a neighbour on the same GPU becomes busy or idle, the clock's rate changes and the next end
is scheduled anew. Seconds of work are seconds that the answer would take alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Protocol, TypeVar

from greenroom.core.model import Device, DeviceId, DeviceKind, SlotId
from greenroom.sim.config import SpeedCurve
from greenroom.sim.records import Fate, SimCall, SimPlace

Subject = TypeVar("Subject")
# A request and which of its grants is meant: it may be granted anew.
Granted = tuple[SimCall, int]


class Agenda(Protocol):
    """What is needed of the world's clock."""

    @property
    def now(self) -> float: ...

    def arrange(self, after_s: float, action: Callable[[Subject], object], subject: Subject) -> None: ...


class RunningAnswers:
    """The answers of a busy slot. `done_s` is its clock of work."""

    __slots__ = ("batch", "curve", "devices", "done_s", "due", "planned", "rate", "since")

    def __init__(self, curve: SpeedCurve | None, devices: tuple[DeviceId, ...], now: float) -> None:
        self.curve = curve
        self.devices = devices
        self.batch = 0
        self.done_s = 0.0
        self.since = now
        self.rate = 1.0
        # By the reading of `done_s` at which each ends.
        self.due: list[tuple[float, int, Granted]] = []
        # The number of the scheduled end; earlier ones are void.
        self.planned = 0

    def advance(self, now: float) -> None:
        self.done_s += (now - self.since) * self.rate
        self.since = now


class Compute:
    """Calls `answered` when an answer ends."""

    def __init__(self, agenda: Agenda, answered: Callable[[Granted], None]) -> None:
        self._agenda = agenda
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
            running = self._running[place.id] = RunningAnswers(curve, _computes_on(place, devices), self._agenda.now)
            for device in running.devices:
                self._busy.setdefault(device, {})[place.id] = running
        running.advance(self._agenda.now)
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
        now = self._agenda.now
        running.advance(now)
        running.batch = batch
        if running.curve is not None:
            running.rate = running.curve.speed(batch, self._neighbours(running))
        due = running.due
        while due and not _is_served(due[0][2]):
            heappop(due)
        running.planned += 1
        if due:
            self._agenda.arrange((due[0][0] - running.done_s) / running.rate, self._end, (running, running.planned))

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
