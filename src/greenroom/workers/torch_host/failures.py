"""What can go wrong in a worker, by kind, and whether the process can go on afterwards.

Owns the kinds the control protocol speaks of and the judgement on foreign exceptions. Never imports torch: its errors
are known by their words, so that a worker without it can still say what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

# The process ends with this after an error that leaves its CUDA context unusable.
POISONED_EXIT = 70
MESSAGE_MAX_CHARS = 600
# After these words in an error of CUDA's nothing works any more in this process; running out of memory is none of them.
_POISON_WORDS = ("cuda error", "device-side assert", "cublas_status", "cudnn_status", "unspecified launch failure")
# Codes of the driver after which its context is lost: a hardware fault, and everything a kernel can do wrong.
_POISON_CODES = frozenset({214, 220, 226, 700, 702, 709, 710, *range(714, 720), 999})
# A library that asks the driver itself says so in its own way: cuBLAS, for the first product of a new thread.
_MEMORY_WORDS = ("out of memory", "cannot allocate memory", "not enough memory", "status_alloc_failed")
_CHAIN_MAX = 8

OnFatal = Callable[[BaseException, Callable[[], None]], None]
"""Told of an error that the process does not survive, and how those who asked are told if it may have been theirs."""


class Failure(Exception):
    """Something asked of this worker did not work. The message says what, which and what to do."""

    kind: ClassVar[str] = "failed"


class BadModel(Failure):
    """The model's files cannot be served: trying again changes nothing."""

    kind = "bad_model"


class OutOfMemory(Failure):
    """Device or host memory is too small for it now."""

    kind = "out_of_memory"


class UnknownSlot(Failure):
    kind = "unknown_slot"


class Cancelled(Failure):
    """Nobody wants it any more."""


class Stuck(Failure):
    """A thread computes and does not stop. What it computes with cannot be taken from it while the process lives."""


class DriverError(Failure):
    """The CUDA driver refused something."""

    def __init__(self, what: str, code: int, text: str) -> None:
        super().__init__(f"{what} failed: {text} (CUDA driver error {code}).")
        self.code = code


def translated(error: BaseException) -> Failure:
    """The same error as one of ours."""
    if isinstance(error, Failure):
        return error
    text = shortened(f"{type(error).__name__}: {error}")
    return OutOfMemory(text) if is_memory(error) else Failure(text)


def told(error: BaseException) -> Failure:
    """The same for who asked the model: words of foreign code may name files, processes or what others sent."""
    if isinstance(error, Failure):
        return error
    if is_memory(error):
        return OutOfMemory("memory ran out")
    return Failure(f"The model failed at this request ({type(error).__name__}); the log of its engine says how.")


def is_memory(error: BaseException) -> bool:
    """Memory was asked for and not there."""
    words = str(error).lower()
    return isinstance(error, OutOfMemory | MemoryError) or any(word in words for word in _MEMORY_WORDS)


def is_fatal(error: BaseException) -> bool:
    """The CUDA context is lost, or a thread is: nothing in this process can be relied on any more."""
    for cause in _chain(error):
        if isinstance(cause, Stuck):
            return True
        if isinstance(cause, DriverError) and cause.code in _POISON_CODES:
            return True
        if is_memory(cause) or isinstance(cause, Failure) or not isinstance(cause, RuntimeError):
            continue
        if any(word in str(cause).lower() for word in _POISON_WORDS):
            return True
    return False


def shortened(text: str) -> str:
    """One line, long enough to act on: engines like to answer with pages."""
    line = " ".join(text.split())
    return line if len(line) <= MESSAGE_MAX_CHARS else line[: MESSAGE_MAX_CHARS - 1] + "…"


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and len(found) < _CHAIN_MAX:
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return found
