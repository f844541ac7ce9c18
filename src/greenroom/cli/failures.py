"""Exit statuses, and the exceptions that end a command with one. `main` prints each as one line on standard error,
without a traceback."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import ClassVar


class ExitStatus(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    NO_GATEWAY = 3
    # What shells report for a program that was interrupted.
    INTERRUPTED = 130


class CommandFailed(Exception):
    """The message says what failed, and what to do. `details` is longer text below it, such as an engine's output."""

    exit: ClassVar[ExitStatus] = ExitStatus.FAILED

    def __init__(self, message: str, details: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class WrongUsage(CommandFailed):
    exit = ExitStatus.USAGE


class OutputLost(CommandFailed):
    """Standard output cannot be written: a full disk, for instance. A closed pipe is a BrokenPipeError instead."""


class NoGateway(CommandFailed):
    """Nothing answers at the address."""

    exit = ExitStatus.NO_GATEWAY


class NotAStream(CommandFailed):
    """The answer to a streaming request is not a stream. `value` is the whole answer."""

    def __init__(self, message: str, value: object) -> None:
        super().__init__(message)
        self.value = value


class GatewayRefused(CommandFailed):
    """The gateway answered with an error."""

    def __init__(self, message: str, details: str | None = None, *, status: int = 0, code: str = "") -> None:
        super().__init__(message, details)
        self.status = status
        self.code = code


@contextmanager
def end_at_once() -> Iterator[None]:
    """An interrupt in this block ends the process at once, silently. A handler that the block sets stays."""
    # If interrupts are ignored, as in the background of a script, that stays so.
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
    os._exit(ExitStatus.INTERRUPTED)
