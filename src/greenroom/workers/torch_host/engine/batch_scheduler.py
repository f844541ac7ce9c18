"""Continuous batching: the waiting, prefilling and decoding sequences of one model.

Owns the order within a step: drop cancelled sequences, admit waiting ones, compute a chunk of prompts, decode one token
for every running sequence. The next step starts before the tokens of the last one are read, which keeps the device
busy: a sequence that ends has computed one token too many, which is discarded. A step that fails, mostly for lack of
memory, is repeated in smaller parts; only a sequence that fails alone is ended. Errors that lose the device are raised.
Used by the model's thread only. Read `step` first.
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
from .sampling import BatchSampler, PendingTokens, open_masks
from .sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """How many prompt tokens are computed in one step."""

    tokens_max: int = 2048
    """Enough to fill the device, few enough that decoding sequences hardly wait."""
    step_s: float = 2.0
    """A cancelled request and an order to sleep wait for the end of a step. On a CPU a full step may take minutes, so
    its size is chosen to take about this long."""
    tokens_first: int = 256
    """The size of the first step on a CPU."""
    tokens_min: int = 32


PREFILL = PrefillLimits()


@dataclass(slots=True)
class DecodeBatch:
    """The decoding sequences, row by row, as the device sees them."""

    sequences: list[Sequence]
    sampler: BatchSampler
    positions: list[int]
    """The position of the next step's token, for each row."""
    logprobs: list[int | None]


class BatchScheduler:
    def __init__(
        self,
        runner: ModelRunner,
        block_manager: BlockManager,
        batch_max: int,
        on_end: Callable[[], None],
        on_fatal: OnFatal,
        prefill: PrefillLimits = PREFILL,
    ) -> None:
        """`on_end` is called once for each sequence that ends, `on_fatal` for errors the process cannot survive."""
        self._on_fatal = on_fatal
        self._prefill_limits = prefill
        self._runner = runner
        self._on_end = on_end
        self._block_manager = block_manager
        self._batch_max = batch_max
        # Sequences computed together: fewer after a batch did not fit into device memory.
        self._batch_limit = batch_max
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._running: list[Sequence] = []
        self._batch: DecodeBatch | None = None
        # The step whose tokens have not been read yet.
        self._pending: PendingTokens | None = None
        self._last_step = 0.0
        self._is_slow = runner.model.device.type == "cpu"
        self._prefill_tokens = prefill.tokens_first if self._is_slow else prefill.tokens_max
        # Prompt tokens that fit into device memory: halved after a failure, then slowly raised.
        self._prefill_fits = prefill.tokens_max

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._running)

    def add(self, request: GenerationRequest) -> None:
        self._waiting.append(Sequence(request, self._on_end))

    def step(self) -> None:
        """Compute one step for all sequences. Raises only errors the process cannot survive."""
        self.drop_cancelled()
        self._admit()
        if self._prefilling:
            self._prefill_or_split(self._prefilling, min(self._prefill_tokens, self._prefill_fits))
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
        """Run `work` and return its failure, if any. Raises errors the process cannot survive."""
        try:
            work()
            return None
        except Exception as error:
            failure = told(error)
            log.exception("step failed sequences=%d", len(concerned))
            if is_fatal(error):
                self._on_fatal(error, lambda: self._end_failed(concerned, failure))
                raise
            # A new exception: the caught one keeps the tensors of the failed step alive.
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
        """Remove ended sequences. Steps still in flight for them write before their blocks are used again."""
        for sequence in (*self._prefilling, *self._running):
            if sequence.is_ended:
                self._block_manager.free(sequence)
                self._batch_limit = min(self._batch_max, self._batch_limit + 1)
        self._waiting = deque(one for one in self._waiting if not one.is_ended)
        self._prefilling = [one for one in self._prefilling if not one.is_ended]
        self._running = [one for one in self._running if not one.is_ended]

    # --- admission and preemption -----------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._prefilling) + len(self._running) < self._batch_limit:
            # Each active sequence will soon need one more block.
            active = len(self._prefilling) + len(self._running)
            if not self._block_manager.allocate(self._waiting[0], spare=active):
                return
            self._prefilling.append(self._waiting.popleft())

    def _preempt_youngest(self) -> None:
        """Move the youngest sequence to the front of the queue. Its tokens are computed again when it is admitted."""
        self._preempt(max((*self._prefilling, *self._running), key=lambda sequence: sequence.created_at))

    def _preempt(self, sequence: Sequence) -> None:
        log.info("sequence preempted ask=%s tokens=%d", sequence.request.id, len(sequence.tokens))
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Free its blocks and put it at the front of the queue."""
        self._block_manager.free(sequence)
        self._prefilling = [one for one in self._prefilling if one is not sequence]
        self._running = [one for one in self._running if one is not sequence]
        self._waiting.appendleft(sequence)

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _prefill_or_split(self, sequences: list[Sequence], most: int) -> None:
        """Compute the next chunks of these prompts, at most `most` tokens. Repeats in halves what fails."""
        failure = self._try(lambda: self._prefill(sequences, most), sequences)
        if failure is None:
            return
        is_memory = isinstance(failure, OutOfMemory)
        if is_memory:
            self._prefill_fits = max(self._prefill_limits.tokens_min, most // 2)
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
        # From here on nothing can fail on the device, so nothing is counted twice.
        for sequence, chunk in zip(sequences, chunks, strict=True):
            sequence.computed += len(chunk.tokens)
        sampled = [] if chosen is None else chosen.tokens([one.request.sampling.logprobs for one in finished])
        spent = (time.monotonic() - began) / (most - left)
        limits = self._prefill_limits
        if self._is_slow:
            self._prefill_tokens = max(limits.tokens_min, min(limits.tokens_max, int(limits.step_s / spent)))
        self._prefill_fits = min(limits.tokens_max, self._prefill_fits + self._prefill_fits // 16)
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
        """Decode one token for each running sequence. On failure the younger half waits; one that fails alone ends."""
        failure = self._try_decode()
        if failure is not None and len(self._running) == 1:
            # Memory was freed: try once more before ending it.
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
            # Tokens sampled before the failure count. The rest is computed again from what the host has.
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
        """Assign running sequences to rows, from their tokens on the host. False if none is running."""
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
        """Requeue sequences that would pass one of `rope_switches`: they are computed again with other factors. True if
        there were any: then the batch has changed."""
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
        """Give every row a block for its next token. False if a sequence was preempted: then the batch has changed."""
        for row, sequence in enumerate(batch.sequences):
            # A token beyond the last one allowed is discarded; it is written to the scratch block.
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
        # If a sequence has just ended, its blocks are enough to try again.
        if len(self._running) == active:
            self._preempt_youngest()
        self._batch = None

    def _collect(self) -> None:
        """Read the tokens of the last step and hand them to their sequences."""
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
                sequence.add_token(token)
        self._drop_ended()

    def _masks(self, sequences: list[Sequence], logits: torch.Tensor) -> torch.Tensor:
        masks = open_masks(len(sequences), logits.shape[-1], logits.is_cuda)
        for sequence, mask in zip(sequences, masks, strict=True):
            if sequence.is_ended or sequence.request.constraint is None:
                continue
            try:
                sequence.request.constraint.fill(mask)
            except Exception as error:  # Foreign code: its failure ends this answer and no other.
                mask.fill_(-1)
                sequence.end("error", f"the output constraint failed: {translated(error)}")
        return masks.to(logits.device, non_blocking=True)
