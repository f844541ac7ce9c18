"""Gives blocks of KV memory to sequences and takes them back.

Owns the block tables of sequences and the choice of cached blocks over new ones. Never touches the memory itself. A
sequence is changed by the model's thread only; `flush` and `available` may be called from any thread.
"""

from __future__ import annotations

import threading
from bisect import bisect_left

from .model_shape import BLOCK_TOKENS, blocks_for
from .prefix_cache import BlockPool, PrefixCache
from .sequence import Sequence


class BlockManager:
    def __init__(self, cache_tokens: int, block_bytes: int, rope_switches: tuple[int, ...] = ()) -> None:
        """`rope_switches`: lengths beyond which keys differ, in order."""
        self._rope_switches = rope_switches
        self._pool = BlockPool(cache_tokens)
        self._cache = PrefixCache(self._pool, block_bytes)
        self.size_bytes = self._pool.total * block_bytes
        self._lock = threading.Lock()

    @property
    def tokens_max(self) -> int:
        return self._pool.total * BLOCK_TOKENS

    @property
    def available(self) -> int:
        """Blocks that can be allocated now, including cached ones that are not in use."""
        with self._lock:
            return self._cache.available

    @property
    def used(self) -> float:
        """The share of blocks that sequences use; cached ones that no sequence uses count as free."""
        return 1 - self.available / self._pool.total if self._pool.total else 0.0

    def clear(self) -> None:
        """KV memory was dropped: all blocks are free and nothing is cached."""
        with self._lock:
            self._pool.clear()
            self._cache.clear()

    def flush(self, tenant: str | None, tag: str | None) -> tuple[int, int]:
        with self._lock:
            return self._cache.flush(tenant, tag)

    def allocate(self, sequence: Sequence, spare: int) -> bool:
        """Give it blocks for all its tokens, cached ones first. False and no change unless `spare` blocks remain."""
        sequence.rope_band = bisect_left(self._rope_switches, len(sequence.tokens))
        with self._lock:
            cached = self._cache.match(sequence.owner, sequence.tokens) if sequence.request.uses_cache else []
            needed = blocks_for(len(sequence.tokens)) - len(cached)
            if needed + spare > self._cache.available:
                self._cache.release(cached)
                return False
            sequence.cached = cached
            sequence.blocks = [node.block for node in cached] + self._cache.take(needed)
            sequence.computed = len(cached) * BLOCK_TOKENS
            # A preempted sequence finds its own blocks again; only the first allocation counts as reuse.
            if sequence.request.cached_tokens is None:
                sequence.request.cached_tokens = sequence.computed
            return True

    def grow(self, sequence: Sequence, tokens: int) -> list[int] | None:
        """Add the blocks it needs to hold this many tokens, and return them. None if there are too few."""
        with self._lock:
            needed = blocks_for(tokens) - len(sequence.blocks)
            if needed > self._cache.available:
                return None
            added = self._cache.take(max(0, needed))
            sequence.blocks.extend(added)
            return added

    def cache(self, sequence: Sequence) -> None:
        """Put its computed whole blocks into the cache, for prompts with the same beginning."""
        if not sequence.request.uses_cache:
            return
        with self._lock:
            held = len(sequence.cached)
            own = sequence.blocks[held : sequence.computed // BLOCK_TOKENS]
            sequence.cached.extend(self._cache.keep(sequence.owner, sequence.tokens, sequence.cached, own))

    def free(self, sequence: Sequence) -> None:
        """Take back all its blocks. Cached ones stay in the cache until they are needed."""
        self.cache(sequence)
        with self._lock:
            self._pool.give(sequence.blocks[len(sequence.cached) :])
            self._cache.release(sequence.cached)
        sequence.cached, sequence.blocks, sequence.computed = [], [], 0
