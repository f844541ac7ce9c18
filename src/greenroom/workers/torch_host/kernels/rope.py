"""The rotary embedding of a model's own code: made correct for mixed batches, and fast.

`rope_by_length` gives each sequence the factors of its own length. Transformers chooses those of `longrope` by the
longest position of a whole step, so one caller's long prompt would change another's answer. The model's own code is
called twice, for short and for long sequences, and each token takes the angles of its own sequence.

`fuse_rope` replaces the function that applies the angles by one kernel if that computes the same: both are compared on
random numbers, so only the usual form, which rotates halves against each other, is replaced. Unusual calls go to the
original function. The replacement is made once and holds for all models of that kind in this process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..engine.model_shape import text_config
from ..failures import BadModel
from .attention import HALF_TYPES, current_step

log = logging.getLogger(__name__)

NAME = "apply_rotary_pos_emb"
# Two roundings of half-precision numbers around one.
TOLERANCE = 0.05
LONGROPE, DYNAMIC = "longrope", "dynamic"


def rope_by_length(model: torch.nn.Module, config: Any) -> tuple[int, ...]:
    """Choose rotary factors for each sequence by its own length. Outside of steps the model is unchanged. Returns the
    lengths beyond which a sequence takes other factors, so its computed keys are void. Raises BadModel if factors
    depend on the length in code that is not Transformers' own."""
    embeddings = [module for module in model.modules() if hasattr(module, "rope_type")]
    if not embeddings and (kinds := rope_kinds(config) & {LONGROPE, DYNAMIC}):
        raise BadModel(
            f"{type(model).__name__} scales its positions ({', '.join(kinds)}) in code of its own, which may mix "
            "up the lengths of sequences that are computed together."
        )
    return tuple(sorted({length for one in embeddings for length in _install(one).values()}))


def rope_kinds(config: Any) -> set[Any]:
    parameters = getattr(text_config(config), "rope_parameters", None) or {}
    return {one.get("rope_type") for one in (parameters, *parameters.values()) if isinstance(one, dict)}


def _install(embedding: Any) -> Mapping[str | None, int]:
    """Install `_RopeByLength` if needed. Returns the lengths at which factors change, by kind of layer."""
    if isinstance(embedding.forward, _RopeByLength):
        return embedding.forward.switches
    switches: dict[str | None, int] = {}
    kinds = embedding.rope_type
    for layer, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
        if kind == LONGROPE:
            parameters = embedding.config.rope_parameters
            switches[layer] = int(
                (parameters if layer is None else parameters[layer])["original_max_position_embeddings"]
            )
        elif DYNAMIC in str(kind):
            # Its factors change beyond `max_position_embeddings`, and no context is longer: they never change here.
            embedding.rope_type = "default" if layer is None else {**embedding.rope_type, layer: "default"}
    if switches:
        embedding.forward = _RopeByLength(embedding.forward, switches)
    return switches


class _RopeByLength:
    """A rotary embedding's forward with the factors of each token's own sequence. Only tensor operations."""

    def __init__(self, plain: Any, switches: Mapping[str | None, int]) -> None:
        self._plain = plain
        self.switches = switches

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        step, switch = current_step(), self.switches.get(layer_type)
        named = {} if layer_type is None else {"layer_type": layer_type}
        if step is None or switch is None:
            return self._plain(x, position_ids, **named)
        # The model chooses by the largest position: first all are clamped below the switch, then one at it is added.
        beyond = torch.full_like(position_ids[..., :1], switch)
        short = self._plain(x, position_ids.clamp(max=switch - 1), **named)
        long = self._plain(x, torch.cat((position_ids, beyond), dim=-1), **named)
        is_long = step.sequence_lengths()[..., None] > switch
        if isinstance(short, torch.Tensor):
            return torch.where(is_long, long[:, :-1], short)
        return tuple(torch.where(is_long, one[:, :-1], other) for one, other in zip(long, short, strict=True))


def fuse_rope(model: torch.nn.Module, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Replace the function in the Python modules of the model's attention. True if it is replaced."""
    modules = _modules_with_rope(model)
    return bool(modules) and all(_replace(module, head_dim, dtype, device) for module in modules)


@contextmanager
def without_fused_rope(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the original functions are in place, for all models of that kind."""
    taken = [
        (module, fused)
        for module in _modules_with_rope(model)
        if (fused := getattr(module, NAME)) and hasattr(fused, "plain")
    ]
    for module, fused in taken:
        setattr(module, NAME, fused.plain)
    try:
        yield
    finally:
        for module, fused in taken:
            setattr(module, NAME, fused)


def _modules_with_rope(model: torch.nn.Module) -> list[Any]:
    """The Python modules that define the model's attention and have the function."""
    names = {type(module).__module__ for module in model.modules() if hasattr(module, "layer_idx")}
    return [sys.modules[name] for name in sorted(names) if callable(getattr(sys.modules.get(name), NAME, None))]


def _replace(module: Any, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    plain = getattr(module, NAME)
    if hasattr(plain, "plain"):
        return True
    try:
        fused = _fused_by_kernel(plain)
        with torch.cuda.device(device):
            difference = _difference(plain, fused, head_dim, dtype, device)
    except Exception as error:  # Whatever the error, the original function still works.
        log.warning("positions go without their kernel: %s", (str(error) or repr(error)).splitlines()[0])
        return False
    if not difference <= TOLERANCE:
        log.info("positions of %s are turned in a way of its own", module.__name__)
        return False
    fused.plain = plain
    setattr(module, NAME, fused)
    return True


def _fused_by_kernel(plain: Any) -> Any:
    from .triton_kernels import apply_rope

    def apply(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if more or named or not q.is_cuda or not _is_supported(q, k, cos, sin):
            return plain(q, k, cos, sin, *more, **named)  # type: ignore[no-any-return]
        return apply_rope(q, k, cos, sin)

    return apply


def _is_supported(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return (
        q.dim() == k.dim() == 4
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.stride() == sin.stride()
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1] == q.shape[2] == k.shape[2]
        and cos.shape[-1] <= q.shape[-1] == k.shape[-1]
        and q.dtype == k.dtype
        and q.dtype in HALF_TYPES
        and q.stride(-1) == k.stride(-1) == cos.stride(-1) == 1
    )


def _difference(plain: Any, fused: Any, head_dim: int, dtype: torch.dtype, device: torch.device) -> float:
    random = torch.Generator(device=device).manual_seed(3)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random, device=device, dtype=torch.float32).to(dtype)

    # As in a model: both halves of the angles are equal, and queries and keys are transposed views.
    angles = randn(2, 3, head_dim // 2).repeat(1, 1, 2)
    query, key = randn(2, 3, 4, head_dim).transpose(1, 2), randn(2, 3, 2, head_dim).transpose(1, 2)
    wanted = plain(query, key, angles.cos(), angles.sin())
    got = fused(query, key, angles.cos(), angles.sin())
    return max(float((one - other).abs().max()) for one, other in zip(wanted, got, strict=True))
