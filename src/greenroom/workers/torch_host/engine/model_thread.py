"""The thread of one model: awake it computes, asleep it waits, and it ends with the model.

Owns the thread, its state, and how other threads change that state and wait for it. What it computes is said by a
subclass. An error that loses the device is passed to `on_fatal`, which ends the process soon.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import torch

from ..failures import Failure, OnFatal, Stuck, translated

log = logging.getLogger(__name__)

# How long wake and sleep wait for the thread. A step on a slow CPU may take long. A thread that needs longer is stuck,
# and the process must end: a mere failure would leave memory mapped that the gateway counts as free.
SWITCH_TIMEOUT_S: Final = 120.0


class ModelThread(ABC):
    """Built asleep; `on_wake` and `on_sleep` follow the device weights. A subclass calls `_start` when it is built."""

    def __init__(self, devices: Sequence[torch.device], on_fatal: OnFatal, name: str, switch_timeout_s: float) -> None:
        """`devices` are those it computes on, the usual one first."""
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._on_fatal = on_fatal
        self._switch_timeout_s = switch_timeout_s
        self._condition = threading.Condition()
        self._should_wake = self._is_awake = self._should_close = False
        self._refused: Exception | None = None
        """Why it could not wake; `on_wake` raises it."""
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"model-{name}", daemon=True)

    # --- what the hosted slot calls ---------------------------------------------------------------------------------

    def on_wake(self) -> None:
        """Start computing: memory is mapped and weights are being copied. Returns when the thread has started. Raises
        what keeps the model from computing; then nothing touches the device any more."""
        self._set_awake(awake=True)

    def on_sleep(self) -> None:
        """Stop computing and end unfinished requests. Returns when nothing touches the device any more."""
        self._set_awake(awake=False)

    def close(self) -> None:
        """End waiting requests and the thread."""
        self._set_awake(awake=False)
        with self._condition:
            self._should_close = True
            self._condition.notify_all()
        self._thread.join(self._switch_timeout_s)

    def _set_awake(self, *, awake: bool) -> None:
        with self._condition:
            self._should_wake = awake
            self._condition.notify_all()
            in_time = self._condition.wait_for(
                lambda: self._is_awake == awake or self._ended is not None or self._refused is not None,
                self._switch_timeout_s,
            )
            refused, self._refused = self._refused, None
        if not in_time:
            verb = "begin" if awake else "stop"
            raise Stuck(f"the model's thread did not {verb} within {self._switch_timeout_s:.0f} s")
        if refused is not None:
            raise translated(refused) from refused
        if awake and self._ended is not None:
            raise Failure(f"the model's thread has ended: {translated(self._ended)}") from self._ended

    # --- what a subclass says ---------------------------------------------------------------------------------------

    @abstractmethod
    def _iterate(self) -> bool:
        """Wait for work, or for a change of state, and do some. False when the thread is to end."""

    @abstractmethod
    def _end_all(self, why: str) -> None:
        """End all requests with an error."""

    # --- what a subclass uses ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._thread.start()

    def _check_open(self) -> None:
        """Raises Failure if the model is closed. The condition is held."""
        if self._should_close:
            raise Failure("This model is not being served any more.")

    def _switched(self, *, awake: bool) -> None:
        """Tell threads that wait that the state has changed."""
        with self._condition:
            self._is_awake = awake
            self._condition.notify_all()

    def _synchronize(self) -> None:
        """Return when the device has done all that this thread asked of it."""
        for gpu in self._gpus:
            torch.cuda.current_stream(gpu).synchronize()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        error: BaseException | None = None
        try:
            with self._on_own_streams():
                while self._iterate():
                    pass
        except BaseException as caught:
            log.exception("the model's thread ends")
            error = caught
        finally:
            self._on_thread_end(error)

    def _on_own_streams(self) -> ExitStack:
        """The usual device comes last, which makes it the current one."""
        streams = ExitStack()
        for gpu in reversed(self._gpus):
            torch.cuda.set_device(gpu)
            streams.enter_context(torch.cuda.stream(torch.cuda.Stream(gpu)))
        return streams

    def _on_thread_end(self, error: BaseException | None) -> None:
        with self._condition:
            self._ended = error if error is not None else Failure("closed")
            self._is_awake = False
        try:
            if error is None:
                self._end_all("The model is not served any more.")
        finally:
            # In any case, threads that wait for this one learn that it has ended, and so does the process.
            with self._condition:
                self._condition.notify_all()
            if error is not None:
                self._on_fatal(error, lambda: self._end_all("The model's process has failed."))
