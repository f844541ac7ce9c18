"""Which prompt lies in which slot of a llama.cpp server, so that no tenant reuses another's (docs/adr/0020).

Owns the book of one process: for each of its slots, whose prompt it holds. A request is pinned to a slot (`id_slot`),
and told not to reuse what lies there unless it is its own (`cache_prompt`). While all requests are of one owner the
book is open: they are not pinned, and the server finds the best slot itself. A request for several answers takes all
slots: the server spreads it over them, and has no room for prompts that are still in those.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# Tenant and tag; None for a prompt that no request may reuse.
Owner = tuple[str, str] | None

_NO_CACHE = {"cache_prompt": b"false"}


class CachePin:
    """The place of one request. Without an index the server chooses."""

    __slots__ = ("erase", "fields", "index")

    def __init__(self, index: int | None, fields: dict[str, bytes], erase: tuple[int, ...] = ()) -> None:
        self.index = index
        # To be put into the request's body, as JSON.
        self.fields = fields
        # Slots that it takes, too, and whose prompts must be erased before.
        self.erase = erase


class PromptCacheSlots:
    def __init__(self, count: int) -> None:
        self._owners: list[Owner] = [None] * count
        self._is_busy = [False] * count
        self._used = [0] * count
        self._uses = 0
        self._sole: Owner = None
        self._unpinned = 0
        self.is_open = True
        # Those that wait for a place, first come, first served: else one that needs all slots might never get them.
        self._line: deque[object] = deque()
        # A request is over, or has stopped waiting.
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._owners)

    def pin(self, owner: Owner, *, spreads: bool = False) -> CachePin | None:
        """A place for a request of this owner; None if there is none now or others wait for one: await `place`."""
        return None if self._line else self._pin(owner, spreads)

    async def place(self, owner: Owner, *, spreads: bool = False) -> CachePin:
        """Wait for a place."""
        turn = object()
        self._line.append(turn)
        try:
            while self._line[0] is not turn or (pin := self._pin(owner, spreads)) is None:
                self._changed.clear()
                await self._changed.wait()
            return pin
        finally:
            self._line.remove(turn)
            self._changed.set()

    def _pin(self, owner: Owner, spreads: bool) -> CachePin | None:
        if self.is_sole(owner):
            self._sole = owner
            if spreads:
                return self._pin_all(owner)
            if any(self._is_busy):
                return None
            self._unpinned += 1
            return CachePin(None, {})
        self._close()
        if spreads:
            return self._pin_all(owner)
        # A request that is not pinned may still take any slot, and find there what a pinned one leaves.
        if self._unpinned or (index := self._best(owner)) is None:
            return None
        return CachePin(index, self._take(index, owner))

    def _pin_all(self, owner: Owner) -> CachePin | None:
        """Every slot, and the prompts of all but one are erased; None while any is in use."""
        if self._unpinned or any(self._is_busy):
            return None
        last = max(range(len(self)), key=self._used.__getitem__)
        index = last if self.is_open else self._best(owner)
        assert index is not None, "all slots are free"
        fields = self._take(index, owner)
        others = tuple(other for other in range(len(self)) if other != index)
        for other in others:
            self._owners[other], self._is_busy[other] = None, True
        return CachePin(index, fields, others)

    def _take(self, index: int, owner: Owner) -> dict[str, bytes]:
        """Put this owner's prompt into a slot. Returns the fields that do so."""
        is_own = self.is_open or (owner is not None and self._owners[index] == owner)
        self._uses += 1
        self._owners[index], self._is_busy[index], self._used[index] = owner, True, self._uses
        fields = {"id_slot": b"%d" % index}
        return fields if is_own else fields | _NO_CACHE

    def is_sole(self, owner: Owner) -> bool:
        """True if no other owner's prompt is in any slot, so that this one may use them all."""
        return self.is_open and owner is not None and self._sole in (None, owner)

    def release(self, pin: CachePin) -> None:
        """The request is over. Its prompt stays."""
        if pin.index is None:
            self._unpinned -= 1
        else:
            for index in (pin.index, *pin.erase):
                self._is_busy[index] = False
        self._changed.set()

    def forget(self, is_meant: Callable[[str, str], bool]) -> list[int]:
        """Let no request reuse prompts of these owners, by tenant and tag. Returns the slots that held some."""
        self._close()
        held = [index for index, owner in enumerate(self._owners) if owner is not None and is_meant(*owner)]
        for index in held:
            self._owners[index] = None
        return held

    def _close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._owners = [self._sole] * len(self._owners)

    def _best(self, owner: Owner) -> int | None:
        """A free slot: the owner's last one, else an empty one, else the one not used for longest."""

        def by_use(index: int) -> tuple[int, int]:
            # A server that chooses itself begins with the last: in the first there is most likely nothing.
            return self._used[index], index

        free = [index for index, is_busy in enumerate(self._is_busy) if not is_busy]
        own = [index for index in free if owner is not None and self._owners[index] == owner]
        if own:
            return max(own, key=by_use)
        empty = [index for index in free if self._owners[index] is None]
        return min(empty or free, key=by_use, default=None)
