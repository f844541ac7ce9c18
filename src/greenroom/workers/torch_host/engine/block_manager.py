"""Gives blocks of KV memory to sequences and takes them back. A prompt with a known beginning gets cached blocks and is
computed from where it differs.

Owns the free blocks, the tree of cached blocks, their use counts and the order of eviction, and the block tables of
sequences. A block is found by its owner and all tokens before it, so a tenant never reads what another tenant computed.
Never touches the memory itself. A sequence is changed by the model's thread only; `flush` and
`available` may be called from any thread. Read `PrefixCache.match` and `keep` first.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict

from .model_shape import BLOCK_TOKENS, SCRATCH_BLOCK, blocks_for
from .sequence import BlockKey, CachedBlock, Owner, Sequence


class PrefixCache:
    """The free blocks, the cached ones as trees, one per owner, and the unused ones in order of eviction. Not
    thread-safe: the block manager holds a lock."""

    def __init__(self, cache_tokens: int, block_bytes: int) -> None:
        self.total = blocks_for(cache_tokens)
        self._block_bytes = block_bytes
        self._roots: dict[Owner, dict[BlockKey, CachedBlock]] = {}
        # Oldest first. A parent is always released after its children, so the oldest is always a leaf.
        self._unused: OrderedDict[int, CachedBlock] = OrderedDict()
        self.clear()

    def clear(self) -> None:
        """The memory was dropped: all blocks are free, and nothing is cached or in use."""
        # Low numbers are taken first, so a single sequence lies in order in memory.
        self._free = list(range(self.total, SCRATCH_BLOCK, -1))
        self._roots.clear()
        self._unused.clear()

    @property
    def available(self) -> int:
        """Blocks that can be taken: the free ones and the cached ones that are not in use."""
        return len(self._free) + len(self._unused)

    def take(self, count: int) -> list[int]:
        """Take this many blocks, evicting least recently used cached ones. The caller has checked `available`."""
        while len(self._free) < count:
            _, oldest = self._unused.popitem(last=False)
            self._evict(oldest)
            self._free.append(oldest.block)
        return [self._free.pop() for _ in range(count)]

    def give(self, blocks: list[int]) -> None:
        """These blocks, which are not cached, are free again."""
        self._free.extend(reversed(blocks))

    def match(self, owner: Owner, tokens: list[int]) -> list[CachedBlock]:
        """Use the longest cached beginning of these tokens. The last token is left out: it must be computed."""
        found: list[CachedBlock] = []
        children = self._roots.get(owner, {})
        for start in range(0, (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            node = children.get(tuple(tokens[start : start + BLOCK_TOKENS]))
            if node is None:
                break
            self._use(node)
            found.append(node)
            children = node.children
        return found

    def keep(self, owner: Owner, tokens: list[int], held: list[CachedBlock], blocks: list[int]) -> list[CachedBlock]:
        """Cache full blocks of these tokens after those in `held`, and return the new ones, which are in use. `blocks`
        are the sequence's own blocks after `held`. Stops where the same tokens are cached already: the sequence goes on
        with its own copy."""
        added: list[CachedBlock] = []
        parent = held[-1] if held else None
        if parent is not None and not parent.is_reachable:
            return added
        for at, block in enumerate(blocks, start=len(held)):
            key = tuple(tokens[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS])
            if len(key) < BLOCK_TOKENS:
                break
            children = parent.children if parent is not None else self._roots.setdefault(owner, {})
            if key in children:
                break
            parent = children[key] = CachedBlock(owner, block, parent, key, users=1)
            added.append(parent)
        return added

    def release(self, nodes: list[CachedBlock]) -> None:
        """This sequence no longer uses these. Leaves are released first, so they are evicted first."""
        for node in reversed(nodes):
            node.users -= 1
            if node.users == 0 and node.is_reachable:
                self._unused[id(node)] = node
            elif node.users == 0:
                self._free.append(node.block)

    def flush(self, tenant: str | None, tag: str | None) -> tuple[int, int]:
        """Remove all blocks of this tenant and tag; None means any. Returns their tokens and their bytes."""
        gone = 0
        for owner in [o for o in self._roots if tenant in (None, o[0]) and tag in (None, o[1])]:
            waiting = list(self._roots.pop(owner).values())
            while waiting:
                node = waiting.pop()
                waiting.extend(node.children.values())
                self._remove(node)
                gone += 1
        return gone * BLOCK_TOKENS, gone * self._block_bytes

    def _remove(self, node: CachedBlock) -> None:
        node.is_reachable = False
        node.children = {}
        if node.users == 0:
            del self._unused[id(node)]
            self._free.append(node.block)

    def _use(self, node: CachedBlock) -> None:
        if node.users == 0:
            del self._unused[id(node)]
        node.users += 1

    def _evict(self, node: CachedBlock) -> None:
        node.is_reachable = False
        siblings = self._roots[node.owner] if node.parent is None else node.parent.children
        del siblings[node.key]
        if node.parent is None and not siblings:
            del self._roots[node.owner]


class BlockManager:
    def __init__(self, cache_tokens: int, block_bytes: int, rope_switches: tuple[int, ...] = ()) -> None:
        """`rope_switches`: lengths beyond which keys differ, in order."""
        self._rope_switches = rope_switches
        self._cache = PrefixCache(cache_tokens, block_bytes)
        self.size_bytes = self._cache.total * block_bytes
        self._lock = threading.Lock()

    @property
    def available(self) -> int:
        """Blocks that can be allocated now, including cached ones that are not in use."""
        with self._lock:
            return self._cache.available

    @property
    def used(self) -> float:
        """The share of blocks that sequences use; cached ones that no sequence uses count as free."""
        return 1 - self.available / self._cache.total if self._cache.total else 0.0

    def clear(self) -> None:
        """KV memory was dropped: all blocks are free and nothing is cached."""
        with self._lock:
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
            self._cache.give(sequence.blocks[len(sequence.cached) :])
            self._cache.release(sequence.cached)
        sequence.cached, sequence.blocks, sequence.computed = [], [], 0
