"""How many bytes the tensors of a GGUF file have, by the place each would take: which layer, input or output.

Owns the sizes of tensor types and the sorting by name. Keeps sums only: a hostile file may list any number of tensors.
`gguf_header.py` walks the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

# More layers than any model has; larger numbers are ignored.
LAYERS_MAX: Final = 4_096

# Bytes of a tensor: (elements in a block, bytes of a block) by the number of its type.
# fmt: off
BLOCKS: Final[Mapping[int, tuple[int, int]]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66),
    17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136),
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54),
    35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
}
# fmt: on

_LAYER: Final = re.compile(r"blk\.(\d{1,4})\.")
_EXPERTS: Final = re.compile(r"_exps\b")
_INPUT: Final = re.compile(r"(?:token_embd|per_layer_token_embd|position_embd|token_types)\.")
# The head turns the last state into logits or ranks.
_OUTPUT: Final = re.compile(r"(?:output|cls|score|rope_freqs)\b|output_norm|cls_")


@dataclass(slots=True)
class WeightBytes:
    """Bytes by place, counted over all files of a split model."""

    # By the number of the block.
    dense: dict[int, int] = field(default_factory=dict)
    experts: dict[int, int] = field(default_factory=dict)
    input_bytes: int = 0
    output_bytes: int = 0
    other_bytes: int = 0
    # The embedding table, which is also the head if there is no other.
    embedding_bytes: int = 0
    has_head: bool = False
    vocabulary: int = 0
    # Numbers in all tensors of known types.
    elements: int = 0

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """The dense part and the experts of each block."""
        count = max((*self.dense, *self.experts), default=-1) + 1
        return tuple((self.dense.get(layer, 0), self.experts.get(layer, 0)) for layer in range(count))

    @property
    def total_bytes(self) -> int:
        return sum(map(sum, self.layers)) + self.input_bytes + self.output_bytes + self.other_bytes

    def add(self, name: str, shape: Sequence[int], size_bytes: int) -> None:
        # A tensor of an unknown type has no size that could bound its shape.
        self.elements += math.prod(shape) if size_bytes else 0
        if match := _LAYER.match(name):
            into = self.experts if _EXPERTS.search(name) else self.dense
            layer = min(int(match[1]), LAYERS_MAX - 1)
            into[layer] = into.get(layer, 0) + size_bytes
        elif _INPUT.match(name):
            self.input_bytes += size_bytes
            if name == "token_embd.weight":
                self.embedding_bytes, self.vocabulary = size_bytes, shape[-1] if len(shape) > 1 else 0
        elif _OUTPUT.match(name):
            self.output_bytes += size_bytes
            self.has_head = self.has_head or name == "output.weight"
        else:
            self.other_bytes += size_bytes


def tensor_bytes(elements: int, kind: int) -> int:
    """A type newer than the table counts as nothing: the next tensor's place still tells where it ends."""
    block, block_bytes = BLOCKS.get(kind, (1, 0))
    return elements // block * block_bytes
