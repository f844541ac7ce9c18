"""What a model's configuration and tables say about sizes: bytes of KV memory, known token ids, the longest sequence.

Owns the arithmetic of paged KV memory, and the limits read from the module's tables, whatever its configuration and its
tokenizer say: on CUDA an index beyond a table costs the process and all models in it. Never touches memory and never
imports torch, so sizes are known before anything is allocated. Read `kv_bytes` and `token_limits` first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..failures import BadModel

# Tokens per block: small enough to waste little at a sequence's end, large enough to keep tables short.
BLOCK_TOKENS = 16
# The first block is never given to a sequence. Unused rows of a batch write there; it is never read.
SCRATCH_BLOCK = 0
# Alignment of each layer's keys and values, so kernels can use their widest loads.
STORE_ALIGN = 512

# Kinds of layer whose only state is the keys and values of every token.
PAGED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
# Attributes that determine the bytes per token of a layer.
_WIDTHS = frozenset({"head_dim", "num_attention_heads", "num_key_value_heads", "hidden_size"})
# The limit where nothing states one: the largest index.
UNKNOWN = 2**63 - 1
# Names of other tables: positions, and embeddings that are looked up by token id in every layer.
_POSITIONS = re.compile(r"(embed_)?pos|wpe$")
_PER_LAYER = "per_layer"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one token in one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the language model."""
    get = getattr(config, "get_text_config", None)
    return config if get is None else get()


def layer_shapes(config: Any) -> tuple[LayerShape, ...]:
    """One shape per layer. Raises BadModel for a model with other state than keys and values."""
    text = text_config(config)
    _refuse_what_does_not_page(text)
    if getattr(text, "kv_lora_rank", None) and getattr(text, "qk_nope_head_dim", None):
        shape = _latent_shape(text)
    else:
        shape = _plain_shape(text)
    return (shape,) * int(text.num_hidden_layers)


def _refuse_what_does_not_page(text: Any) -> None:
    name = getattr(text, "model_type", "this model")
    if getattr(text, "is_encoder_decoder", False):
        raise BadModel(f"{name} is an encoder-decoder model; only decoders can be served from paged KV memory.")
    odd = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - PAGED_LAYERS)
    if odd:
        raise BadModel(f"{name} has layers of kind {', '.join(odd)}, whose state does not fit paged KV memory.")
    if getattr(text, "num_kv_shared_layers", 0):
        raise BadModel(f"{name} shares keys and values between layers, which paged KV memory does not know.")
    if _WIDTHS & set(getattr(text, "per_layer_attributes", None) or ()):
        raise BadModel(f"{name} has layers of different widths, which paged KV memory does not know.")
    for needed in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if not isinstance(getattr(text, needed, None), int):
            raise BadModel(f"{name} does not say {needed} in its configuration: it has no attention to page.")


def _plain_shape(text: Any) -> LayerShape:
    heads = int(text.num_attention_heads)
    kv_heads = getattr(text, "num_key_value_heads", None)
    dim = getattr(text, "head_dim", None) or int(text.hidden_size) // heads
    if getattr(text, "multi_query", False):
        kv_heads = 1
    if not isinstance(kv_heads, int | None):
        raise BadModel(f"{text.model_type} has layers of different widths, which paged KV memory does not know.")
    return LayerShape(kv_heads or heads, int(dim), int(dim))


def _latent_shape(text: Any) -> LayerShape:
    """Latent attention as Transformers computes it: expanded keys and values, one per query head."""
    return LayerShape(
        int(text.num_attention_heads),
        int(text.qk_nope_head_dim) + int(text.qk_rope_head_dim),
        int(text.v_head_dim),
    )


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def slots_for(cache_tokens: int) -> int:
    """Slots for tokens in each layer, the scratch block included."""
    return (blocks_for(cache_tokens) + 1) * BLOCK_TOKENS


def store_bytes(numbers_per_token: int, item: int, cache_tokens: int) -> int:
    exact = slots_for(cache_tokens) * numbers_per_token * item
    return -(-exact // STORE_ALIGN) * STORE_ALIGN


def kv_bytes(config: Any, item: int, cache_tokens: int) -> int:
    """Bytes of KV memory that hold this many tokens of numbers of `item` bytes, scratch and alignment included."""
    return sum(
        store_bytes(shape.kv_heads * shape.key_dim, item, cache_tokens)
        + store_bytes(shape.kv_heads * shape.value_dim, item, cache_tokens)
        for shape in layer_shapes(config)
    )


@dataclass(frozen=True, slots=True)
class TokenLimits:
    tokens: int = UNKNOWN
    """Ids below this have a row in every table they are looked up in."""
    choices: int = UNKNOWN
    """Ids below this can be sampled: they have a score, and can be an input afterwards."""
    positions: int | None = None
    """Tokens of the longest sequence. None: no table limits it."""

    def unknown(self, tokens: Iterable[int]) -> int | None:
        """The largest of these ids if it has no row, else None."""
        largest = max(tokens, default=0)
        return largest if largest >= self.tokens else None


def token_limits(module: Any) -> TokenLimits:
    """The limits of a model, read from its tables."""
    vocabulary = getattr(text_config(module.config), "vocab_size", None) if hasattr(module, "config") else None
    vocabulary_size = vocabulary if isinstance(vocabulary, int) and vocabulary > 0 else UNKNOWN
    table = _part_by(module, "get_input_embeddings")
    tables = _tables_beside(module, table)
    per_layer = [rows for name, one in tables.items() if _PER_LAYER in name and (rows := _rows(one))]
    positions = [_positions_of(one) for name, one in tables.items() if _POSITIONS.match(name)]
    tokens = min([_rows(table) or vocabulary_size, *per_layer])
    head = _rows(_part_by(module, "get_output_embeddings")) or vocabulary_size
    return TokenLimits(tokens, min(tokens, head), min(positions, default=None))


def _part_by(module: Any, method: str) -> Any:
    """The result of this method; None where the model's own code does not have it."""
    try:
        return getattr(module, method)()
    except (AttributeError, NotImplementedError):
        return None


def _tables_beside(module: Any, table: Any) -> dict[str, Any]:
    """The tables in the same module as the token embedding: those of text, not of images or audio."""
    for owner in module.modules():
        parts = dict(owner.named_children())
        if table is not None and any(part is table for part in parts.values()):
            return {name: part for name, part in parts.items() if part is not table and _is_table(part)}
    return {}


def _is_table(part: Any) -> bool:
    """True for a lookup table, false for a projection, which also has a two-dimensional weight."""
    return _rows(part) is not None and not hasattr(part, "out_features")


def _rows(table: Any) -> int | None:
    weight = getattr(table, "weight", None)
    if weight is not None and weight.is_floating_point() and weight.dim() == 2:
        return int(weight.shape[0])
    # Packed weights have another shape than the table they represent.
    return getattr(table, "num_embeddings", None) or getattr(table, "out_features", None)


def _positions_of(table: Any) -> int:
    """Usable positions of a table: some begin after an offset, or after the padding row."""
    padding = getattr(table, "padding_idx", None)
    before = getattr(table, "offset", None) or (0 if padding is None else padding + 1)
    return (_rows(table) or UNKNOWN) - int(before)
