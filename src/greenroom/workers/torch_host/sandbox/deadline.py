"""Runs foreign code in a thread that can be ended from outside. Owns such threads. Python cannot stop a thread, but it
can raise an exception in it, at its next instruction. That is enough for a loop of Python instructions."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")

# Foreign code may swallow the exception, so it is raised again until the thread has ended.
ENDING_EVERY_S = 0.05
ENDING_TRIES_MAX = 200


class DeadlineExceeded(Exception):
    """The code did not return in time, and was ended."""


class _Ended(SystemExit):
    """Not an Exception, so that foreign code does not catch it by accident. Threads print no trace for SystemExit."""


async def run_with_deadline(work: Callable[[], Result], deadline_s: float, name: str) -> Result:
    """What `work` returns or raises. Raises DeadlineExceeded if it takes longer. Cancelling the caller ends it too."""
    thread = _Thread(work, name)
    try:
        async with asyncio.timeout(deadline_s):
            await thread.is_over.wait()
    except TimeoutError:
        raise DeadlineExceeded(name) from None
    finally:
        thread.end()
    return thread.result()


class _Thread(Generic[Result]):
    def __init__(self, work: Callable[[], Result], name: str) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self.is_over = asyncio.Event()
        # While this is held and the thread has not finished, its number cannot belong to another thread.
        self._finishing = threading.Lock()
        self._is_finished = False
        self._value: list[Result] = []
        self._error: BaseException | None = None
        self._tries = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self) -> Result:
        if self._error is not None:
            raise self._error
        return self._value[0]

    def end(self) -> None:
        """Make the thread end if it has not; tries again until it has."""
        with self._finishing:
            if self._is_finished or not self._thread.is_alive():
                return
            number = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(_Ended))
        self._tries += 1
        if self._tries < ENDING_TRIES_MAX and not self._loop.is_closed():
            self._loop.call_later(ENDING_EVERY_S, self.end)

    def _run(self) -> None:
        try:
            self._value.append(self._work())
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        finally:
            # The exception may be raised here too. Once `_is_finished` is true, none follows.
            while not self._is_finished:
                with contextlib.suppress(_Ended):
                    self._finish()
        with contextlib.suppress(RuntimeError):
            # The loop may have closed; then no caller waits.
            self._loop.call_soon_threadsafe(self.is_over.set)

    def _finish(self) -> None:
        with self._finishing:
            self._is_finished = True
