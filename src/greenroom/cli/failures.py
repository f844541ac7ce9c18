"""How a command can end other than well, and the exit status of each.

Whatever is raised here is said in one line on standard error, without a traceback.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    NO_GATEWAY = 3
    # What shells give a program that was interrupted.
    INTERRUPTED = 130


class CommandFailed(Exception):
    """The message says what, which, and what to do. `details` is longer text below it, such as an engine's lines."""

    exit: ClassVar[Exit] = Exit.FAILED

    def __init__(self, message: str, details: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class WrongUsage(CommandFailed):
    exit = Exit.USAGE


class NoGateway(CommandFailed):
    """Nothing answers at the address."""

    exit = Exit.NO_GATEWAY


class NotAStream(CommandFailed):
    """A stream was asked for and one whole answer came, which is in `value`."""

    def __init__(self, message: str, value: object) -> None:
        super().__init__(message)
        self.value = value


class Refused(CommandFailed):
    """The gateway answered, with an error."""

    def __init__(self, message: str, details: str | None = None, *, status: int = 0, code: str = "") -> None:
        super().__init__(message, details)
        self.status = status
        self.code = code
