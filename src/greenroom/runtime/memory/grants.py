"""Whether memory may be used: asked before an engine starts, and before one is stopped for another's sake.

Owns the words between who moves models and who grants memory. Where a gateway has its GPUs to itself the scheduler's
word is enough (`Alone`); where it shares them, `shared_slots.py` asks the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from greenroom.core.model import Claim, Device, DeviceId, DeviceKind, Move, SlotId
from greenroom.runtime.catalogue import Entry


class NoGrant(Exception):
    """This memory is not to be had now. Nobody has failed: the scheduler plans again."""


class Grants(Protocol):
    async def enter(self, move: Move) -> None:
        """Hold what this load needs. Raises NoGrant or StoreDown; `leave` follows in any case."""

    async def confirm(self, slot: SlotId) -> None:
        """The last word before an engine starts. Raises NoGrant if what was held is not held any more, or StoreDown."""

    async def make_way(self, move: Move) -> None:
        """Asked before a slot is touched that is to leave. Raises NoGrant if it would leave in vain."""

    async def leave(self, slot: SlotId) -> None:
        """Its processes have ended and its memory is back. Never raises; may be said of who holds nothing."""


class Alone:
    """Nobody else uses these GPUs by our rules."""

    async def enter(self, move: Move) -> None:
        return

    async def confirm(self, slot: SlotId) -> None:
        return

    async def make_way(self, move: Move) -> None:
        return

    async def leave(self, slot: SlotId) -> None:
        return


def visible_gpus(entry: Entry, claim: Claim, devices: Iterable[Device]) -> tuple[DeviceId, ...] | None:
    """In the order of the claim. None: there are no GPUs to plan with, and nothing is to be said about them."""
    gpus = [device.id for device in devices if device.kind is DeviceKind.GPU]
    if not gpus:
        return None
    # 1. What it was given.
    if claimed := tuple(device for device in claim if device in gpus):
        return claimed
    # 2. Nobody knows what it needs: it may use what the operator allows, is measured there, and fitted the next time.
    if _is_unknown(entry, claim):
        return tuple(gpu for gpu in gpus if not entry.spec.devices or gpu in entry.spec.devices)
    # 3. It is known to need none.
    return ()


def _is_unknown(entry: Entry, claim: Claim) -> bool:
    """Also where host memory alone is known: a program may have been measured when it had no GPU to use."""
    config = entry.config
    if config.device == "cpu" or config.memory_mib == 0:
        return False
    return not claim or (config.engine == "command" and config.memory_mib is None)
