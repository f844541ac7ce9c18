"""One short comparison of a model with plain Transformers, before its first answer.

The same module computes the same few tokens twice: from paged KV memory as it will be served (prompts in chunks, then
decoding, in a batch of unequal lengths), and as a whole with Transformers' own attention and none of our kernels. Owns
what is compared, the tolerance, and the record that a set of files has passed. Read `ModelCheck.run` first.

The tolerance is measured, not chosen: next to the reference, a second one is computed with the output of every layer
perturbed by one rounding unit. Two correct computations differ by about as much, in every dtype and at every depth.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from ..failures import BadModel, is_fatal, is_memory, shortened
from ..kernels.attention import IMPLEMENTATION
from ..kernels.fuse import without_fused_modules
from ..kernels.rope import without_fused_rope
from .model_shape import BLOCK_TOKENS, blocks_for, text_config, token_limits
from .runner import DecodeRow, ModelRunner, PrefillChunk

log = logging.getLogger(__name__)

# Tokens of each sequence's two chunks. The first sequence exceeds a block. All decode the same number of tokens.
CHUNKS: Final = ((14, 3), (7, 3), (3, 4))
DECODED: Final = 2
LENGTH: Final = sum(CHUNKS[0]) + DECODED
# A difference of up to this many times the effect of one rounding per layer counts as rounding. Correct models were
# measured at up to 1.0 in half precision, where a sum is rounded once, and up to 3 in float32 on a GPU.
NOISE_MAX_HALF: Final = 4.0
NOISE_MAX_SINGLE: Final = 64.0
# A window that these few tokens exceed, and the share of the logits it must change to count as applied.
WINDOW_TRIED: Final = 4
WINDOW_SHARE: Final = 0.1
# On a CPU, a model whose check would take longer than this, judged by its first chunk, is not checked.
SECONDS_MAX: Final = 40.0
FORWARDS: Final = 8
REMEMBERED_MAX: Final = 1000


class ModelCheck:
    """Run once, by the model's thread, when the weights are on the device for the first time."""

    def __init__(self, passed: Path | None) -> None:
        """`passed` is an empty file that exists once these files have passed; None: not remembered."""
        self._passed = passed

    @property
    def is_due(self) -> bool:
        return self._passed is None or not self._passed.exists()

    def run(self, runner: ModelRunner) -> None:
        """Raises BadModel if the logits differ by more than rounding, and whatever a step raises."""
        began = time.monotonic()
        try:
            agrees = _compare(runner)
        finally:
            if runner.model.device.type == "cuda":
                torch.cuda.empty_cache()
        log.info("model checked is_compared=%s took_s=%.3f", agrees, time.monotonic() - began)
        if agrees:
            self._remember()

    def _remember(self) -> None:
        if self._passed is None:
            return
        with suppress(OSError):
            self._passed.parent.mkdir(exist_ok=True)
            self._passed.touch()
            known = sorted(self._passed.parent.iterdir(), key=lambda one: one.stat().st_mtime)
            for old in known[:-REMEMBERED_MAX]:
                old.unlink(missing_ok=True)


def fingerprint(*parts: str) -> str:
    """A hash of these parts and of the worker's own code."""
    found = hashlib.sha256(_own_code())
    for part in parts:
        found.update(part.encode() + b"\0")
    return found.hexdigest()


@cache
def _own_code() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))


@dataclass(frozen=True, slots=True)
class _CheckedLogits:
    """The logits after one token of one sequence, and the phase that computed them."""

    phase: str
    row: int
    place: int
    logits: torch.Tensor


def _compare(runner: ModelRunner) -> bool:
    """True if the logits agree, False if they could not be compared. Raises BadModel if they differ."""
    limits = token_limits(runner.model.module)
    if limits.positions is not None and limits.positions < LENGTH:
        log.warning("the model is not checked: it has %d places, and %d are needed", limits.positions, LENGTH)
        return False
    random = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, min(limits.tokens, 2**31), (len(CHUNKS), LENGTH), generator=random).tolist()
    checked = _paged(runner, tokens)
    if not checked:
        return False
    name = type(runner.model.module).__name__
    reason = ""
    for attention in ("sdpa", "eager"):
        try:
            plain = _reference(runner, tokens, attention)
        except Exception as error:
            if is_memory(error) or is_fatal(error):
                raise
            reason = reason or f"{name} could not be compared with plain Transformers: {error}."
            continue
        found = _difference(checked, plain, _noise_max(runner.model.dtype))
        if found is None:
            _check_window(runner, tokens, plain, attention)
            return True
        reason = f"{name} answers otherwise here than in Transformers itself: {found}."
    raise BadModel(shortened(reason) + " If you want it served all the same, set skip_check: true for this model.")


