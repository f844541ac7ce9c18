"""Engines that grow while they serve: remembered when it is seen, not only when they end.

Owns when a larger peak is worth writing down. A gateway that is killed writes nothing more, and an engine that had
grown by then would be given too little at its next load. Never measures: it is told after each look at memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from greenroom.core.model import Claim, SlotId
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.slots import Slots

# Growth beyond this share is written down at once: so many steps lead from one size to twice that one, and no more.
STEP: Final = 0.01
# What grows by less is written down as often as this.
EVERY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Noted:
    """The peak of a slot that was remembered last."""

    mib: int
    at: float


class Growth:
    """`peak_of` is the most a slot was seen to use; `remember` writes it down for its model."""

    def __init__(
        self,
        slots: Slots,
        peak_of: Callable[[SlotId], Claim],
        remember: Callable[[SlotId, Entry], None],
        clock: Callable[[], float],
    ) -> None:
        self._slots = slots
        self._peak_of = peak_of
        self._remember = remember
        self._clock = clock
        self._noted: dict[SlotId, Noted] = {}

    def look(self) -> None:
        """Memory was looked at."""
        now, live = self._clock(), self._slots.live
        self._noted = {slot: noted for slot, noted in self._noted.items() if slot in live}
        for slot, one in list(live.items()):
            peak_mib = sum(self._peak_of(slot).values())
            if _is_worth_it(peak_mib, self._noted.get(slot), now):
                self._noted[slot] = Noted(peak_mib, now)
                self._remember(slot, one.entry)


def _is_worth_it(peak_mib: int, noted: Noted | None, now: float) -> bool:
    if noted is None:
        return peak_mib > 0
    is_much = peak_mib > noted.mib * (1 + STEP)
    return is_much or (peak_mib > noted.mib and now >= noted.at + EVERY_S)
