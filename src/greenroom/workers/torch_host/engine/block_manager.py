"""Which blocks of KV memory each sequence has.

Owns giving blocks to sequences and taking them back, cached ones first. Safe to call from any thread.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence

from .model_shape import BLOCK_TOKENS, blocks_for
from .prefix_cache import Blocks, PrefixCache
from .sequence import Speech


class Seats:
    def __init__(self, cache_tokens: int, block_bytes: int, rope_switches: Sequence[int] = ()) -> None:
        """`rope_switches`: lengths beyond which keys differ, in order."""
        self._rope_switches = rope_switches
        self._blocks = Blocks(cache_tokens)
        self._cache = PrefixCache(self._blocks, block_bytes)
        self._lock = threading.Lock()

    @property
    def tokens_max(self) -> int:
        return self._blocks.total * BLOCK_TOKENS

    @property
    def available(self) -> int:
        """Blocks that can be had now."""
        with self._lock:
            return self._cache.available

    def clear(self) -> None:
        """KV memory was dropped; nobody has a seat any more."""
        with self._lock:
            self._blocks.clear()
            self._cache.clear()

    def flush(self, tenant: str | None, tag: str | None) -> tuple[int, int]:
        with self._lock:
            return self._cache.flush(tenant, tag)

    def sit(self, speech: Speech, spare: int) -> bool:
        """Give it blocks for all its tokens, cached ones first, if `spare` stay available; else nothing happens."""
        speech.rope_band = bisect_left(self._rope_switches, len(speech.tokens))
        with self._lock:
            nodes = self._cache.match(speech.owner, speech.tokens) if speech.ask.uses_cache else []
            needed = blocks_for(len(speech.tokens)) - len(nodes)
            if needed + spare > self._cache.available:
                self._cache.release(nodes)
                return False
            speech.nodes = nodes
            speech.blocks = [node.block for node in nodes] + self._cache.take(needed)
            speech.computed = len(nodes) * BLOCK_TOKENS
            # A sequence that sits down again finds what it left behind itself; only the first time counts as reuse.
            if speech.ask.cached_tokens is None:
                speech.ask.cached_tokens = speech.computed
            return True

    def grow(self, speech: Speech, tokens: int) -> list[int] | None:
        """The blocks it needs in addition to hold this many tokens. None if they cannot be had."""
        with self._lock:
            needed = blocks_for(tokens) - len(speech.blocks)
            if needed > self._cache.available:
                return None
            added = self._cache.take(max(0, needed))
            speech.blocks.extend(added)
            return added

    def share(self, speech: Speech) -> None:
        """Put what is computed into the cache, by whole blocks, for others that begin alike."""
        if not speech.ask.uses_cache:
            return
        with self._lock:
            held = len(speech.nodes)
            own = speech.blocks[held : speech.computed // BLOCK_TOKENS]
            speech.nodes.extend(self._cache.keep(speech.owner, speech.tokens, speech.nodes, own))

    def leave(self, speech: Speech) -> None:
        """Give up the seat. What was shared stays cached until somebody needs the room."""
        self.share(speech)
        with self._lock:
            self._blocks.give(speech.blocks[len(speech.nodes) :])
            self._cache.release(speech.nodes)
        speech.nodes, speech.blocks, speech.computed = [], [], 0
