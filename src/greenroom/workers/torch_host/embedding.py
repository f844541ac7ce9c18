"""Inputs as vectors: hidden states pooled and brought to length one.

Owns how inputs are batched by length and which pooling a model wants. Computes on the model's thread; keeps nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from .asks import Vectors
from .attention import performing
from .limits import limits_of
from .pages import text_config
from .rope import turn_by_length
from .runner import Stage
from .steps import Embed

Pooling = Literal["mean", "last", "first"]
# Tokens computed at once, fill included.
TOKENS_MAX = 8192
POOLING_FILE = Path("1_Pooling") / "config.json"
POOLING_KEYS: tuple[tuple[str, Pooling], ...] = (
    ("pooling_mode_cls_token", "first"),
    ("pooling_mode_lasttoken", "last"),
    ("pooling_mode_mean_tokens", "mean"),
)


def pooling_of(folder: Path, config: Any) -> Pooling:
    """What the model's folder says; where it says nothing, the last token of a decoder and the mean of an encoder."""
    try:
        said = json.loads((folder / POOLING_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        said = {}
    if isinstance(said, dict):
        for key, pooling in POOLING_KEYS:
            if said.get(key) is True:
                return pooling
    names = " ".join(getattr(config, "architectures", None) or ())
    return "last" if "ForCausalLM" in names or getattr(text_config(config), "is_decoder", False) else "mean"


def grouped(inputs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Inputs by number, those of like length together, as many as are computed at once."""
    groups: list[list[int]] = []
    # Longest first: the first of a group says how wide it is.
    for number in sorted(range(len(inputs)), key=lambda one: -len(inputs[one])):
        width = len(inputs[groups[-1][0]]) if groups else 0
        if groups and width * (len(groups[-1]) + 1) <= TOKENS_MAX:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


class Embedder:
    def __init__(self, stage: Stage, pooling: Pooling) -> None:
        self._stage = stage
        turn_by_length(stage.module, stage.config)
        self._pooling = pooling
        fill = getattr(text_config(stage.config), "pad_token_id", None)
        self._fill = fill if isinstance(fill, int) and 0 <= fill < limits_of(stage.module).tokens else 0

    def vectors(self, inputs: Sequence[Sequence[int]]) -> Vectors:
        """A vector of length one for each input. None may be empty."""
        width = max(len(one) for one in inputs)
        ids = torch.tensor([[*one, *[self._fill] * (width - len(one))] for one in inputs]).to(self._stage.device)
        lengths = torch.tensor([len(one) for one in inputs]).to(self._stage.device)
        model = getattr(self._stage.module, "base_model", self._stage.module)
        with torch.no_grad(), performing(Embed(lengths, width)):
            hidden = model(input_ids=ids).last_hidden_state
        pooled = self._pooled(hidden.float(), lengths)
        vectors: Vectors = torch.nn.functional.normalize(pooled, dim=-1).tolist()
        return vectors

    def _pooled(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if self._pooling == "first":
            return hidden[:, 0]
        if self._pooling == "last":
            return hidden[torch.arange(hidden.shape[0], device=hidden.device), lengths - 1]
        real = torch.arange(hidden.shape[1], device=hidden.device)[None, :] < lengths[:, None]
        return (hidden * real[:, :, None]).sum(dim=1) / lengths[:, None]
