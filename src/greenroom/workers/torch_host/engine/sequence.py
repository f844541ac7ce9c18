"""One ask while it is being performed: its tokens so far, what of them is computed, and how it ends.

Owns the words to its listener: every token once, one end, and nothing after it. Never computes and never takes memory
by itself: its blocks are given and taken by the seats.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from ..failures import shortened
from .model_shape import BLOCK_TOKENS, Blocks, blocks_for
from .prefix_cache import Node, Owner, PrefixCache
from .requests import Ask, End, EndReason, Token
from .sampling import Chooser

log = logging.getLogger(__name__)


class Speech:
    """An ask from the moment it is submitted until its end. Used by the model's thread only."""

    def __init__(self, ask: Ask, on_over: Callable[[], None]) -> None:
        """`on_over` is called once, just before the listener hears the end."""
        self.ask = ask
        self._on_over = on_over
        self.tokens = list(ask.tokens)
        self.prompt = len(ask.tokens)
        self.chooser = Chooser(ask.sampling, ask.tokens, ask.constraint)
        self.computed = 0
        """Tokens whose keys and values are in KV memory."""
        self.nodes: list[Node] = []
        """Cached blocks in use, the first ones of the table."""
        self.blocks: list[int] = []
        """The whole table: blocks of the nodes, then blocks of its own."""
        self.rope_band = 0
        """How many of the model's `rope_switches` it was longer than when it sat down: so its keys are turned."""
        self.compute_s = 0.0
        self.is_ended = False
        self.since = time.monotonic()

    @property
    def owner(self) -> Owner:
        return (self.ask.tenant, self.ask.tag, self.rope_band)

    @property
    def said(self) -> int:
        return len(self.tokens) - self.prompt

    def hear(self, token: Token) -> None:
        """This token was chosen. Ends the speech where it must end."""
        if self.is_ended:
            return
        if not self._accepts(token.id):
            return
        if token.id in self.ask.stop_tokens:
            self.end("stop")
            return
        if self.said >= self.ask.max_tokens:
            self.end("length")
            return
        self.tokens.append(token.id)
        self._tell(token)
        if self.ask.constraint is not None and self.ask.constraint.is_done:
            self.end("stop")
        elif self.said >= self.ask.max_tokens:
            self.end("length")

    def _accepts(self, token: int) -> bool:
        if self.ask.constraint is None:
            return True
        try:
            self.ask.constraint.accept(token)
        except Exception as error:  # Foreign code: its failure ends this answer and no other.
            self.end("error", f"the output constraint failed: {shortened(str(error))}")
            return False
        return True

    def _tell(self, token: Token) -> None:
        try:
            self.ask.listener.on_token(token)
        except Exception:
            log.exception("listener failed ask=%s", self.ask.id)
            self.end("cancelled")

    def end(self, reason: EndReason, error: str | None = None, *, is_memory: bool = False) -> None:
        """The last word. Said once; whoever comes later is not heard."""
        if self.is_ended:
            return
        self.is_ended = True
        self._on_over()
        try:
            self.ask.listener.on_end(End(reason, error, self.compute_s, is_memory))
        except Exception:
            log.exception("listener failed at the end ask=%s", self.ask.id)


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
