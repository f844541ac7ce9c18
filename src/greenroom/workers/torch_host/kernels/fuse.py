"""The same model in fewer kernels: leaf modules get a forward that does their work in one call of torch.

Owns which modules are changed and the proof that the result is the same: a norm is tried on random numbers first, and
projections are joined only if their weights are adjacent in memory. Never copies a weight: all stay views of the arena.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm

log = logging.getLogger(__name__)

# Projections that read the same input, in the order a layer calls them.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
NORM_TOLERANCE = 1e-5


def fuse_modules(model: torch.nn.Module) -> None:
    """Fuse norms and projections where possible. Results are the same up to the order of rounding."""
    norms = projections = 0
    for module in model.modules():
        norms += _fuse_norm(module)
        for names in SIBLINGS:
            projections += _fuse_projections(module, names)
    log.info("modules fused norms=%d projections=%d", norms, projections)


@contextmanager
def without_fused_modules(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model runs its own code."""
    fused = [part for part in model.modules() if getattr(vars(part).get("forward"), "is_fused", False)]
    taken = [(part, vars(part).pop("forward")) for part in fused]
    try:
        yield
    finally:
        for part, forward in taken:
            vars(part)["forward"] = forward


def _fuse_norm(module: torch.nn.Module) -> bool:
    if not type(module).__name__.endswith("RMSNorm"):
        return False
    eps = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)
    weight = module._parameters.get("weight")
    if not isinstance(eps, float) or weight is None or weight.dim() != 1 or not _is_plain_norm(module, eps):
        return False
    shape = tuple(weight.shape)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, shape, module.weight, eps)

    forward.is_fused = True  # type: ignore[attr-defined]
    module.forward = forward
    return True


def _is_plain_norm(module: torch.nn.Module, eps: float) -> bool:
    """True if this class only multiplies by its weight: tried on a copy with a weight of its own."""
    size = int(module._parameters["weight"].shape[0])
    random = torch.Generator().manual_seed(size)
    # Explicit: torch's default dtype and device may have been changed while building a model.
    weight = torch.rand(size, generator=random, dtype=torch.float32, device="cpu") + 0.5
    hidden = torch.randn((2, size), generator=random, dtype=torch.float32, device="cpu") * 0.01
    twin = copy.copy(module)
    twin._parameters = {"weight": torch.nn.Parameter(weight, requires_grad=False)}
    try:
        with torch.no_grad():
            apart = (twin(hidden) - rms_norm(hidden, (size,), weight, eps)).abs().max()
    except (RuntimeError, TypeError, AttributeError):
        return False
    return bool(apart <= NORM_TOLERANCE)


def _fuse_projections(module: torch.nn.Module, names: Sequence[str]) -> bool:
    parts = [module._modules.get(name) for name in names]
    if any(type(part) is not torch.nn.Linear for part in parts):
        return False
    weights = [part.weight for part in parts]
    if any(part.bias is not None for part in parts) or not _are_adjacent(weights):
        return False
    _FusedProjections(parts, weights)
    return True


def _are_adjacent(weights: Sequence[torch.Tensor]) -> bool:
    if any(not weight.is_contiguous() or weight.is_meta for weight in weights):
        return False
    for one, other in pairwise(weights):
        if one.shape[1] != other.shape[1] or one.dtype != other.dtype:
            return False
        if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
            return False
        if one.data_ptr() + one.numel() * one.element_size() != other.data_ptr():
            return False
    return True


class _FusedProjections:
    """Several projections of one input as one product. The first computes all; the others return their part."""

    def __init__(self, parts: Sequence[Any], weights: Sequence[torch.Tensor]) -> None:
        self._rows = [int(weight.shape[0]) for weight in weights]
        first = weights[0]
        self._weight = torch.as_strided(first.detach(), (sum(self._rows), first.shape[1]), (first.shape[1], 1))
        self._hidden: torch.Tensor | None = None
        self._left: list[torch.Tensor] = []
        parts[0].forward = self._compute
        for part in parts[1:]:
            part.forward = self._forward_of(part.weight)

    def _compute(self, hidden: torch.Tensor) -> torch.Tensor:
        one, *self._left = linear(hidden, self._weight).split(self._rows, dim=-1)
        self._hidden = hidden
        return one

    def _forward_of(self, weight: torch.Tensor) -> Any:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            if hidden is not self._hidden:
                return linear(hidden, weight)
            part = self._left.pop(0)
            if not self._left:
                self._hidden = None
            return part

        forward.is_fused = True  # type: ignore[attr-defined]
        return forward

    _compute.is_fused = True  # type: ignore[attr-defined]
