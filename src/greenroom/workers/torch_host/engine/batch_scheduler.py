"""All sequences of one model together: who waits, whose prompt is being computed, who decodes in the batch.

Owns the order of things within a step: the cancelled leave, the waiting sit down, a piece of prompts is computed, every
running sequence gets one token. The device is kept busy: the next step is started before the tokens of the last one are
looked at, so a sequence that ends has one token too many computed, which nobody hears. A step that fails, for lack of
memory above all, is computed again in smaller parts: only a sequence that fails alone is ended. An error of the device
is raised. Used by the model's thread only. Read `step` first.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..failures import Failure, OnFatal, OutOfMemory, is_fatal, told, translated
from .block_manager import BlockManager
from .model_shape import BLOCK_TOKENS
from .requests import EndReason, GenerationRequest
from .runner import DecodeRow, ModelRunner, PrefillChunk
from .sampling import BatchSampler, PendingTokens, filled_masks
from .sequence import Sequence

log = logging.getLogger(__name__)

# Tokens of prompts computed in one step: enough to fill the device, few enough that those who decode hardly wait.
PREFILL_TOKENS_MAX = 2048
# Whoever leaves, and an order to sleep, waits for the end of a step. On a CPU, where all of these may take minutes, it
# has as many as take about this long. Nothing is known of the first.
PREFILL_STEP_S = 2.0
PREFILL_TOKENS_FIRST = 256
PREFILL_TOKENS_MIN = 32


@dataclass(slots=True)
class DecodeBatch:
    """Those who decode, row by row, as the device sees them."""

    sequences: list[Sequence]
    sampler: BatchSampler
    positions: list[int]
    """Where the token of the next step stands, in each row."""
    logprobs: list[int | None]


class BatchScheduler:
    def __init__(
        self,
        runner: ModelRunner,
        block_manager: BlockManager,
        batch_max: int,
        on_end: Callable[[], None],
        on_fatal: OnFatal,
    ) -> None:
        """`on_end` is called once for each sequence that ends, `on_fatal` with what the process cannot survive."""
        self._on_fatal = on_fatal
        self._runner = runner
        self._on_end = on_end
        self._block_manager = block_manager
        self._batch_max = batch_max
        # Sequences computed together: fewer after a batch did not fit the device's memory.
        self._batch_limit = batch_max
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._running: list[Sequence] = []
        self._batch: DecodeBatch | None = None
        # The step whose tokens nobody has looked at yet.
        self._pending: PendingTokens | None = None
        self._last_step = 0.0
        self._is_slow = runner.model.device.type == "cpu"
        self._prefill_tokens = PREFILL_TOKENS_FIRST if self._is_slow else PREFILL_TOKENS_MAX
        # What the device's memory holds: less after it did not, and then slowly more again.
        self._prefill_fits = PREFILL_TOKENS_MAX
        self.computed_tokens = 0
        self.preempted = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._running)

    def add(self, request: GenerationRequest) -> None:
        self._waiting.append(Sequence(request, self._on_end))

    def step(self) -> None:
        """One step further for everybody. Raises only what the whole process cannot survive."""
        self.drop_cancelled()
        self._admit()
        if self._prefilling:
            self._prefill_or_split(self._prefilling, min(self._prefill_tokens, self._prefill_fits, PREFILL_TOKENS_MAX))
        if self._running:
            self._decode_or_split()

    def drop_cancelled(self) -> None:
        for sequence in self._all():
            if sequence.request.cancelled:
                sequence.end("cancelled")
        self._drop_ended()

    def end_all(self, reason: EndReason, error: str | None = None) -> None:
        for sequence in self._all():
            sequence.end(reason, error)
        self._drop_ended()
        self._batch = self._pending = None

    def _all(self) -> list[Sequence]:
        return [*self._waiting, *self._prefilling, *self._running]

    def _try(self, work: Callable[[], None], concerned: list[Sequence]) -> Failure | None:
        """Do this, and say what went wrong. Raises what the process cannot survive."""
        try:
            work()
            return None
        except Exception as error:
            failure = told(error)
            log.exception("step failed sequences=%d", len(concerned))
            if is_fatal(error):
                self._on_fatal(error, lambda: self._end_failed(concerned, failure))
                raise
            # Said anew: the error itself keeps all that was being computed with.
            failure = (OutOfMemory if isinstance(failure, OutOfMemory) else Failure)(str(failure))
        if isinstance(failure, OutOfMemory):
            self._free_memory()
        return failure

    def _free_memory(self) -> None:
        gc.collect()
        if self._runner.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _end_failed(self, concerned: Iterable[Sequence], failure: Failure) -> None:
        for sequence in concerned:
            sequence.end("error", str(failure), is_memory=isinstance(failure, OutOfMemory))
        if any(sequence in self._running for sequence in concerned):
            self._batch = self._pending = None
        self._drop_ended()

    def _drop_ended(self) -> None:
        """Those that have ended leave. What is still being computed for them is written before anybody sits there."""
        for sequence in (*self._prefilling, *self._running):
            if sequence.is_ended:
                self._block_manager.free(sequence)
                self._batch_limit = min(self._batch_max, self._batch_limit + 1)
        self._waiting = deque(one for one in self._waiting if not one.is_ended)
        self._prefilling = [one for one in self._prefilling if not one.is_ended]
        self._running = [one for one in self._running if not one.is_ended]

    # --- sitting down -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._prefilling) + len(self._running) < self._batch_limit:
            # Those already seated will each want one block more before long.
            active = len(self._prefilling) + len(self._running)
            if not self._block_manager.allocate(self._waiting[0], spare=active):
                return
            self._prefilling.append(self._waiting.popleft())

    def _preempt_youngest(self) -> None:
        """The youngest stands up and waits again, first in line; its tokens are computed anew when it sits down."""
        self._preempt(max((*self._prefilling, *self._running), key=lambda sequence: sequence.created_at))

    def _preempt(self, sequence: Sequence) -> None:
        log.info("sequence preempted ask=%s tokens=%d", sequence.request.id, len(sequence.tokens))
        self._requeue(sequence)
        self.preempted += 1

    def _requeue(self, sequence: Sequence) -> None:
        """Give up its blocks and wait again, first in line."""
        self._block_manager.free(sequence)
        self._prefilling = [one for one in self._prefilling if one is not sequence]
        self._running = [one for one in self._running if one is not sequence]
        self._waiting.appendleft(sequence)

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _prefill_or_split(self, sequences: list[Sequence], most: int) -> None:
        """The next pieces of these, of so many tokens at most; in halves where that fails."""
        failure = self._try(lambda: self._prefill(sequences, most), sequences)
        if failure is None:
            return
        is_memory = isinstance(failure, OutOfMemory)
        if is_memory:
            self._prefill_fits = max(PREFILL_TOKENS_MIN, most // 2)
        half = len(sequences) // 2
        if half:
            self._prefill_or_split(sequences[:half], most)
            self._prefill_or_split(sequences[half:], most)
        elif is_memory and most > 1:
            tokens = min(most, len(sequences[0].tokens) - sequences[0].computed)
            self._prefill_or_split(sequences, max(1, tokens // 2))
        else:
            self._end_failed(sequences, failure)

    def _prefill(self, prefilling: list[Sequence], most: int) -> None:
        began = time.monotonic()
        chunks, sequences, left = [], [], most
        for sequence in prefilling:
            count = min(left, len(sequence.tokens) - sequence.computed)
            if count <= 0:
                break
            tokens = sequence.tokens[sequence.computed : sequence.computed + count]
            is_last = sequence.computed + count == len(sequence.tokens)
            chunks.append(PrefillChunk(tokens, sequence.computed, sequence.blocks, is_last, len(sequence.tokens)))
            sequences.append(sequence)
            left -= count
        logits = self._runner.prefill(chunks)
        finished = [sequence for sequence, chunk in zip(sequences, chunks, strict=True) if chunk.is_last]
        chosen = self._sample_first(finished, logits) if finished else None
        # From here on nothing is asked of the device that could fail, so that nothing counts twice.
        for sequence, chunk in zip(sequences, chunks, strict=True):
            sequence.computed += len(chunk.tokens)
            self.computed_tokens += len(chunk.tokens)
        sampled = [] if chosen is None else chosen.tokens([one.request.sampling.logprobs for one in finished])
        spent = (time.monotonic() - began) / (most - left)
        if self._is_slow:
            self._prefill_tokens = max(PREFILL_TOKENS_MIN, min(PREFILL_TOKENS_MAX, int(PREFILL_STEP_S / spent)))
        self._prefill_fits = min(PREFILL_TOKENS_MAX, self._prefill_fits + self._prefill_fits // 16)
        for sequence, chunk in zip(sequences, chunks, strict=True):
            sequence.compute_s += spent * len(chunk.tokens)
        for sequence, token in zip(finished, sampled, strict=True):
            self._block_manager.cache(sequence)
            sequence.add_token(token)
        self._running.extend(finished)
        self._prefilling = [one for one in self._prefilling if one not in finished]
        self._drop_ended()

    def _sample_first(self, sequences: list[Sequence], logits: torch.Tensor) -> PendingTokens:
        device = logits.device
        sampler = BatchSampler([sequence.sampler for sequence in sequences], device)
        positions = torch.tensor([len(sequence.tokens) for sequence in sequences], device=device)
        chosen = sampler.choose(logits, positions, self._masks(sequences, logits) if sampler.needs_host else None)
        fetched = PendingTokens(chosen)
        sampler.record(chosen.tokens)
        return fetched

    # --- decoding ---------------------------------------------------------------------------------------------------

    def _decode_or_split(self) -> None:
        """A token for each that runs. Where that fails the younger half waits; one that fails alone is ended."""
        failure = self._try_decode()
        if failure is not None and len(self._running) == 1:
            # Memory was freed since: once more before it is given up.
            failure = self._try_decode()
        by_age = sorted(self._running, key=lambda sequence: sequence.created_at)
        if failure is None or not by_age:
            return
        if len(by_age) == 1:
            self._end_failed(by_age, failure)
            self._batch_limit = self._batch_max
        else:
            self._batch_limit = max(1, len(by_age) // 2)
            for sequence in reversed(by_age[self._batch_limit :]):
                self._preempt(sequence)

    def _try_decode(self) -> Failure | None:
        failure = self._try(self._decode, list(self._running))
        if failure is not None:
            # What was chosen before counts. All else is computed again, from what the host knows.
            self._collect()
            self._batch = None
        return failure

    def _decode(self) -> None:
        if self._batch is None or self._batch.sequences != self._running:
            self._collect()
            if not self._build_batch():
                return
        batch = self._batch
        if batch is None or self._requeue_outgrown(batch) or not self._grow(batch):
            return
        logits = self._runner.decode(len(batch.sequences), max(batch.positions) + 1)
        batch.positions = [position + 1 for position in batch.positions]
        self._collect()
        if all(sequence.is_ended for sequence in batch.sequences):
            return
        positions = self._runner.inputs.views(len(batch.sequences), 1)[1]
        masks = self._masks(batch.sequences, logits) if batch.sampler.needs_host else None
        chosen = batch.sampler.choose(logits, positions, masks)
        self._runner.inputs.set_tokens(chosen.tokens)
        self._pending = PendingTokens(chosen)
        batch.sampler.record(chosen.tokens)

    def _build_batch(self) -> bool:
        """Put those who run into rows, as far as the host knows them. False if nobody runs any more."""
        self._batch = None
        if not self._running:
            return False
        running = list(self._running)
        rows = [DecodeRow(one.tokens[-1], one.computed, one.blocks) for one in running]
        self._runner.inputs.set_rows(rows)
        self._batch = DecodeBatch(
            running,
            BatchSampler([one.sampler for one in running], self._runner.model.device),
            [row.position for row in rows],
            [one.request.sampling.logprobs for one in running],
        )
        self._last_step = time.monotonic()
        return True

    def _requeue_outgrown(self, batch: DecodeBatch) -> bool:
        """Sequences that would pass one of `rope_switches` wait to be computed again with other factors.

        True if there were any: then the batch has changed.
        """
        switches = self._runner.rope_switches
        if not any(length in batch.positions for length in switches):
            return False
        outgrown = [one for one, at in zip(batch.sequences, batch.positions, strict=True) if at in switches]
        self._collect()
        for sequence in reversed(outgrown):
            if not sequence.is_ended:
                log.info(
                    "sequence computed again for other rotary factors ask=%s tokens=%d",
                    sequence.request.id,
                    len(sequence.tokens),
                )
                self._requeue(sequence)
        self._batch = None
        return True

    def _grow(self, batch: DecodeBatch) -> bool:
        """Every row has a block for its next token. False if room had to be made: then the batch has changed."""
        for row, sequence in enumerate(batch.sequences):
            # A token beyond the last one allowed is never heard; it goes to the scratch block.
            tokens = min(batch.positions[row] + 1, sequence.prompt_tokens + sequence.request.max_tokens)
            have = len(sequence.blocks)
            if tokens <= have * BLOCK_TOKENS:
                continue
            added = self._block_manager.grow(sequence, tokens)
            if added is None:
                self._make_room()
                return False
            self._runner.inputs.grow(row, have, added)
        return True

    def _make_room(self) -> None:
        active = len(self._running)
        self._collect()
        # Somebody may have ended just now: that is room enough to try again.
        if len(self._running) == active:
            self._preempt_youngest()
        self._batch = None

    def _collect(self) -> None:
        """Look at the tokens of the last step, and tell those concerned."""
        batch, pending, self._pending = self._batch, self._pending, None
        if batch is None or pending is None:
            return
        tokens = pending.tokens(batch.logprobs)
        now = time.monotonic()
        spent, self._last_step = (now - self._last_step) / len(tokens), now
        for sequence, token in zip(batch.sequences, tokens, strict=True):
            if not sequence.is_ended:
                sequence.computed += 1
                sequence.compute_s += spent
                self.computed_tokens += 1
                sequence.add_token(token)
        self._drop_ended()

    def _masks(self, sequences: list[Sequence], logits: torch.Tensor) -> torch.Tensor:
        def fill(row: int, mask: torch.Tensor) -> None:
            sequence = sequences[row]
            if sequence.is_ended or sequence.request.constraint is None:
                return
            try:
                sequence.request.constraint.fill(mask)
            except Exception as error:  # Foreign code: its failure ends this answer and no other.
                mask.fill_(-1)
                sequence.end("error", f"the output constraint failed: {translated(error)}")

        masks = filled_masks([one.sampler for one in sequences], logits.shape[-1], fill, logits.is_cuda)
        return masks.to(logits.device, non_blocking=True)
