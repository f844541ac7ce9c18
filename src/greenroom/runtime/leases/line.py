"""The line of leases that wait: whoever came before and is as urgent goes first, so that no large one waits for ever.

Pure. Only those at the head of the line are known to the scheduler, which weighs them against everybody else who waits;
the others stand behind them until they have it or have given up.
"""

from __future__ import annotations

from collections.abc import Iterable

from greenroom.runtime.leases.entry import Entry


def is_behind(entry: Entry, in_order: Iterable[Entry]) -> bool:
    """Whether it stands behind another of these, which are in the order they came; it need not be among them yet."""
    for other in in_order:
        if other is entry:
            return False
        if _goes_first(other, entry):
            return True
    return False


def may_ask(in_order: Iterable[Entry]) -> list[Entry]:
    """Who stood behind another and does so no longer; the most urgent first."""
    # Nobody stands behind one that is held; hundreds of those must not be passed again for each that waits.
    waiting = [entry for entry in in_order if entry.is_waiting]
    free = [entry for entry in waiting if not entry.is_asked and not is_behind(entry, waiting)]
    return sorted(free, key=lambda entry: entry.ask.priority)


def _goes_first(earlier: Entry, later: Entry) -> bool:
    """It waits too, is as urgent, and could use the same GPU."""
    if not earlier.is_waiting or earlier.ask.priority > later.ask.priority:
        return False
    mine, others = set(later.ask.devices), set(earlier.ask.devices)
    return not mine or not others or not mine.isdisjoint(others)
