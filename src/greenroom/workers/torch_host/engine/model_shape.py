"""The pages of a model's KV memory: how large they are, which are free, which a sequence holds.

Owns the arithmetic of KV memory and the list of free blocks. Never touches the memory itself (attention does) and never
imports torch, so that the size can be known before anything is allocated. Read `kv_bytes` first, then `Blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..failures import BadModel

# Tokens a block holds: small enough to waste little at a sequence's end, large enough to keep tables short.
BLOCK_TOKENS = 16
# The first block belongs to nobody. Rows that only fill up a batch write there, and nobody reads it.
SCRATCH_BLOCK = 0
# What each store is aligned to, so that any kernel may load it in its widest pieces.
STORE_ALIGN = 512

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
# Kinds of layer that keep keys and values of every token and nothing else.
PAGED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
# What says how much a token leaves behind in a layer.
_WIDTHS = frozenset({"head_dim", "num_attention_heads", "num_key_value_heads", "hidden_size"})


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one token leaves behind in one layer."""

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
    """One shape per layer. Raises BadModel for a model that keeps something else than keys and values."""
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
    """Latent attention as Transformers computes it: keys and values are kept unfolded, one per query head."""
    return LayerShape(
        int(text.num_attention_heads),
        int(text.qk_nope_head_dim) + int(text.qk_rope_head_dim),
        int(text.v_head_dim),
    )


def item_bytes(dtype: Any) -> int:
    """Bytes of one number; takes torch's dtype or its name."""
    size = getattr(dtype, "itemsize", None)
    return int(size) if size is not None else ITEM_BYTES[str(dtype).removeprefix("torch.")]


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def slots_for(cache_tokens: int) -> int:
    """Places for tokens in each store, the scratch block included."""
    return (blocks_for(cache_tokens) + 1) * BLOCK_TOKENS


def store_bytes(numbers_per_token: int, item: int, cache_tokens: int) -> int:
    exact = slots_for(cache_tokens) * numbers_per_token * item
    return -(-exact // STORE_ALIGN) * STORE_ALIGN


def kv_bytes(config: Any, dtype: Any, cache_tokens: int) -> int:
    """Bytes of KV memory that hold this many tokens, scratch and alignment included."""
    item = item_bytes(dtype)
    return sum(
        store_bytes(shape.kv_heads * shape.key_dim, item, cache_tokens)
        + store_bytes(shape.kv_heads * shape.value_dim, item, cache_tokens)
        for shape in layer_shapes(config)
    )


class Blocks:
    """The free blocks of one KV memory. Taken and given back by number; the number is all there is to a block."""

    def __init__(self, cache_tokens: int) -> None:
        self.total = blocks_for(cache_tokens)
        self._free: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Everything is free again: the memory was dropped."""
        # Low numbers come first, so that a lone sequence lies in order in memory.
        self._free = list(range(self.total, SCRATCH_BLOCK, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """This many blocks. The caller has looked at `free`."""
        if count > len(self._free):
            raise AssertionError(f"{count} blocks were asked for, {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give(self, blocks: Sequence[int]) -> None:
        self._free.extend(reversed(blocks))
