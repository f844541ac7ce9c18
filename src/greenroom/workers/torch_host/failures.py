"""The errors of a worker, by kind, and whether the process can go on afterwards.

Owns the kinds that the control protocol names, and how foreign exceptions are judged. Never imports torch: its errors
are recognised by their text, so that a worker without it can still say what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

# The process ends with this after an error that leaves its CUDA context unusable.
POISONED_EXIT = 70
MESSAGE_MAX_CHARS = 600
# After a CUDA error with one of these texts nothing works any more in this process. Running out of memory is not one.
_POISON_WORDS = ("cuda error", "device-side assert", "cublas_status", "cudnn_status", "unspecified launch failure")
# Driver codes after which the context is lost: hardware faults and errors of kernels.
_POISON_CODES = frozenset({214, 220, 226, 700, 702, 709, 710, *range(714, 720), 999})
# Libraries that allocate through the driver themselves have their own texts, such as cuBLAS in a new thread.
_MEMORY_WORDS = ("out of memory", "cannot allocate memory", "not enough memory", "status_alloc_failed")
_CHAIN_MAX = 8

OnFatal = Callable[[BaseException, Callable[[], None]], None]
"""Called with an error that the process does not survive, and a function that reports it to the callers concerned."""


class Failure(Exception):
    """An operation of this worker failed. The message says what, which and what to do."""

    kind: ClassVar[str] = "failed"


class BadModel(Failure):
    """The model's files cannot be served; a retry changes nothing."""

    kind = "bad_model"


class OutOfMemory(Failure):
    """Device or host memory does not suffice now."""

    kind = "out_of_memory"


class UnknownSlot(Failure):
    kind = "unknown_slot"


class WorkCancelled(Failure):
    """The result is not wanted any more."""


class Stuck(Failure):
    """A thread computes and does not stop. Its memory cannot be freed while the process lives."""


class DriverError(Failure):
    """The CUDA driver refused something."""

    def __init__(self, what: str, code: int, text: str) -> None:
        super().__init__(f"{what} failed: {text} (CUDA driver error {code}).")
        self.code = code


def translated(error: BaseException) -> Failure:
    """The error as a Failure, for the gateway."""
    if isinstance(error, Failure):
        return error
    text = shortened(f"{type(error).__name__}: {error}")
    return OutOfMemory(text) if is_memory(error) else Failure(text)


def told(error: BaseException) -> Failure:
    """The error as a Failure, for a caller, without the text of foreign code: it may name files or other requests."""
    if isinstance(error, Failure):
        return error
    if is_memory(error):
        return OutOfMemory("memory ran out")
    return Failure(f"The model failed at this request ({type(error).__name__}); the log of its engine says how.")


def is_memory(error: BaseException) -> bool:
    """True if an allocation failed."""
    words = str(error).lower()
    return isinstance(error, OutOfMemory | MemoryError) or any(word in words for word in _MEMORY_WORDS)


def is_fatal(error: BaseException) -> bool:
    """True if the CUDA context or a thread is lost, so that nothing in this process can be relied on any more."""
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
    """The text on one line, cut to MESSAGE_MAX_CHARS: engines may answer with pages."""
    line = " ".join(text.split())
    return line if len(line) <= MESSAGE_MAX_CHARS else line[: MESSAGE_MAX_CHARS - 1] + "…"


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and len(found) < _CHAIN_MAX:
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return found
