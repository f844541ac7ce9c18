"""Cached prompt blocks: a prompt with a known beginning is computed from where it differs.

Owns the free blocks, the tree of cached blocks, their use counts and the order of eviction. A block is found by its
owner and all tokens before it, so a tenant never reads what another tenant computed. Never touches the memory and never
imports torch. Not thread-safe: the block manager holds a lock. Read `PrefixCache.match` and `keep` first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .model_shape import BLOCK_TOKENS, SCRATCH_BLOCK, blocks_for

# Tenant, tag and rope band: blocks are shared only where all three are equal.
Owner = tuple[str, str, int]
BlockKey = tuple[int, ...]


@dataclass(slots=True, eq=False)
class CachedBlock:
    """One cached block. A sequence that uses it also uses all its ancestors."""

    owner: Owner
    block: int
    parent: CachedBlock | None
    key: BlockKey
    users: int = 0
    is_reachable: bool = True
    """False once flushed: no match finds it, and its block is freed with its last user."""
    children: dict[BlockKey, CachedBlock] = field(default_factory=dict)


class PrefixCache:
    """Cached blocks as trees, one per owner, and the unused ones in order of eviction."""

    def __init__(self, blocks: BlockPool, block_bytes: int) -> None:
        self._pool = blocks
        self._block_bytes = block_bytes
        self._roots: dict[Owner, dict[BlockKey, CachedBlock]] = {}
        # Oldest first. A parent is always released after its children, so the oldest is always a leaf.
        self._unused: OrderedDict[int, CachedBlock] = OrderedDict()
        self.entries = 0

    def clear(self) -> None:
        """The memory was dropped: nothing is cached or in use."""
        self._roots.clear()
        self._unused.clear()
        self.entries = 0

    @property
    def available(self) -> int:
        """Blocks that can be taken: the free ones and the cached ones that are not in use."""
        return self._pool.free + len(self._unused)

    def take(self, count: int) -> list[int]:
        """Take this many blocks, evicting least recently used cached ones. The caller has checked `available`."""
        while self._pool.free < count:
            _, oldest = self._unused.popitem(last=False)
            self._evict(oldest)
            self._pool.give([oldest.block])
        return self._pool.take(count)

    def match(self, owner: Owner, tokens: Sequence[int]) -> list[CachedBlock]:
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

    def keep(
        self, owner: Owner, tokens: Sequence[int], held: Sequence[CachedBlock], blocks: Sequence[int]
    ) -> list[CachedBlock]:
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
            self.entries += 1
            added.append(parent)
        return added

    def release(self, nodes: Sequence[CachedBlock]) -> None:
        """This sequence no longer uses these. Leaves are released first, so they are evicted first."""
        for node in reversed(nodes):
            node.users -= 1
            if node.users == 0 and node.is_reachable:
                self._unused[id(node)] = node
            elif node.users == 0:
                self._pool.give([node.block])

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
        self.entries -= 1
        if node.users == 0:
            del self._unused[id(node)]
            self._pool.give([node.block])

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
        self.entries -= 1


class BlockPool:
    """The free blocks of one KV memory, by number."""

    def __init__(self, cache_tokens: int) -> None:
        self.total = blocks_for(cache_tokens)
        self._free: list[int] = []
        self.clear()

    def clear(self) -> None:
        """The memory was dropped: all blocks are free."""
        # Low numbers are taken first, so a single sequence lies in order in memory.
        self._free = list(range(self.total, SCRATCH_BLOCK, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take this many blocks. The caller has checked `free`."""
        if count > len(self._free):
            raise AssertionError(f"{count} blocks were asked for, {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give(self, blocks: Sequence[int]) -> None:
        self._free.extend(reversed(blocks))
