"""Carries what the model's thread says to the event loop, many words with one wake-up.

Owns the queue between the two. It holds what one turn of the loop has not yet taken: at most a few tokens of each
sequence, since a sequence is bounded by its context. Never interprets what it carries.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)


class Mailbox:
    """Waking the loop costs a system call; a batch of sequences that speak in one step needs only one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_called = False

    def post(self, receive: Callable[[Any], None], letter: object) -> None:
        """From any thread: the loop will call `receive(letter)`, in the order of posting."""
        self._letters.append((receive, letter))
        if not self._is_called:
            self._is_called = True
            self._call()

    def _call(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop has closed: nobody is left to hear.
            self._letters.clear()

    def _deliver(self) -> None:
        # Lowered before the first letter is taken: one that is posted from here on calls again, so none is left lying.
        self._is_called = False
        while self._letters:
            receive, letter = self._letters.popleft()
            try:
                receive(letter)
            except Exception:
                # One receiver's mistake keeps nobody else from their letters.
                _log.exception("a letter could not be received")
