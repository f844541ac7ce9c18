"""One ask while it is being performed: its tokens so far, what of them is computed, and how it ends.

Owns the words to its listener: every token once, one end, and nothing after it. Never computes and never takes memory
by itself: its blocks are given and taken by the seats.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..failures import shortened
from .prefix_cache import Node, Owner
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
