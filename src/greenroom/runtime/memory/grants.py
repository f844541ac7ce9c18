"""Whether memory may be used: asked before an engine starts, and before one is stopped for another's sake.

Owns the words between who moves models and who grants memory. Where a gateway has its GPUs to itself the scheduler's
word is enough (`Alone`); where it shares them, `shared_slots.py` asks the store.
"""

from __future__ import annotations

from typing import Protocol

from greenroom.core.model import Move, SlotId


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
