"""The thread of one model of Transformers: it computes whatever was submitted.

Owns the queues between the thread and others, and what it does at wake and sleep. The batch scheduler owns everything
about sequences. An error that loses the device ends the thread: nothing works in this process any more. Requests in the
failed step are told, since one of them may be the cause; the others are not answered, and the gateway sends them again
after the process has ended. Read `EngineLoop` first.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..failures import Failure, OnFatal, OutOfMemory, is_fatal, told
from ..weights.sentence_config import SentenceConfig
from .batch_scheduler import PREFILL, BatchScheduler, PrefillLimits
from .block_manager import BlockManager
from .embedding import Embedder, group_by_length
from .model_check import ModelCheck
from .model_shape import BLOCK_TOKENS, token_limits
from .model_thread import SWITCH_TIMEOUT_S, ModelThread
from .requests import GenerationRequest, PromptTooLong, UnknownToken, Vectors
from .runner import DeviceModel, ModelRunner

log = logging.getLogger(__name__)

# How often requests that wait for a sleeping model are checked for cancellation.
POLL_S = 0.05


@dataclass(slots=True, eq=False)
class EmbeddingJob:
    """Inputs to be embedded, one group at a time."""

    inputs: Sequence[Sequence[int]]
    skipped: Sequence[int]
    groups: list[list[int]]
    done: Future[Vectors] = field(default_factory=Future)
    found: dict[int, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Tokens that fit into the KV memory, sequences in one step, tokens of one sequence, and limits of a prefill."""

    cache_tokens: int
    batch_max: int
    context: int
    prefill: PrefillLimits = PREFILL


