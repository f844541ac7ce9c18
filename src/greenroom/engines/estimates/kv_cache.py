"""The size of the KV cache of attention layers and of the state of recurrent layers.

Owns the arithmetic, which is exact where a file states its shape: heads shared between queries, heads that differ by
layer, sliding windows, compressed keys (MLA), layers without attention, quantised numbers, and cells that sequences
share or divide. Reads no files: `gguf_cache` takes a header.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from greenroom.engines.estimates.gguf_header import ENCODERS, GgufHeader
from greenroom.engines.estimates.gguf_tensors import LAYERS_MAX

# Bytes of one number, scales of its block included.
# fmt: off
TYPE_BYTES: Final[Mapping[str, Fraction]] = {
    "f32": Fraction(4), "f16": Fraction(2), "bf16": Fraction(2), "q8_0": Fraction(34, 32), "q5_1": Fraction(24, 32),
    "q5_0": Fraction(22, 32), "q4_1": Fraction(20, 32), "q4_0": Fraction(18, 32), "iq4_nl": Fraction(18, 32),
}
# fmt: on
# Cells come in whole blocks of this many.
CELLS_BLOCK: Final = 256
# States of recurrent layers are kept at full precision.
STATE_BYTES: Final = 4
# Of this many layers the last attends to the whole text and the others to a window, if the file does not say.
# fmt: off
WINDOW_PATTERNS: Final[Mapping[str, int]] = {
    "gemma2": 2, "gpt-oss": 2, "llama4": 4, "cohere2": 4, "exaone4": 4, "exaone-moe": 4, "olmo2": 4,
    "smallthinker": 4, "afmoe": 4, "gemma3n": 5, "gemma3": 6,
}
# fmt: on
# Llama 4 attends in chunks of this length, which no key states.
CHUNKS: Final[Mapping[str, int]] = {"llama4": 8_192}
# Of this many layers only the last has attention, if the file does not say.
INTERVALS: Final[Mapping[str, int]] = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
# Its layers without attention are recurrent only if they have no feed-forward part either.
_MIXED: Final = "nemotron_h"


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps: numbers of keys and values per token, its window (0: the whole text), and a state."""

    keys: int = 0
    values: int = 0
    window: int = 0
    state: int = 0


@dataclass(frozen=True, slots=True)
class Cells:
    """The number of tokens kept. Sequences share the cells if `unified`; otherwise each has a part."""

    context: int
    sequences: int = 1
    unified: bool = True
    batch: int = 512
    # Windows are kept at full context length, so that a text can be resumed anywhere.
    windows_whole: bool = False

    def of(self, window: int) -> int:
        streams = 1 if self.unified else max(1, self.sequences)
        whole = padded(self.context // streams)
        if not window or self.windows_whole:
            return whole * streams
        within = window * (self.sequences if self.unified else 1) + self.batch
        return min(whole, padded(within)) * streams


def padded(cells: int) -> int:
    return -(-cells // CELLS_BLOCK) * CELLS_BLOCK


def attention_bytes(layer: LayerCache, cells: Cells, type_k: str, type_v: str) -> int:
    a_cell = layer.keys * TYPE_BYTES[type_k] + layer.values * TYPE_BYTES[type_v]
    return int(a_cell * cells.of(layer.window))


def state_bytes(layer: LayerCache, sequences: int) -> int:
    return layer.state * STATE_BYTES * max(1, sequences)


# --- as GGUF files say it -------------------------------------------------------------------------------------------


def gguf_cache(header: GgufHeader) -> tuple[LayerCache, ...]:
    """The cache of each layer. Encoders keep none."""
    count = min(header.number("block_count"), LAYERS_MAX)
    if ENCODERS.search(header.architecture):
        return (LayerCache(),) * count
    windows, heads, states = _windows(header, count), _kv_heads(header, count), _states(header, count)
    widths = _widths(header, "")
    # Layers with a window may have another head size.
    widths_windowed = _widths(header, "_swa", *widths)
    layers = []
    for number in range(count):
        keys, values = widths_windowed if windows[number] else widths
        layers.append(LayerCache(heads[number] * keys, heads[number] * values, windows[number], states[number]))
    return tuple(layers)


def _widths(header: GgufHeader, suffix: str, keys: int = 0, values: int = 0) -> tuple[int, int]:
    heads = header.number("attention.head_count")
    size = header.number("embedding_length") // heads if heads else 0
    found = header.number(f"attention.key_length{suffix}", keys or size)
    # Compressed keys (MLA) contain the values too.
    is_compressed = header.number("attention.key_length_mla") and header.number("attention.value_length_mla")
    return found, 0 if is_compressed else header.number(f"attention.value_length{suffix}", values or size)


def _kv_heads(header: GgufHeader, count: int) -> list[int]:
    heads = list(header.per_layer("attention.head_count_kv", count, header.number("attention.head_count")))
    # The last layers may share the cache of earlier ones.
    own = count - min(count, header.number("attention.shared_kv_layers"))
    interval = _interval(header)
    for number in range(count):
        if number >= own or (interval and (number + 1) % interval):
            heads[number] = 0
    return heads


def _windows(header: GgufHeader, count: int) -> list[int]:
    architecture = header.architecture
    window = header.number("attention.sliding_window", CHUNKS.get(architecture, 0))
    stated = header.numbers.get("attention.sliding_window_pattern", WINDOW_PATTERNS.get(architecture, 0))
    if isinstance(stated, tuple):
        flags = (*stated, *(0,) * count)[:count]
        return [window if flag else 0 for flag in flags]
    # A window without a known pattern: assume the whole text.
    return [window if stated > 0 and number % stated < stated - 1 else 0 for number in range(count)]


def _interval(header: GgufHeader) -> int:
    return header.number("full_attention_interval", INTERVALS.get(header.architecture, 0))


def _states(header: GgufHeader, count: int) -> list[int]:
    state = _state(header)
    if not state:
        return [0] * count
    if interval := _interval(header):
        return [state if (number + 1) % interval else 0 for number in range(count)]
    heads = header.per_layer("attention.head_count_kv", count)
    feed = header.per_layer("feed_forward_length", count) if header.architecture.startswith(_MIXED) else (0,) * count
    # One number of heads for all layers and a state: each layer has both.
    both = isinstance(header.numbers.get("attention.head_count_kv"), int)
    return [state if both or not (heads[number] or feed[number]) else 0 for number in range(count)]


def _state(header: GgufHeader) -> int:
    """Numbers that one recurrent layer keeps for a sequence: the tail of its convolution, and its state."""
    number, width = header.number, header.number("embedding_length")
    back = max(0, number("ssm.conv_kernel") - 1)
    if inner := number("ssm.inner_size"):
        size, groups = number("ssm.state_size"), number("ssm.group_count")
        return back * (inner + 2 * groups * size) + size * inner
    if look := number("shortconv.l_cache"):
        return (look - 1) * width
    if head := number("wkv.head_size"):
        return number("token_shift_count", 2) * width + head * width
    if head := number("kda.head_dim"):
        inner = number("attention.head_count") * head
        return 3 * back * inner + head * inner
    return 0