def _paged(runner: ModelRunner, tokens: Sequence[Sequence[int]]) -> list[_CheckedLogits]:
    """The logits as they will be served; empty if the check would take too long."""
    width = blocks_for(LENGTH)
    tables = [range(1 + width * row, 1 + width * (row + 1)) for row in range(len(CHUNKS))]
    checked, done, began = list[_CheckedLogits](), [0] * len(CHUNKS), time.monotonic()
    with runner.scratch_memory(len(CHUNKS), len(CHUNKS) * width * BLOCK_TOKENS):
        for turn in range(2):
            counts = [chunks[turn] for chunks in CHUNKS]
            chunks = [
                PrefillChunk(tokens[row][done[row] : done[row] + count], done[row], tables[row], True)
                for row, count in enumerate(counts)
            ]
            logits = runner.prefill(chunks)
            done = [before + count for before, count in zip(done, counts, strict=True)]
            phase = ("a prompt", "a prompt's second piece")[turn]
            checked += [_CheckedLogits(phase, row, done[row] - 1, logits[row].float()) for row in range(len(CHUNKS))]
            if runner.model.device.type == "cpu" and (time.monotonic() - began) * FORWARDS > SECONDS_MAX:
                log.warning("the model is not checked: this processor would need too long for it")
                return []
        for _ in range(DECODED):
            runner.inputs.set_rows(
                [DecodeRow(tokens[row][done[row]], done[row], tables[row]) for row in range(len(CHUNKS))]
            )
            logits = runner.decode(len(CHUNKS), max(done) + 1)
            checked += [_CheckedLogits("decoding", row, done[row], logits[row].float()) for row in range(len(CHUNKS))]
            done = [before + 1 for before in done]
    return checked


def _reference(runner: ModelRunner, tokens: Sequence[Sequence[int]], attention: str) -> torch.Tensor:
    """Logits by Transformers' own attention: first of the sequences, then of the same sequences, perturbed."""
    module: Any = runner.model.module
    ids = torch.tensor([*tokens, *tokens]).to(runner.model.device)
    runner.model.wait_for_weights()
    with ExitStack() as around:
        around.enter_context(without_fused_modules(module))
        around.enter_context(without_fused_rope(module))
        around.callback(module.set_attn_implementation, IMPLEMENTATION)
        module.set_attn_implementation(attention)
        around.enter_context(_perturbed(module, len(tokens), runner.model.dtype))
        around.enter_context(torch.no_grad())
        logits: torch.Tensor = module(input_ids=ids, use_cache=False).logits
    return logits


@contextmanager
def _perturbed(module: Any, first: int, dtype: torch.dtype) -> Iterator[None]:
    """Inside, layers' outputs for rows from `first` on are changed by one rounding unit, up or down at random."""
    unit = torch.finfo(dtype).eps
    random = torch.Generator().manual_seed(11)

    def perturb(_module: torch.nn.Module, _given: Any, given: Any) -> Any:
        hidden = given[0] if isinstance(given, tuple) else given
        if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point() or hidden.dim() != 3:
            return None
        signs = torch.randint(0, 2, hidden[first:].shape, generator=random).mul_(2).sub_(1)
        factor = 1 + unit * signs.to(hidden.device, torch.float32)
        hidden[first:] = (hidden[first:].float() * factor).to(hidden.dtype)
        return None

    parts = [module.get_input_embeddings(), *(part for part in module.modules() if hasattr(part, "layer_idx"))]
    hooks = [part.register_forward_hook(perturb) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _noise_max(dtype: torch.dtype) -> float:
    return NOISE_MAX_SINGLE if dtype == torch.float32 else NOISE_MAX_HALF


def _check_window(runner: ModelRunner, tokens: Sequence[Sequence[int]], plain: torch.Tensor, attention: str) -> None:
    """Raises BadModel if the model applies a window that its layers do not pass on: short texts do not show it."""
    text = text_config(runner.model.config)
    window = getattr(text, "sliding_window", None)
    if runner.windows != {None} or not isinstance(window, int) or window >= runner.context:
        return
    text.sliding_window = WINDOW_TRIED
    try:
        narrow = _reference(runner, tokens, attention)
    finally:
        text.sliding_window = window
    changed = (narrow - plain)[: len(tokens)].float().norm() / plain[: len(tokens)].float().norm()
    if changed > WINDOW_SHARE:
        raise BadModel(
            f"{type(runner.model.module).__name__} looks back {window:,} tokens by its configuration; its layers do "
            f"not say so. Set ctx_size to at most {window:,}."
        )


def _difference(checked: Sequence[_CheckedLogits], plain: torch.Tensor, noise_max: float) -> str | None:
    """The phase whose logits differ and by how much; None if rounding explains it."""
    rows = plain.shape[0] // 2
    apart: dict[str, list[float]] = {}
    noise: list[float] = []
    for one in checked:
        right = plain[one.row, one.place].float()[: one.logits.shape[-1]]
        if not torch.isfinite(right).all():
            continue
        spread = float((right - right.mean()).norm())
        perturbed = plain[rows + one.row, one.place].float()[: one.logits.shape[-1]]
        apart.setdefault(one.phase, []).append(float((one.logits - right).norm()) / spread)
        noise.append(float((perturbed - right).norm()) / spread)
    if not noise:
        return None
    # The median: with mixtures of experts, rounding routes a few tokens to other experts.
    bound = noise_max * _median(noise)
    for phase, found in apart.items():
        if not _median(found) <= bound:
            return (
                f"logits of {phase} differ by {_median(found):.2g} of their spread, and rounding explains {bound:.2g}"
            )
    return None


def _median(numbers: Sequence[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]
