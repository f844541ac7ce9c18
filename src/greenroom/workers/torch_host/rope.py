"""The rotary embedding of a model's own code, replaced by one kernel where that computes the same.

Owns the question where it may be used: the function in the model's code is asked with made-up numbers, and only one
that turns halves against each other, as nearly all do, is replaced. A call that does not look like the usual one goes
to the function that was there. The replacement stands for all models of that kind in this process, and is made once.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

log = logging.getLogger(__name__)

NAME = "apply_rotary_pos_emb"
HALF_TYPES = (torch.float16, torch.bfloat16)
# Two roundings of half precision, of numbers around one.
TOLERANCE = 0.05


def quicken_rope(model: torch.nn.Module, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Replace the function in the module that the model's attention is written in. Says whether it is replaced."""
    homes = {type(module).__module__ for module in model.modules() if hasattr(module, "layer_idx")}
    homes = {home for home in homes if callable(getattr(sys.modules.get(home), NAME, None))}
    return bool(homes) and all(_replaced(sys.modules[home], head_dim, dtype, device) for home in sorted(homes))


def _replaced(home: Any, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    plain = getattr(home, NAME)
    if getattr(plain, "is_quick", False):
        return True
    try:
        quick = _quick(plain)
        with torch.cuda.device(device):
            apart = _apart(plain, quick, head_dim, dtype, device)
    except Exception as error:  # Whatever it is, the function that is there still works.
        log.warning("positions go without their kernel: %s", (str(error) or repr(error)).splitlines()[0])
        return False
    if not apart <= TOLERANCE:
        log.info("positions of %s are turned in a way of its own", home.__name__)
        return False
    quick.is_quick = True
    setattr(home, NAME, quick)
    return True


def _quick(plain: Any) -> Any:
    from .rope_kernel import turn

    def apply(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if more or named or not q.is_cuda or not _is_usual(q, k, cos, sin):
            return plain(q, k, cos, sin, *more, **named)  # type: ignore[no-any-return]
        return turn(q, k, cos, sin)

    return apply


def _is_usual(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
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


def _apart(plain: Any, quick: Any, head_dim: int, dtype: torch.dtype, device: torch.device) -> float:
    random = torch.Generator(device=device).manual_seed(3)

    def some(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random, device=device, dtype=torch.float32).to(dtype)

    # Halves are the same in real angles too; queries and keys come as views of what projections gave.
    angles = some(2, 3, head_dim // 2).repeat(1, 1, 2)
    query, key = some(2, 3, 4, head_dim).transpose(1, 2), some(2, 3, 2, head_dim).transpose(1, 2)
    wanted = plain(query, key, angles.cos(), angles.sin())
    got = quick(query, key, angles.cos(), angles.sin())
    return max(float((one - other).abs().max()) for one, other in zip(wanted, got, strict=True))
