"""The rows of a decode batch as tensors that never move, so that captured steps find them where they were.

Owns what each row decodes next: its token, where that stands, and its table of blocks. Never knows whose rows they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .model_shape import SCRATCH_BLOCK
from .requests import Token
from .sampling import Chosen


@dataclass(frozen=True, slots=True)
class Row:
    token: int
    position: int
    blocks: Sequence[int]


class Rows:
    """Room for a whole batch. Rows beyond those placed stand still and write to the scratch block."""

    def __init__(self, batch_max: int, width_max: int, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.width_max = width_max
        # Token, position and how far the position goes on with each step, one under the other: one upload for all.
        self._state = torch.zeros((3, batch_max), dtype=torch.long, device=device)
        self._table = torch.full((batch_max, width_max), SCRATCH_BLOCK, dtype=torch.int32, device=device)
        self._placed = 0

    def views(self, count: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, positions and table of the first `count` rows."""
        return self._state[0, :count], self._state[1, :count], self._table[:count, :width]

    def advance(self, count: int) -> None:
        """One place further for each of the first `count` rows that is somebody's."""
        self._state[1, :count].add_(self._state[2, :count])

    def place(self, rows: Sequence[Row]) -> None:
        """These are the rows from now on."""
        cleared = max(self._placed, len(rows))
        idle = [0] * (cleared - len(rows))
        state = [[row.token for row in rows], [row.position for row in rows], [1] * len(rows)]
        self._state[:, :cleared].copy_(self._host([part + idle for part in state], torch.long), non_blocking=True)
        width = max((len(row.blocks) for row in rows), default=1)
        table = [self._padded(row.blocks, width) for row in rows] + [self._padded((), width)] * len(idle)
        self._table[:cleared, :width].copy_(self._host(table, torch.int32), non_blocking=True)
        self._table[:cleared, width:] = SCRATCH_BLOCK
        self._placed = len(rows)

    def grow(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """This row's table goes on with these blocks, from place `first` on."""
        self._table[row, first : first + len(blocks)].copy_(self._host(blocks, torch.int32), non_blocking=True)

    def choose(self, tokens: torch.Tensor) -> None:
        """These tokens come next, in the order of rows."""
        self._state[0, : tokens.shape[0]].copy_(tokens)

    def _padded(self, blocks: Sequence[int], width: int) -> list[int]:
        return [*blocks, *[SCRATCH_BLOCK] * (width - len(blocks))]

    def _host(self, numbers: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
        # Pinned memory is torch's own to reuse once the copy is done, so a new piece each time is safe.
        return torch.tensor(numbers, dtype=dtype, pin_memory=self._is_cuda)


class Readback:
    def __init__(self, chosen: Chosen) -> None:
        self._parts = [_fetched(part) for part in chosen.parts]
        self._event: Any = None
        if chosen.tokens.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def tokens(self, logprobs: Sequence[int | None]) -> list[Token]:
        """A token a row. `logprobs`: how many of the likeliest each row wants to know, None for nothing at all."""
        if self._event is not None:
            self._event.synchronize()
        lists: list[Any] = [part if part is None else part.tolist() for part in self._parts]
        ids, own, top_ids, top = lists
        told = []
        for row, token in enumerate(ids):
            wanted = logprobs[row]
            if wanted is None or own is None:
                told.append(Token(token))
            else:
                best = tuple(zip(top_ids[row][:wanted], top[row][:wanted], strict=True))
                told.append(Token(token, own[row], best))
        return told


def _fetched(part: torch.Tensor | None) -> torch.Tensor | None:
    if part is None or not part.is_cuda:
        return part
    # Pinned, or the copy would wait for the device.
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)
