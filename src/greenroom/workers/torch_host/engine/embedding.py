"""Makes embeddings: hidden states pooled and projected as the model's folder says.

Owns how inputs are grouped by length and how they are pooled. The model uses its own attention and is given a mask.
Computes on the model's thread; keeps nothing. Read `Embedder.vectors` first.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.nn.functional import normalize

from ..kernels.rope import LONGROPE, rope_kinds
from ..weights.sentence_config import HEAD, PoolingMode, SentenceConfig
from .model_shape import text_config, token_limits
from .requests import Vectors
from .runner import DeviceModel

# Tokens computed at once, padding included.
TOKENS_MAX = 8192
# Models in which padding affects no token; a test checks each. Not every model obeys its mask: some mix tokens in other
# ways than attention. Inputs of models that are not listed are never padded.
# fmt: off
PADDED_MODELS: Final = frozenset({
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "eurobert", "gemma3_text",
    "gte", "jina_embeddings_v3", "llama", "mistral", "modernbert", "mpnet", "mt5", "nomic_bert", "qwen2", "qwen3",
    "roberta", "t5", "umt5", "xlm-roberta",
})
# fmt: on


def can_pad(module: Any) -> bool:
    """True if inputs of different lengths may be computed together: padding affects none of them."""
    # Longrope chooses its factors by the longest input of a batch.
    return module.config.model_type in PADDED_MODELS and LONGROPE not in rope_kinds(module.config)


def group_by_length(inputs: Sequence[Sequence[int]], pads: bool = True) -> list[list[int]]:
    """The inputs' indices in groups of similar length, each computed at once."""
    groups: list[list[int]] = []
    # Longest first: the first of a group sets its width.
    for number in sorted(range(len(inputs)), key=lambda one: -len(inputs[one])):
        width = len(inputs[groups[-1][0]]) if groups else 0
        fits = groups and width * (len(groups[-1]) + 1) <= TOKENS_MAX
        if fits and (pads or len(inputs[number]) == width):
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


class Embedder:
    def __init__(self, model: DeviceModel, sentence: SentenceConfig) -> None:
        self._model = model
        self._sentence = sentence
        self.pads = can_pad(model.module)
        fill = getattr(text_config(model.config), "pad_token_id", None)
        self._fill = fill if isinstance(fill, int) and 0 <= fill < token_limits(model.module).tokens else 0
        known = inspect.signature(model.module.forward).parameters
        self._takes_mask = "attention_mask" in known
        self._options = {"use_cache": False} if "use_cache" in known else {}

    def vectors(self, inputs: Sequence[Sequence[int]], skipped: Sequence[int]) -> Vectors:
        """One vector per input. No input may be empty; its first `skipped` tokens are not pooled."""
        width = max(len(one) for one in inputs)
        device = self._model.device
        ids = torch.tensor([[*one, *[self._fill] * (width - len(one))] for one in inputs]).to(device)
        lengths = torch.tensor([len(one) for one in inputs]).to(device)
        # Prompt and text together may have fewer tokens than the prompt alone: at least one token is pooled.
        kept = [min(skip, len(one) - 1) for skip, one in zip(skipped, inputs, strict=True)]
        first = torch.tensor(kept).to(device)
        at = torch.arange(width, device=device)[None, :]
        mask = at < lengths[:, None]
        masks = {"attention_mask": mask.long()} if self._takes_mask else {}
        with torch.no_grad():
            hidden = self._model.module(input_ids=ids, **masks, **self._options).last_hidden_state
            pooled = torch.cat(list(_pooled(hidden, mask & (at >= first[:, None]), self._sentence.pooling)), dim=-1)
            for step, part in zip(self._sentence.steps, getattr(self._model.module, HEAD), strict=True):
                pooled = normalize(pooled, dim=-1) if step == "normalize" else part(pooled)
        vectors: Vectors = pooled[:, : self._sentence.dimensions].float().tolist()
        return vectors


def _pooled(hidden: torch.Tensor, mask: torch.Tensor, modes: Sequence[PoolingMode]) -> Iterator[torch.Tensor]:
    """One vector per input for each mode. Sums are computed in full precision."""
    rows, at = torch.arange(mask.shape[0], device=mask.device), torch.arange(mask.shape[1], device=mask.device)
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)
    numbers = hidden.float()
    for mode in modes:
        if mode == "cls":
            yield hidden[rows, mask.int().argmax(dim=1)]
        elif mode == "lasttoken":
            yield hidden[rows, last]
        elif mode == "max":
            yield hidden.masked_fill(~mask[:, :, None], float("-inf")).amax(dim=1)
        else:
            weights = mask * (at + 1) if mode == "weightedmean" else mask
            total = weights.sum(dim=1, keepdim=True).clamp(min=1e-9)
            share = total.sqrt() if mode == "mean_sqrt_len_tokens" else total
            # Padding may hold NaN, which a weight of zero would not remove.
            real = numbers.masked_fill(~mask[:, :, None], 0.0)
            yield ((real * weights[:, :, None]).sum(dim=1) / share).to(hidden.dtype)
