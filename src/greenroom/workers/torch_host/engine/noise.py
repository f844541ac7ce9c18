"""Chance that can be asked again: one number in [0, 1) for each seed and place, whatever else is in the batch.

Owns the mixing of seed and place. Never keeps state: the same question has the same answer on any device, in any batch.
"""

from __future__ import annotations

import torch

# The odd constants of a well-known mixer of 64 bits, as the signed numbers torch has; products wrap around.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
# One bit less than a double holds, so that no product with a total ever rounds up to the total.
_BITS = 52


def chance(seeds: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """A double in [0, 1) for each pair of 64-bit integers."""
    mixed = _mixed(_mixed(seeds) + places * _STRIDE)
    return _shifted(mixed, 64 - _BITS).double() * 2.0**-_BITS


def _mixed(number: torch.Tensor) -> torch.Tensor:
    number = (number ^ _shifted(number, 30)) * _FIRST
    number = (number ^ _shifted(number, 27)) * _SECOND
    return number ^ _shifted(number, 31)


def _shifted(number: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, with zeros coming in from the left as for unsigned numbers."""
    return (number >> by) & ((1 << (64 - by)) - 1)
