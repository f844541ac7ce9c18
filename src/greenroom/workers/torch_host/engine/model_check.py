"""One short comparison of a model with plain Transformers, before it first answers anybody.

The same module computes the same few tokens twice: from paged KV memory as it will be served (prompts in pieces, then
decoding, in a batch of unequal lengths), and as a whole with Transformers' own attention and none of our kernels. Owns
what is compared, the bound, and where it is remembered that a set of files has passed. Read `ModelCheck.run` first.

The bound is measured, not chosen: beside the plain answer a second one is computed whose layers are shaken by one unit
of rounding each. Two right ways to compute the same differ by about as much, in every dtype and at every depth.
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

# Tokens of each sequence's two pieces. The first outgrows a block, and all end with as many decoded tokens.
CHUNKS: Final = ((14, 3), (7, 3), (3, 4))
DECODED: Final = 2
LENGTH: Final = sum(CHUNKS[0]) + DECODED
# How many times what one rounding a layer does is still taken for rounding. Right models were seen at up to 1.0 times
# in half precision, where a sum is rounded once; in float32, where each addition is, at up to 3 times on a GPU.
NOISE_MAX_HALF: Final = 4.0
NOISE_MAX_SINGLE: Final = 64.0
# A window that these few tokens outgrow, and how much of the logits it must change to be one.
WINDOW_TRIED: Final = 4
WINDOW_SHARE: Final = 0.1
# A model for which a CPU would need longer than this, by its first piece, is served without: a wake must end in time.
SECONDS_MAX: Final = 40.0
FORWARDS: Final = 8
REMEMBERED_MAX: Final = 1000


class ModelCheck:
    """To be run once, by the thread that computes, when the weights are on the device for the first time."""

    def __init__(self, passed: Path | None) -> None:
        """`passed` is an empty file that is there once these files have passed; None: that is not remembered."""
        self._passed = passed

    @property
    def is_due(self) -> bool:
        return self._passed is None or not self._passed.exists()

    def run(self, runner: ModelRunner) -> None:
        """Raises BadModel where the answers differ by more than rounding, and what a step can raise."""
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
    """A name for what was compared: these, and the code that computes here."""
    found = hashlib.sha256(_own_code())
    for part in parts:
        found.update(part.encode() + b"\0")
    return found.hexdigest()


@cache
def _own_code() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))


@dataclass(frozen=True, slots=True)
class _CheckedLogits:
    """What may come after one token of one sequence, and how that was computed."""

    phase: str
    row: int
    place: int
    logits: torch.Tensor


def _compare(runner: ModelRunner) -> bool:
    """True if the answers agree; False if that could not be found out. Raises BadModel if they do not."""
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
    """The answers as they will be given; none where all this would take too long."""
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
    """Logits of whole sequences by Transformers' own attention: first as they are, then the same again, shaken."""
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
    """What layers give for rows from `first` on is changed by one unit of rounding up or down, number by number."""
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
    """Raises BadModel where the model masks by a window that its layers never speak of: short texts do not show it."""
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
    """In which phase the answers differ and by how much; None if rounding explains it."""
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
    # Of several tokens the middle one: where experts are chosen, rounding sends a few of them elsewhere.
    bound = noise_max * _median(noise)
    for phase, found in apart.items():
        if not _median(found) <= bound:
            return (
                f"logits of {phase} differ by {_median(found):.2g} of their spread, and rounding explains {bound:.2g}"
            )
    return None


def _median(numbers: Sequence[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]
