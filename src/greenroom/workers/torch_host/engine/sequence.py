"""One request while it is generated: its tokens so far, how many of them are computed, and how it ends.

Owns what the listener is told: every token once, then one end, and nothing after it. Never computes and never takes
memory: the block manager gives it blocks and takes them back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..failures import shortened
from .requests import End, EndReason, GenerationRequest, Token
from .sampling import SequenceSampler

log = logging.getLogger(__name__)

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


class Sequence:
    """A request from its submission until its end. Used by the model's thread only."""

    def __init__(self, request: GenerationRequest, on_end: Callable[[], None]) -> None:
        """`on_end` is called once, just before the listener is told the end."""
        self.request = request
        self._on_end = on_end
        self.tokens = list(request.tokens)
        self.prompt_tokens = len(request.tokens)
        self.sampler = SequenceSampler(request.sampling, request.tokens, request.constraint)
        self.computed = 0
        """Tokens whose keys and values are in KV memory."""
        self.cached: list[CachedBlock] = []
        """The cached blocks in use: the first ones of `blocks`."""
        self.blocks: list[int] = []
        """The whole block table: the cached blocks, then its own."""
        self.rope_band = 0
        """How many of the model's `rope_switches` it exceeded when it got its blocks. Selects its rotary factors."""
        self.compute_s = 0.0
        self.is_ended = False
        self.created_at = time.monotonic()

    @property
    def owner(self) -> Owner:
        return (self.request.tenant, self.request.tag, self.rope_band)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def add_token(self, token: Token) -> None:
        """Take the sampled token, tell the listener, and end the sequence if this was its last token."""
        if self.is_ended:
            return
        if not self._accepts(token.id):
            return
        if token.id in self.request.stop_tokens:
            self.end("stop")
            return
        if self.generated >= self.request.max_tokens:
            self.end("length")
            return
        self.tokens.append(token.id)
        self._notify(token)
        if self.request.constraint is not None and self.request.constraint.is_done:
            self.end("stop")
        elif self.generated >= self.request.max_tokens:
            self.end("length")

    def _accepts(self, token: int) -> bool:
        if self.request.constraint is None:
            return True
        try:
            self.request.constraint.accept(token)
        except Exception as error:  # Foreign code: its failure ends this answer and no other.
            self.end("error", f"the output constraint failed: {shortened(str(error))}")
            return False
        return True

    def _notify(self, token: Token) -> None:
        try:
            self.request.listener.on_token(token)
        except Exception:
            log.exception("listener failed ask=%s", self.request.id)
            self.end("cancelled")

    def end(self, reason: EndReason, error: str | None = None, *, is_memory: bool = False) -> None:
        """End the sequence and tell the listener. Only the first call counts."""
        if self.is_ended:
            return
        self.is_ended = True
        self._on_end()
        try:
            self.request.listener.on_end(End(reason, error, self.compute_s, is_memory))
        except Exception:
            log.exception("listener failed at the end ask=%s", self.request.id)
