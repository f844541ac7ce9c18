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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..failures import Failure, OnFatal, OutOfMemory, is_fatal, told, translated
from .block_manager import Seats
from .model_shape import BLOCK_TOKENS
from .requests import Ask, EndReason
from .runner import Piece, Row, Runner
from .sampling import Choosers, Readback, filled_masks
from .sequence import Speech

log = logging.getLogger(__name__)

# Tokens of prompts computed in one step: enough to fill the device, few enough that those who decode hardly wait.
PREFILL_TOKENS_MAX = 2048
# Whoever leaves, and an order to sleep, waits for the end of a step. On a CPU, where all of these may take minutes, it
# has as many as take about this long. Nothing is known of the first.
PREFILL_STEP_S = 2.0
PREFILL_TOKENS_FIRST = 256
PREFILL_TOKENS_MIN = 32


@dataclass(slots=True)
class Batch:
    """Those who decode, row by row, as the device sees them."""

    speeches: list[Speech]
    choosers: Choosers
    positions: list[int]
    """Where the token of the next step stands, in each row."""
    logprobs: list[int | None]


class Ensemble:
    def __init__(
        self,
        runner: Runner,
        seats: Seats,
        batch_max: int,
        on_over: Callable[[], None],
        on_fatal: OnFatal,
    ) -> None:
        """`on_over` is called once for each sequence that ends, `on_fatal` with what the process cannot survive."""
        self._on_fatal = on_fatal
        self._runner = runner
        self._on_over = on_over
        self._seats = seats
        self._batch_max = batch_max
        # Sequences computed together: fewer after a batch did not fit the device's memory.
        self._places = batch_max
        self._waiting: deque[Speech] = deque()
        self._prefilling: list[Speech] = []
        self._running: list[Speech] = []
        self._batch: Batch | None = None
        # The step whose tokens nobody has looked at yet.
        self._pending: Readback | None = None
        self._last_step = 0.0
        self._is_slow = runner.stage.device.type == "cpu"
        self._prefill_tokens = PREFILL_TOKENS_FIRST if self._is_slow else PREFILL_TOKENS_MAX
        # What the device's memory holds: less after it did not, and then slowly more again.
        self._prefill_fits = PREFILL_TOKENS_MAX
        self.computed_tokens = 0
        self.preempted = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._running)

    def add(self, ask: Ask) -> None:
        self._waiting.append(Speech(ask, self._on_over))

    def step(self) -> None:
        """One step further for everybody. Raises only what the whole process cannot survive."""
        self.drop_cancelled()
        self._admit()
        if self._prefilling:
            self._prefill_or_part(self._prefilling, min(self._prefill_tokens, self._prefill_fits, PREFILL_TOKENS_MAX))
        if self._running:
            self._decode_or_part()

    def drop_cancelled(self) -> None:
        for speech in self._everybody():
            if speech.ask.cancelled:
                speech.end("cancelled")
        self._let_go()

    def end_all(self, reason: EndReason, error: str | None = None) -> None:
        for speech in self._everybody():
            speech.end(reason, error)
        self._let_go()
        self._batch = self._pending = None

    def _everybody(self) -> list[Speech]:
        return [*self._waiting, *self._prefilling, *self._running]

    def _attempt(self, work: Callable[[], None], concerned: Sequence[Speech]) -> Failure | None:
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
        if self._runner.stage.device.type == "cuda":
            torch.cuda.empty_cache()

    def _end_failed(self, concerned: Iterable[Speech], failure: Failure) -> None:
        for speech in concerned:
            speech.end("error", str(failure), is_memory=isinstance(failure, OutOfMemory))
        if any(speech in self._running for speech in concerned):
            self._batch = self._pending = None
        self._let_go()

    def _let_go(self) -> None:
        """Those that have ended leave. What is still being computed for them is written before anybody sits there."""
        for speech in (*self._prefilling, *self._running):
            if speech.is_ended:
                self._seats.leave(speech)
                self._places = min(self._batch_max, self._places + 1)
        self._waiting = deque(one for one in self._waiting if not one.is_ended)
        self._prefilling = [one for one in self._prefilling if not one.is_ended]
        self._running = [one for one in self._running if not one.is_ended]

    # --- sitting down -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._prefilling) + len(self._running) < self._places:
            # Those already seated will each want one block more before long.
            seated = len(self._prefilling) + len(self._running)
            if not self._seats.sit(self._waiting[0], spare=seated):
                return
            self._prefilling.append(self._waiting.popleft())

    def _preempt_youngest(self) -> None:
        """The youngest stands up and waits again, first in line; its tokens are computed anew when it sits down."""
        self._preempt(max((*self._prefilling, *self._running), key=lambda speech: speech.since))

    def _preempt(self, speech: Speech) -> None:
        log.info("sequence preempted ask=%s tokens=%d", speech.ask.id, len(speech.tokens))
        self._stand_up(speech)
        self.preempted += 1

    def _stand_up(self, speech: Speech) -> None:
        """Give up its blocks and wait again, first in line."""
        self._seats.leave(speech)
        self._prefilling = [one for one in self._prefilling if one is not speech]
        self._running = [one for one in self._running if one is not speech]
        self._waiting.appendleft(speech)

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _prefill_or_part(self, speeches: Sequence[Speech], most: int) -> None:
        """The next pieces of these, of so many tokens at most; in halves where that fails."""
        failure = self._attempt(lambda: self._prefill(speeches, most), speeches)
        if failure is None:
            return
        is_memory = isinstance(failure, OutOfMemory)
        if is_memory:
            self._prefill_fits = max(PREFILL_TOKENS_MIN, most // 2)
        half = len(speeches) // 2
        if half:
            self._prefill_or_part(speeches[:half], most)
            self._prefill_or_part(speeches[half:], most)
        elif is_memory and most > 1:
            tokens = min(most, len(speeches[0].tokens) - speeches[0].computed)
            self._prefill_or_part(speeches, max(1, tokens // 2))
        else:
            self._end_failed(speeches, failure)

    def _prefill(self, prefilling: Sequence[Speech], most: int) -> None:
        began = time.monotonic()
        pieces, speeches, left = [], [], most
        for speech in prefilling:
            count = min(left, len(speech.tokens) - speech.computed)
            if count <= 0:
                break
            tokens = speech.tokens[speech.computed : speech.computed + count]
            is_last = speech.computed + count == len(speech.tokens)
            pieces.append(Piece(tokens, speech.computed, speech.blocks, is_last, len(speech.tokens)))
            speeches.append(speech)
            left -= count
        logits = self._runner.prefill(pieces)
        finished = [speech for speech, piece in zip(speeches, pieces, strict=True) if piece.is_last]
        chosen = self._choose_first(finished, logits) if finished else None
        # From here on nothing is asked of the device that could fail, so that nothing counts twice.
        for speech, piece in zip(speeches, pieces, strict=True):
            speech.computed += len(piece.tokens)
            self.computed_tokens += len(piece.tokens)
        tokens_told = [] if chosen is None else chosen.tokens([one.ask.sampling.logprobs for one in finished])
        spent = (time.monotonic() - began) / (most - left)
        if self._is_slow:
            self._prefill_tokens = max(PREFILL_TOKENS_MIN, min(PREFILL_TOKENS_MAX, int(PREFILL_STEP_S / spent)))
        self._prefill_fits = min(PREFILL_TOKENS_MAX, self._prefill_fits + self._prefill_fits // 16)
        for speech, piece in zip(speeches, pieces, strict=True):
            speech.compute_s += spent * len(piece.tokens)
        for speech, token in zip(finished, tokens_told, strict=True):
            self._seats.share(speech)
            speech.hear(token)
        self._running.extend(finished)
        self._prefilling = [one for one in self._prefilling if one not in finished]
        self._let_go()

    def _choose_first(self, speeches: Sequence[Speech], logits: torch.Tensor) -> Readback:
        device = logits.device
        choosers = Choosers([speech.chooser for speech in speeches], device)
        places = torch.tensor([len(speech.tokens) for speech in speeches], device=device)
        chosen = choosers.choose(logits, places, self._masks(speeches, logits) if choosers.needs_host else None)
        fetched = Readback(chosen)
        choosers.note(chosen.tokens)
        return fetched

    # --- decoding ---------------------------------------------------------------------------------------------------

    def _decode_or_part(self) -> None:
        """A token for each that runs. Where that fails the younger half waits; one that fails alone is ended."""
        failure = self._tried_decode()
        if failure is not None and len(self._running) == 1:
            # Memory was freed since: once more before it is given up.
            failure = self._tried_decode()
        by_age = sorted(self._running, key=lambda speech: speech.since)
        if failure is None or not by_age:
            return
        if len(by_age) == 1:
            self._end_failed(by_age, failure)
            self._places = self._batch_max
        else:
            self._places = max(1, len(by_age) // 2)
            for speech in reversed(by_age[self._places :]):
                self._preempt(speech)

    def _tried_decode(self) -> Failure | None:
        failure = self._attempt(self._decode, list(self._running))
        if failure is not None:
            # What was chosen before counts. All else is computed again, from what the host knows.
            self._collect()
            self._batch = None
        return failure

    def _decode(self) -> None:
        if self._batch is None or self._batch.speeches != self._running:
            self._collect()
            if not self._arrange():
                return
        batch = self._batch
        if batch is None or self._outgrows(batch) or not self._grow(batch):
            return
        logits = self._runner.decode(len(batch.speeches), max(batch.positions) + 1)
        batch.positions = [position + 1 for position in batch.positions]
        self._collect()
        if all(speech.is_ended for speech in batch.speeches):
            return
        places = self._runner.rows.views(len(batch.speeches), 1)[1]
        masks = self._masks(batch.speeches, logits) if batch.choosers.needs_host else None
        chosen = batch.choosers.choose(logits, places, masks)
        self._runner.rows.choose(chosen.tokens)
        self._pending = Readback(chosen)
        batch.choosers.note(chosen.tokens)

    def _arrange(self) -> bool:
        """Put those who run into rows, as far as the host knows them. False if nobody runs any more."""
        self._batch = None
        if not self._running:
            return False
        running = list(self._running)
        rows = [Row(one.tokens[-1], one.computed, one.blocks) for one in running]
        self._runner.rows.place(rows)
        self._batch = Batch(
            running,
            Choosers([one.chooser for one in running], self._runner.stage.device),
            [row.position for row in rows],
            [one.ask.sampling.logprobs for one in running],
        )
        self._last_step = time.monotonic()
        return True

    def _outgrows(self, batch: Batch) -> bool:
        """Sequences that would pass one of `rope_switches` wait to be computed again with other factors.

        True if there were any: then the batch has changed.
        """
        switches = self._runner.rope_switches
        if not any(length in batch.positions for length in switches):
            return False
        outgrown = [one for one, at in zip(batch.speeches, batch.positions, strict=True) if at in switches]
        self._collect()
        for speech in reversed(outgrown):
            if not speech.is_ended:
                log.info(
                    "sequence computed again for other rotary factors ask=%s tokens=%d",
                    speech.ask.id,
                    len(speech.tokens),
                )
                self._stand_up(speech)
        self._batch = None
        return True

    def _grow(self, batch: Batch) -> bool:
        """Every row has a block for its next token. False if room had to be made: then the batch has changed."""
        for row, speech in enumerate(batch.speeches):
            # A token beyond the last one allowed is never heard; it goes to the scratch block.
            tokens = min(batch.positions[row] + 1, speech.prompt + speech.ask.max_tokens)
            have = len(speech.blocks)
            if tokens <= have * BLOCK_TOKENS:
                continue
            added = self._seats.grow(speech, tokens)
            if added is None:
                self._make_room()
                return False
            self._runner.rows.grow(row, have, added)
        return True

    def _make_room(self) -> None:
        seated = len(self._running)
        self._collect()
        # Somebody may have ended just now: that is room enough to try again.
        if len(self._running) == seated:
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
        for speech, token in zip(batch.speeches, tokens, strict=True):
            if not speech.is_ended:
                speech.computed += 1
                speech.compute_s += spent
                self.computed_tokens += 1
                speech.hear(token)
        self._let_go()

    def _masks(self, speeches: Sequence[Speech], logits: torch.Tensor) -> torch.Tensor:
        def fill(row: int, mask: torch.Tensor) -> None:
            speech = speeches[row]
            if speech.is_ended or speech.ask.constraint is None:
                return
            try:
                speech.ask.constraint.fill(mask)
            except Exception as error:  # Foreign code: its failure ends this answer and no other.
                mask.fill_(-1)
                speech.end("error", f"the output constraint failed: {translated(error)}")

        masks = filled_masks([one.chooser for one in speeches], logits.shape[-1], fill, logits.is_cuda)
        return masks.to(logits.device, non_blocking=True)
