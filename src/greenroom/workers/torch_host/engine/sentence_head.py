"""The modules behind the pooling of an embedding model, as a part of the module whose hidden states they project.

Owns their building, and where their weights come from. As a part of the module they lie in its arena: they sleep, wake
and are counted with it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from ..failures import BadModel, is_memory, shortened
from ..weights.safetensors_files import StoredTensor
from ..weights.sentence_config import PICKLE_NAME, SentenceConfig
from .pages import text_config

# The name of the part. No model of Transformers has one of this name.
HEAD = "sentence_head"


def attach(module: Any, sentence: SentenceConfig, dtype: torch.dtype, device: str) -> None:
    """Give the module its head, without weights on the meta device. Raises BadModel where widths do not fit."""
    width = int(text_config(module.config).hidden_size) * len(sentence.pooling)
    steps: list[torch.nn.Module] = []
    for step in sentence.steps:
        if step == "normalize":
            # It has no weights; this keeps its place.
            steps.append(torch.nn.Identity())
            continue
        if step.inside != width:
            raise BadModel(f"{step.folder} projects {step.inside:,} numbers, and is given {width:,}.")
        linear = torch.nn.Linear(width, step.outside, bias=step.has_bias, dtype=dtype, device=device)
        activation = getattr(torch.nn, step.activation)()
        steps.append(torch.nn.Sequential(OrderedDict(linear=linear, activation=activation)))
        width = step.outside
    # The elements of a list wait for their own weights only, as layers do.
    module.add_module(HEAD, torch.nn.ModuleList(steps).eval().requires_grad_(False))


def stored_weights(sentence: SentenceConfig, allow_pickle: bool) -> dict[str, StoredTensor]:
    """Where its weights lie in files, by the names they have in the module. Pickles are left out.

    Raises BadModel for files with others than the configuration says, and for pickles that were not allowed.
    """
    found: dict[str, StoredTensor] = {}
    for number, projection in sentence.projections.items():
        if projection.weights_file.name != PICKLE_NAME:
            found |= {f"{HEAD}.{number}.{name}": tensor for name, tensor in projection.stored().items()}
        elif not allow_pickle:
            raise BadModel(
                f"{projection.weights_file} is a pickle. Convert it to safetensors, or set allow_pickle: true for this"
                " model if you trust it."
            )
    return found


def fill(module: Any, sentence: SentenceConfig) -> None:
    """Read all weights into ordinary memory, pickles too. Raises BadModel."""
    from safetensors.torch import load_file

    for number, projection in sentence.projections.items():
        path = projection.weights_file
        try:
            is_pickle = path.name == PICKLE_NAME
            weights = torch.load(path, map_location="cpu", weights_only=True) if is_pickle else load_file(path)
            getattr(module, HEAD)[number].load_state_dict(weights)
        except Exception as reason:
            if is_memory(reason):
                raise
            raise BadModel(shortened(f"{path} cannot be read: {type(reason).__name__}: {reason}")) from reason
