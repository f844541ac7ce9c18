"""What the loaded weights can take: which token ids, which of them may be chosen, how many in a row.

Owns reading this from the tables of the module, whatever its configuration and its tokenizer say. An index beyond a
table is an error of the device on CUDA, and costs the process and all models in it. Never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .model_shape import text_config

# Where nothing says how many there are: what an index can be.
UNKNOWN = 2**63 - 1
# Tables beside that of the tokens: one of positions, and one that is read with the tokens again.
_POSITIONS = re.compile(r"(embed_)?pos|wpe$")
_PER_LAYER = "per_layer"


@dataclass(frozen=True, slots=True)
class Limits:
    tokens: int = UNKNOWN
    """Ids below this have a row in every table that is read with them."""
    choices: int = UNKNOWN
    """Ids below this can be chosen: they have a score, and can be read again afterwards."""
    positions: int | None = None
    """Tokens of the longest sequence. None: no table says so."""

    def unknown(self, tokens: Iterable[int]) -> int | None:
        """The largest of these, if it has no row."""
        largest = max(tokens, default=0)
        return largest if largest >= self.tokens else None


def limits_of(module: Any) -> Limits:
    """The limits of a model, by the tables it has."""
    vocabulary = getattr(text_config(module.config), "vocab_size", None) if hasattr(module, "config") else None
    said = vocabulary if isinstance(vocabulary, int) and vocabulary > 0 else UNKNOWN
    table = _asked(module, "get_input_embeddings")
    tables = _tables_beside(module, table)
    per_layer = [rows for name, one in tables.items() if _PER_LAYER in name and (rows := _rows(one))]
    positions = [_places(one) for name, one in tables.items() if _POSITIONS.match(name)]
    tokens = min([_rows(table) or said, *per_layer])
    head = _rows(_asked(module, "get_output_embeddings")) or said
    return Limits(tokens, min(tokens, head), min(positions, default=None))


def _asked(module: Any, method: str) -> Any:
    """A part of the model by the method that knows it; code that comes with a model may have none."""
    try:
        return getattr(module, method)()
    except (AttributeError, NotImplementedError):
        return None


def _tables_beside(module: Any, table: Any) -> dict[str, Any]:
    """The tables that lie where that of the tokens does: those of the text, and not of pictures or sounds."""
    for owner in module.modules():
        parts = dict(owner.named_children())
        if table is not None and any(part is table for part in parts.values()):
            return {name: part for name, part in parts.items() if part is not table and _is_table(part)}
    return {}


def _is_table(part: Any) -> bool:
    """It has rows that are looked up. A projection has as many rows as it gives numbers."""
    return _rows(part) is not None and not hasattr(part, "out_features")


def _rows(table: Any) -> int | None:
    weight = getattr(table, "weight", None)
    if weight is not None and weight.is_floating_point() and weight.dim() == 2:
        return int(weight.shape[0])
    # Weights that are packed have another shape than what they stand for.
    return getattr(table, "num_embeddings", None) or getattr(table, "out_features", None)


def _places(table: Any) -> int:
    """Positions of a table: some begin after a fixed number of rows, or after the row of the padding."""
    padding = getattr(table, "padding_idx", None)
    before = getattr(table, "offset", None) or (0 if padding is None else padding + 1)
    return (_rows(table) or UNKNOWN) - int(before)
