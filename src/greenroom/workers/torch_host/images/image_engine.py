"""The thread of one pipeline: it makes one picture after another.

Owns the queue before the thread, and what it does at wake and sleep. A job is cancelled between two steps. Pictures are
made one at a time, so that a job of ten takes no more memory than a job of one. Read `ImageEngine` first.
"""

from __future__ import annotations

import gc
import inspect
import logging
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from ..engine.model_thread import SWITCH_TIMEOUT_S, ModelThread
from ..failures import Failure, OnFatal, OutOfMemory, WorkCancelled, is_fatal, told
from ..weights.device_weights import DeviceWeights
from .image_fields import ImageRequest

log = logging.getLogger(__name__)


class PipelineStopped(Exception):
    """Raised inside a pipeline, between two steps, to end it."""


@dataclass(slots=True, eq=False)
class ImageJob:
    """Pictures that were asked for."""

    asked: ImageRequest
    done: Future[list[bytes]] = field(default_factory=Future)
    """The pictures as files, from the engine's thread."""
    cancelled: bool = False
    progress: float = 0.0
    made: list[bytes] = field(default_factory=list)
    asked_at: float = field(default_factory=time.monotonic)
    first_step_s: float | None = None
    """From asking to the end of the first step; None if the pipeline does not tell of its steps."""


class ImageEngine(ModelThread):
    """Implements `SlotEngine`. Built asleep. `pipelines` are by kind and share their components."""

    def __init__(
        self,
        pipelines: Mapping[str, Any],
        weights: DeviceWeights,
        *,
        on_fatal: OnFatal,
        name: str,
        switch_timeout_s: float = SWITCH_TIMEOUT_S,
    ) -> None:
        super().__init__(weights.devices, on_fatal, name, switch_timeout_s)
        self.pipelines = pipelines
        self._weights = weights
        self._jobs: deque[ImageJob] = deque()
        self._current: ImageJob | None = None
        self._start()

    # --- what the API sees ------------------------------------------------------------------------------------------

    def submit(self, job: ImageJob) -> None:
        """Make these pictures after all that were submitted before. Raises Failure if the model is closed."""
        with self._condition:
            self._check_open()
            # From now on only this engine ends it.
            job.done.set_running_or_notify_cancel()
            self._jobs.append(job)
            self._condition.notify_all()

    def cancel(self, job: ImageJob) -> None:
        """The pictures are not wanted any more: what is being made ends within a step."""
        job.cancelled = True

    @property
    def in_flight(self) -> int:
        with self._condition:
            return len(self._jobs) + (self._current is not None)

    @property
    def kv_used(self) -> float | None:
        return None

    @property
    def kv_bytes(self) -> int | None:
        return None

    def flush(self, tenant: str | None, tag: str | None) -> tuple[int, int]:
        """A pipeline keeps no prefixes."""
        return 0, 0

    # --- the thread -------------------------------------------------------------------------------------------------

    def _iterate(self) -> bool:
        """One change of state or one job. False when the thread is to end."""
        with self._condition:
            self._condition.wait_for(self._has_work)
            if self._should_close:
                return False
            changes = self._should_wake != self._is_awake
            self._current = self._jobs.popleft() if not changes and self._jobs else None
        if changes:
            self._switch(awake=self._should_wake)
        elif self._current is not None:
            self._do(self._current)
            with self._condition:
                self._current = None
        return True

    def _has_work(self) -> bool:
        return self._should_close or self._should_wake != self._is_awake or (self._is_awake and bool(self._jobs))

    def _switch(self, *, awake: bool) -> None:
        if not awake:
            self._end_all("The model went to sleep before the picture was made.")
            self._synchronize()
        self._switched(awake=awake)

    def _end_all(self, why: str) -> None:
        with self._condition:
            jobs, self._jobs = list(self._jobs), deque()
        for job in jobs:
            job.done.set_exception(Failure(why))

    def _do(self, job: ImageJob) -> None:
        failure: Failure | None = None
        try:
            for seed in job.asked.seeds:
                job.made.append(job.asked.file_of(self._picture(job, seed)))
        except PipelineStopped:
            failure = WorkCancelled("The request was cancelled, or the model had to go to sleep.")
        except Exception as error:
            log.exception("a picture could not be made")
            failed = told(error)
            if is_fatal(error):
                self._on_fatal(error, lambda: job.done.set_exception(failed))
                raise
            # A new exception: the caught one keeps the tensors of the failed picture alive.
            failure = OutOfMemory(str(failed)) if isinstance(failed, OutOfMemory) else failed
        finally:
            # Some pipelines convert a component for a while, and leave it outside the arena.
            self._weights.rebind()
        if isinstance(failure, OutOfMemory):
            gc.collect()
            torch.cuda.empty_cache()
        if failure is None:
            job.done.set_result(job.made)
        else:
            job.done.set_exception(failure)

    def _picture(self, job: ImageJob, seed: int) -> Any:
        self._check(job)
        pipeline, done = self.pipelines[job.asked.kind], len(job.made)
        arguments = dict(job.asked.arguments)
        # On the CPU, so that a seed means the same picture on every device.
        arguments["generator"] = torch.Generator("cpu").manual_seed(seed)

        def on_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            # After the first step every weight has been used but those of the decoder.
            self._weights.wait_for_weights()
            if job.first_step_s is None:
                self._synchronize()
                job.first_step_s = time.monotonic() - job.asked_at
            job.progress = (done + (step + 1) / max(1, getattr(pipe, "num_timesteps", 1))) / len(job.asked.seeds)
            self._check(job)
            return tensors

        if "callback_on_step_end" in inspect.signature(pipeline.__call__).parameters:
            arguments["callback_on_step_end"] = on_step
        pictures = pipeline(**arguments).images
        self._weights.wait_for_weights()
        return pictures[0]

    def _check(self, job: ImageJob) -> None:
        if job.cancelled or not self._should_wake:
            raise PipelineStopped
