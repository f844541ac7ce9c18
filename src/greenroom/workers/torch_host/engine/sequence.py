"""One ask while it is being performed: its tokens so far, what of them is computed, and how it ends.

Owns the words to its listener: every token once, one end, and nothing after it. Never computes and never takes memory
by itself: its blocks are given and taken by the seats.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..failures import shortened
from .prefix_cache import CachedBlock, Owner
from .requests import End, EndReason, GenerationRequest, Token
from .sampling import SequenceSampler

log = logging.getLogger(__name__)


class Sequence:
    """An ask from the moment it is submitted until its end. Used by the model's thread only."""

    def __init__(self, request: GenerationRequest, on_end: Callable[[], None]) -> None:
        """`on_end` is called once, just before the listener hears the end."""
        self.request = request
        self._on_end = on_end
        self.tokens = list(request.tokens)
        self.prompt_tokens = len(request.tokens)
        self.sampler = SequenceSampler(request.sampling, request.tokens, request.constraint)
        self.computed = 0
        """Tokens whose keys and values are in KV memory."""
        self.cached: list[CachedBlock] = []
        """Cached blocks in use, the first ones of the table."""
        self.blocks: list[int] = []
        """The whole table: blocks of the nodes, then blocks of its own."""
        self.rope_band = 0
        """How many of the model's `rope_switches` it was longer than when it sat down: so its keys are turned."""
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
        """This token was chosen. Ends the speech where it must end."""
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
        """The last word. Said once; whoever comes later is not heard."""
        if self.is_ended:
            return
        self.is_ended = True
        self._on_end()
        try:
            self.request.listener.on_end(End(reason, error, self.compute_s, is_memory))
        except Exception:
            log.exception("listener failed at the end ask=%s", self.request.id)