class EngineLoop(ModelThread):
    """Implements `requests.InferenceEngine`. Built asleep; `on_wake` and `on_sleep` follow the device weights."""

    def __init__(
        self,
        model: DeviceModel,
        sizes: EngineSizes,
        *,
        on_fatal: OnFatal,
        sentence: SentenceConfig | None = None,
        check: ModelCheck | None = None,
        name: str = "model",
        switch_timeout_s: float = SWITCH_TIMEOUT_S,
    ) -> None:
        """Raises BadModel for a model that cannot be decoded from paged KV memory. With `sentence` it makes embeddings
        and generates no text. The first wake runs `check`, and fails if that fails. `on_fatal` ends the process
        soon."""
        super().__init__((model.device,), on_fatal, name, switch_timeout_s)
        self._model = model
        self._runner: ModelRunner | None = None
        self._scheduler: BatchScheduler | None = None
        self.limits = token_limits(model.module)
        positions = self.limits.positions
        self.context = sizes.context if positions is None else min(sizes.context, positions)
        self._embedder = Embedder(model, sentence) if sentence is not None else None
        self._block_manager = BlockManager(0, 0)
        if sentence is None:
            self._runner = ModelRunner(model, sizes.cache_tokens, sizes.batch_max, self.context)
            self.context = self._runner.context
            numbers = sum(shape.numbers for shape in self._runner.shapes)
            block_bytes = numbers * model.dtype.itemsize * BLOCK_TOKENS
            self._block_manager = BlockManager(sizes.cache_tokens, block_bytes, self._runner.rope_switches)
            self._scheduler = BatchScheduler(
                self._runner, self._block_manager, sizes.batch_max, self._on_sequence_end, on_fatal, sizes.prefill
            )
        self._inbox: deque[GenerationRequest] = deque()
        self._jobs: deque[EmbeddingJob] = deque()
        self._in_flight = 0
        self._check = check
        self._start()

    # --- what the API sees ------------------------------------------------------------------------------------------

    def submit(self, *requests: GenerationRequest) -> None:
        if self._runner is None:
            raise PromptTooLong("This model only makes embeddings; it cannot continue a text.")
        for request in requests:
            self._check_fits(request)
        with self._condition:
            self._check_open()
            self._inbox.extend(requests)
            self._in_flight += len(requests)
            self._condition.notify_all()

    def _check_fits(self, request: GenerationRequest) -> None:
        wanted = len(request.tokens) + request.max_tokens
        if not request.tokens or wanted > self.context:
            raise PromptTooLong(
                f"{len(request.tokens):,} tokens of prompt and {request.max_tokens:,} of answer were asked for; "
                f"together at least one and at most {self.context:,} fit. Shorten them, or raise ctx_size or "
                "cache_tokens."
            )
        self._check_known(request.tokens, self.limits.tokens)
        self._check_known(request.sampling.logit_bias, self.limits.choices)

    def _check_known(self, tokens: Collection[int], count: int) -> None:
        """The last check before the device: there, an index beyond a table would end the process."""
        if not 0 <= min(tokens, default=0) <= max(tokens, default=0) < count:
            raise UnknownToken(
                f"Tokens {min(tokens)} to {max(tokens)} were asked for; the model's weights have 0 to {count - 1}."
            )

    def embed(self, inputs: Sequence[Sequence[int]], skipped: Sequence[int]) -> Future[Vectors]:
        if self._embedder is None:
            raise PromptTooLong("This model writes text; it makes no embeddings.")
        longest = max((len(one) for one in inputs), default=0)
        if not inputs or longest > self.context or not all(inputs):
            raise PromptTooLong(
                f"An input has {longest:,} tokens; each must have at least one and at most {self.context:,}."
            )
        self._check_known([token for one in inputs for token in (min(one), max(one))], self.limits.tokens)
        job = EmbeddingJob(inputs, skipped, group_by_length(inputs, self._embedder.pads))
        with self._condition:
            self._check_open()
            self._jobs.append(job)
            self._in_flight += 1
            self._condition.notify_all()
        return job.done

    def flush(self, tenant: str | None, tag: str | None) -> tuple[int, int]:
        return self._block_manager.flush(tenant, tag)

    @property
    def in_flight(self) -> int:
        with self._condition:
            return self._in_flight

    @property
    def kv_used(self) -> float | None:
        return None if self._runner is None else self._block_manager.used

    @property
    def kv_bytes(self) -> int | None:
        return None if self._runner is None else self._block_manager.size_bytes

    # --- the thread -------------------------------------------------------------------------------------------------

    def _iterate(self) -> bool:
        """One round of the loop. False when the loop is to end."""
        with self._condition:
            if not self._has_work():
                self._condition.wait(POLL_S if self._inbox else None)
            if self._should_close:
                return False
            changes = self._should_wake != self._is_awake
            if not self._is_awake:
                self._drop_cancelled_while_asleep()
        if changes:
            self._switch(awake=self._should_wake)
        if self._is_awake:
            self._admit_inbox()
            self._step()
        return True

    def _has_work(self) -> bool:
        if self._should_close or self._should_wake != self._is_awake:
            return True
        busy = self._scheduler is not None and self._scheduler.is_busy
        return self._is_awake and bool(self._inbox or self._jobs or busy)

    def _admit_inbox(self) -> None:
        with self._condition:
            requests, self._inbox = list(self._inbox), deque()
        for request in requests:
            if self._scheduler is not None:
                self._scheduler.add(request)

    def _step(self) -> None:
        if self._scheduler is not None and self._scheduler.is_busy:
            self._scheduler.step()
        if self._jobs and self._embedder is not None:
            self._embed_group(self._embedder, self._jobs[0])

    def _embed_group(self, embedder: Embedder, job: EmbeddingJob) -> None:
        """Compute the next group of this job. The job is done after its last group or its first failure."""
        result: Vectors | Exception | None = None
        group = job.groups.pop(0)
        try:
            vectors = embedder.vectors(
                [job.inputs[number] for number in group], [job.skipped[number] for number in group]
            )
            job.found.update(zip(group, vectors, strict=True))
            if not job.groups:
                result = [job.found[number] for number in range(len(job.inputs))]
        except Exception as error:
            log.exception("embedding failed inputs=%d", len(group))
            result = told(error)
            if isinstance(result, OutOfMemory) and len(group) > 1:
                half = len(group) // 2
                job.groups[:0] = [group[:half], group[half:]]
                result = None
            if result is not None and is_fatal(error):
                failed = result
                self._on_fatal(error, lambda: self._finish(job, failed))
                raise
        if result is not None:
            self._finish(job, result)

    def _finish(self, job: EmbeddingJob, result: Vectors | Exception) -> None:
        with self._condition:
            self._jobs.remove(job)
        self._on_sequence_end()
        # False if the caller left.
        if not job.done.set_running_or_notify_cancel():
            return
        if isinstance(result, Exception):
            job.done.set_exception(result)
        else:
            job.done.set_result(result)

    def _switch(self, *, awake: bool) -> None:
        if self._runner is not None and awake:
            self._block_manager.clear()
            self._runner.on_wake()
            if not self._passes_check(self._runner):
                return
        if not awake:
            self._end_all("The model went to sleep before the answer was complete.")
            if self._runner is not None:
                self._runner.on_sleep()
            self._synchronize()
        self._switched(awake=awake)

    def _passes_check(self, runner: ModelRunner) -> bool:
        """Run the check if it is due. On failure the model stays asleep and `on_wake` raises the reason."""
        if self._check is None:
            return True
        try:
            self._check.run(runner)
        except Exception as error:
            if is_fatal(error):
                raise
            runner.on_sleep()
            self._synchronize()
            with self._condition:
                self._refused, self._should_wake = error, False
                self._condition.notify_all()
            return False
        self._check = None
        return True

    def _end_all(self, why: str) -> None:
        """End all requests and jobs with an error."""
        self._admit_inbox()
        if self._scheduler is not None:
            self._scheduler.end_all("error", why)
        while self._jobs:
            self._finish(self._jobs[0], Failure(why))

    def _on_sequence_end(self) -> None:
        with self._condition:
            self._in_flight -= 1

    def _drop_cancelled_while_asleep(self) -> None:
        """End requests that were cancelled while the model is asleep."""
        if self._scheduler is None or not any(request.cancelled for request in self._inbox):
            return
        for request in self._inbox:
            if request.cancelled:
                self._scheduler.add(request)
        self._inbox = deque(request for request in self._inbox if not request.cancelled)
        self._scheduler.drop_cancelled()
