"""The order of waiting and who may pass whom. Replacing the policy means writing one such class.

Owns no state: it is given what it judges. Silent, like every policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from greenroom.core.events import Limits
from greenroom.core.model import DeviceId, ModelId, SlotId
from greenroom.core.swapper import ByMemory, Swapper
from greenroom.core.waitlist import Key, Waiter


@dataclass(frozen=True, slots=True)
class Blocked:
    """An earlier waiter whose model cannot come yet, the slots that must leave and the devices where memory lacks."""

    key: Key
    model: ModelId
    priority: int
    slots: frozenset[SlotId]
    devices: frozenset[DeviceId]


class Policy(Protocol):
    swapper: Swapper

    def key(self, priority: int, sequence: int) -> Key:
        """The place in the waiting order; smaller goes first. `sequence` counts arrivals."""
        ...

    def may_pass(self, waiter: Waiter, blocked: Blocked, overtaken: int) -> bool:
        """Whether this later waiter may take what that earlier one waits for, which happened `overtaken` times."""
        ...


class PriorityThenArrival:
    """Priority, then arrival. Equals that can be served at once may pass a blocked one a bounded number of times."""

    def __init__(self, limits: Limits, swapper: Swapper | None = None) -> None:
        self._overtakes_max = limits.overtakes_max
        self.swapper: Swapper = swapper or ByMemory()

    def key(self, priority: int, sequence: int) -> Key:
        return (priority, sequence)

    def may_pass(self, waiter: Waiter, blocked: Blocked, overtaken: int) -> bool:
        return waiter.priority == blocked.priority and overtaken < self._overtakes_max
