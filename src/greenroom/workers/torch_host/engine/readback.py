"""What the device chose, on its way to the host: asked for at once, waited for when somebody wants to know.

Owns the copies of one step's choices. Never stops the device: only the host waits, and only in `tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .asks import Token
from .sampling import Chosen


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
