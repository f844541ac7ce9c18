"""A model on stage as the API sees it: a thread of its own that performs whatever was submitted.

Owns the thread, the door between it and everybody else, and what happens at wake and sleep. Everything about sequences
is the ensemble's. An error of the device is told to `on_fatal` and ends the thread: nothing works any more in this
process. Who was being computed for is told, if it may have been their doing; the others hear nothing, and are asked for
again by the gateway when the process has ended. Read `Batching` first.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from ..failures import Failure, OnFatal, OutOfMemory, Stuck, is_fatal, told, translated
from ..weights.sentence_config import SentenceConfig
from .batch_scheduler import Ensemble
from .block_manager import Seats
from .embedding import Embedder, grouped
from .model_check import ModelCheck
from .model_shape import BLOCK_TOKENS, item_bytes, limits_of
from .requests import Ask, TooLong, UnknownToken, Vectors
from .runner import Runner, Stage

log = logging.getLogger(__name__)

# How often somebody who waits for a model that sleeps is looked after: has it been cancelled?
LOOK_S = 0.05
# How long wake and sleep wait for the thread: a step on a slow CPU may take long, a device never does. A thread that
# needs longer is stuck, and the process ends: to say only that it failed would leave memory mapped that counts as free.
OBEY_S = 120.0


@dataclass(slots=True, eq=False)
class Job:
    """Inputs to be embedded, a group at a time, so that those who decode go on in between."""

    inputs: Sequence[Sequence[int]]
    skipped: Sequence[int]
    done: Callable[[Vectors | Exception], None]
    groups: list[list[int]] = field(default_factory=list)
    found: dict[int, list[float]] = field(default_factory=dict)


class Batching:
    """Implements `asks.Performer`. Built asleep; `on_wake` and `on_sleep` follow the stage."""

    def __init__(
        self,
        stage: Stage,
        *,
        cache_tokens: int,
        batch_max: int,
        context: int,
        on_fatal: OnFatal,
        sentence: SentenceConfig | None = None,
        check: ModelCheck | None = None,
        name: str = "model",
    ) -> None:
        """Raises BadModel for a model that cannot be decoded from paged KV memory.

        With `sentence` it makes embeddings, and writes no text. The first wake runs `check`, and fails if that does.
        `on_fatal` ends the process soon.
        """
        self._stage = stage
        self._on_fatal = on_fatal
        self._runner: Runner | None = None
        self._ensemble: Ensemble | None = None
        self.limits = limits_of(stage.module)
        self.context = context if self.limits.positions is None else min(context, self.limits.positions)
        self._embedder = Embedder(stage, sentence) if sentence is not None else None
        self._seats = Seats(0, 0)
        if sentence is None:
            self._runner = Runner(stage, cache_tokens, batch_max, self.context)
            self.context = self._runner.context
            numbers = sum(shape.numbers for shape in self._runner.shapes)
            block_bytes = numbers * item_bytes(stage.dtype) * BLOCK_TOKENS
            self._seats = Seats(cache_tokens, block_bytes, self._runner.rope_switches)
            self._ensemble = Ensemble(self._runner, self._seats, batch_max, self._count_down, on_fatal)
        self._door = threading.Condition()
        self._inbox: deque[Ask] = deque()
        self._jobs: deque[Job] = deque()
        self._in_flight = 0
        self._should_wake = self._is_awake = self._should_close = False
        self._check = check
        self._refused: Exception | None = None
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._perform, name=f"perform-{name}", daemon=True)
        self._thread.start()

    # --- what the API sees ------------------------------------------------------------------------------------------

    def submit(self, *asks: Ask) -> None:
        if self._runner is None:
            raise TooLong("This model only makes embeddings; it cannot continue a text.")
        for ask in asks:
            self._check_fits(ask)
        with self._door:
            self._check_open()
            self._inbox.extend(asks)
            self._in_flight += len(asks)
            self._door.notify_all()

    def _check_fits(self, ask: Ask) -> None:
        wanted = len(ask.tokens) + ask.max_tokens
        if not ask.tokens or wanted > self.context:
            raise TooLong(
                f"{len(ask.tokens):,} tokens of prompt and {ask.max_tokens:,} of answer were asked for; together at "
                f"least one and at most {self.context:,} fit. Shorten them, or raise ctx_size or cache_tokens."
            )
        self._check_known(ask.tokens, self.limits.tokens)
        self._check_known(ask.sampling.logit_bias, self.limits.choices)

    def _check_known(self, tokens: Collection[int], count: int) -> None:
        """The last look before the device, for which an index beyond a table is the end of the process."""
        if not 0 <= min(tokens, default=0) <= max(tokens, default=0) < count:
            raise UnknownToken(
                f"Tokens {min(tokens)} to {max(tokens)} were asked for; the model's weights have 0 to {count - 1}."
            )

    def embed(
        self,
        inputs: Sequence[Sequence[int]],
        done: Callable[[Vectors | Exception], None],
        skipped: Sequence[int] | None = None,
    ) -> None:
        if self._embedder is None:
            done(TooLong("This model writes text; it makes no embeddings."))
            return
        longest = max((len(one) for one in inputs), default=0)
        if not inputs or longest > self.context or not all(inputs):
            done(TooLong(f"An input has {longest:,} tokens; each must have at least one and at most {self.context:,}."))
            return
        try:
            self._check_known([token for one in inputs for token in (min(one), max(one))], self.limits.tokens)
        except UnknownToken as error:
            done(error)
            return
        with self._door:
            self._check_open()
            skips = [0] * len(inputs) if skipped is None else skipped
            self._jobs.append(Job(inputs, skips, done, grouped(inputs, self._embedder.pads)))
            self._in_flight += 1
            self._door.notify_all()

    def flush(self, tenant: str | None, tag: str | None) -> tuple[int, int]:
        return self._seats.flush(tenant, tag)

    @property
    def in_flight(self) -> int:
        with self._door:
            return self._in_flight

    # --- what the host of the model calls ---------------------------------------------------------------------------

    def on_wake(self) -> None:
        """Weights are on their way and KV memory is there: perform. Returns when the thread has begun.

        Raises BadModel if the first wake's check does, and OutOfMemory; then nothing touches the device any more.
        """
        self._order(awake=True)

    def on_sleep(self) -> None:
        """Stop computing. Returns when nothing touches the device any more; whoever was unfinished is ended."""
        self._order(awake=False)

    def close(self) -> None:
        """Stop for good. Whoever still waits is ended."""
        self._order(awake=False)
        with self._door:
            self._should_close = True
            self._door.notify_all()
        self._thread.join(OBEY_S)

    def _order(self, *, awake: bool) -> None:
        with self._door:
            self._should_wake = awake
            self._door.notify_all()
            obeyed = self._door.wait_for(
                lambda: self._is_awake == awake or self._ended is not None or self._refused is not None, OBEY_S
            )
            refused, self._refused = self._refused, None
        if not obeyed:
            raise Stuck(f"the model's thread did not {'begin' if awake else 'stop'} within {OBEY_S:.0f} s")
        if refused is not None:
            raise translated(refused) from refused
        if awake and self._ended is not None:
            raise Failure(f"the model's thread has ended: {translated(self._ended)}") from self._ended

    def _check_open(self) -> None:
        if self._should_close:
            raise Failure("This model is not being served any more.")

    # --- the thread -------------------------------------------------------------------------------------------------

    def _perform(self) -> None:
        torch.set_grad_enabled(False)
        error: BaseException | None = None
        try:
            with self._on_own_stream():
                while self._turn():
                    pass
        except BaseException as caught:
            log.exception("the model's thread ends")
            error = caught
        finally:
            self._end(error)

    def _on_own_stream(self) -> AbstractContextManager[object]:
        if self._stage.device.type != "cuda":
            return nullcontext()
        index = self._stage.device.index
        torch.cuda.set_device(0 if index is None else index)
        stream: AbstractContextManager[object] = torch.cuda.stream(torch.cuda.Stream())
        return stream

    def _turn(self) -> bool:
        """One round of the loop. False when it is over."""
        with self._door:
            if not self._has_work():
                self._door.wait(LOOK_S if self._inbox else None)
            if self._should_close:
                return False
            changes = self._should_wake != self._is_awake
            if not self._is_awake:
                self._drop_cancelled_at_the_door()
        if changes:
            self._change(awake=self._should_wake)
        if self._is_awake:
            self._take_in()
            self._work()
        return True

    def _has_work(self) -> bool:
        if self._should_close or self._should_wake != self._is_awake:
            return True
        busy = self._ensemble is not None and self._ensemble.is_busy
        return self._is_awake and bool(self._inbox or self._jobs or busy)

    def _take_in(self) -> None:
        with self._door:
            asks, self._inbox = list(self._inbox), deque()
        for ask in asks:
            if self._ensemble is not None:
                self._ensemble.add(ask)

    def _work(self) -> None:
        if self._ensemble is not None and self._ensemble.is_busy:
            self._ensemble.step()
        if self._jobs and self._embedder is not None:
            self._embed_some(self._embedder, self._jobs[0])

    def _embed_some(self, embedder: Embedder, job: Job) -> None:
        """The next group of this job; the job is done with its last, or with its first failure."""
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

    def _finish(self, job: Job, result: Vectors | Exception) -> None:
        with self._door:
            self._jobs.remove(job)
        self._count_down()
        try:
            job.done(result)
        except Exception:
            log.exception("nobody took the embeddings")

    def _change(self, *, awake: bool) -> None:
        if self._runner is not None and awake:
            self._seats.clear()
            self._runner.on_wake()
            if not self._is_right(self._runner):
                return
        if not awake:
            self._dismiss("The model went to sleep before the answer was complete.")
            if self._runner is not None:
                self._runner.on_sleep()
            if self._stage.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        with self._door:
            self._is_awake = awake
            self._door.notify_all()

    def _is_right(self, runner: Runner) -> bool:
        """Run the check if it is due. A model that fails it sleeps on, and whoever woke it is told why."""
        if self._check is None:
            return True
        try:
            self._check.run(runner)
        except Exception as error:
            if is_fatal(error):
                raise
            runner.on_sleep()
            if self._stage.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            with self._door:
                self._refused, self._should_wake = error, False
                self._door.notify_all()
            return False
        self._check = None
        return True

    def _dismiss(self, why: str) -> None:
        """Everybody is told that nothing more comes."""
        self._take_in()
        if self._ensemble is not None:
            self._ensemble.end_all("error", why)
        while self._jobs:
            self._finish(self._jobs[0], Failure(why))

    def _count_down(self) -> None:
        with self._door:
            self._in_flight -= 1

    def _drop_cancelled_at_the_door(self) -> None:
        """Asks that were called off while the model sleeps."""
        if self._ensemble is None or not any(ask.cancelled for ask in self._inbox):
            return
        for ask in self._inbox:
            if ask.cancelled:
                self._ensemble.add(ask)
        self._inbox = deque(ask for ask in self._inbox if not ask.cancelled)
        self._ensemble.drop_cancelled()

    def _end(self, error: BaseException | None) -> None:
        with self._door:
            self._ended = error if error is not None else Failure("closed")
            self._is_awake = False
        try:
            if error is None:
                self._dismiss("The model is not served any more.")
        finally:
            # Whatever is broken: who waits for this thread hears that it has ended, and so does the process.
            with self._door:
                self._door.notify_all()
            if error is not None:
                self._on_fatal(error, lambda: self._dismiss("The model's process has failed."))
