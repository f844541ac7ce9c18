"""Ctrl-C while a command begins.

Owns what SIGINT does while there is nothing to clean up: it ends the process at once, without a word. The usual
exception will not do there: raised in the middle of an import it shows as a traceback, or as a panic of a library that
was just loaded, or is lost.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# What shells give a program that was interrupted: `Exit.INTERRUPTED`, whose module would have to be imported.
_INTERRUPTED: Final = 130


@contextmanager
def end_at_once() -> Iterator[None]:
    """Until the end of the block, or until somebody in it sets another handler, which then stays."""
    # Who was told to ignore it, as in the background of a script, goes on doing so.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    os._exit(_INTERRUPTED)
