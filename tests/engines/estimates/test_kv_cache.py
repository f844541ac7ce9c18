"""The arithmetic of what models remember, for shapes that are not run here, by hand."""

from __future__ import annotations

from typing import get_args

import pytest

from greenroom.config.schema import CacheType
from greenroom.engines.estimates.gguf_header import GgufHeader
from greenroom.engines.estimates.gguf_tensors import WeightBytes
from greenroom.engines.estimates.kv_cache import (
    TYPE_BYTES,
    Cells,
    LayerCache,
    attention_bytes,
    gguf_cache,
    padded,
    state_bytes,
)


def header(architecture: str, **numbers: int | tuple[int, ...]) -> GgufHeader:
    said = {name.replace("__", "."): value for name, value in numbers.items()}
    return GgufHeader(architecture, "", 4096, None, 0, 1, False, False, WeightBytes(), said)


def shape(**more: int | tuple[int, ...]) -> dict[str, int | tuple[int, ...]]:
    return {"block_count": 4, "embedding_length": 512, "attention__head_count": 8, **more}


def windows(*sizes: int) -> list[LayerCache]:
    return [LayerCache(512, 512, size) for size in sizes]


def windowed(**pattern: int | tuple[int, ...]) -> dict[str, int | tuple[int, ...]]:
    return shape(attention__sliding_window=1024, **pattern)


STATE = {"ssm__conv_kernel": 4, "ssm__inner_size": 256, "ssm__state_size": 16}
KEPT = 3 * (256 + 2 * 2 * 16) + 16 * 256
KEPT_ALONE = 3 * 256 + 16 * 256
LATENT = shape(attention__head_count_kv=1, attention__key_length=576, attention__value_length=512)
NONE = LayerCache()
SHAPES: dict[str, tuple[str, dict[str, int | tuple[int, ...]], list[LayerCache]]] = {
    "each head": ("llama", shape(), windows(0, 0, 0, 0)),
    "heads shared between queries are kept once": (
        "llama",
        shape(attention__head_count_kv=2),
        [LayerCache(128, 128)] * 4,
    ),
    "keys and values differ in length": (
        "llama",
        shape(attention__head_count_kv=2, attention__key_length=96, attention__value_length=64),
        [LayerCache(192, 128)] * 4,
    ),
    "heads differ by layer and may be none": (
        "llama",
        shape(attention__head_count_kv=(1, 0, 2, 8)),
        [LayerCache(64, 64), NONE, LayerCache(128, 128), LayerCache(512, 512)],
    ),
    "compressed keys hold the values too": (
        "deepseek2",
        {**LATENT, "attention__key_length_mla": 192, "attention__value_length_mla": 128},
        [LayerCache(576, 0)] * 4,
    ),
    "not compressed": ("deepseek2", LATENT, [LayerCache(576, 512)] * 4),
    "windows of gemma2": ("gemma2", windowed(), windows(1024, 0, 1024, 0)),
    "windows of gemma3": ("gemma3", windowed(), windows(1024, 1024, 1024, 1024)),
    "windows of cohere2": ("cohere2", windowed(), windows(1024, 1024, 1024, 0)),
    "every second": ("gemma3", windowed(attention__sliding_window_pattern=2), windows(1024, 0, 1024, 0)),
    "by layer": ("any", windowed(attention__sliding_window_pattern=(1, 0, 0, 1)), windows(1024, 0, 0, 1024)),
    "of the first layers": ("any", windowed(attention__sliding_window_pattern=(1,)), windows(1024, 0, 0, 0)),
    "a window that the engine does not use": ("phi3", windowed(), windows(0, 0, 0, 0)),
    "layers with a window have other heads": (
        "gemma2",
        {
            **shape(attention__sliding_window=512, attention__head_count_kv=2, attention__key_length=128),
            "attention__key_length_swa": 64,
            "attention__value_length_swa": 32,
        },
        [LayerCache(128, 64, 512), LayerCache(256, 128, 0)] * 2,
    ),
    "chunks without a key": ("llama4", shape(), windows(8192, 8192, 8192, 0)),
    "layers that use the cache of others": (
        "gemma3n",
        shape(attention__shared_kv_layers=3),
        [LayerCache(512, 512), NONE, NONE, NONE],
    ),
    "hybrids have attention every few layers and a state in the others": (
        "qwen3next",
        shape(attention__head_count_kv=2, ssm__group_count=2, **STATE),
        [*[LayerCache(state=KEPT)] * 3, LayerCache(128, 128)],
    ),
    "attention in every second layer": (
        "qwen3next",
        shape(full_attention_interval=2, ssm__group_count=2, **STATE),
        [LayerCache(state=KEPT), LayerCache(512, 512)] * 2,
    ),
    "both in each layer where heads are stated for all": (
        "falcon-h1",
        shape(attention__head_count_kv=2, **STATE),
        [LayerCache(128, 128, state=KEPT_ALONE)] * 4,
    ),
    "layers of feed forward alone": (
        "nemotron_h",
        shape(attention__head_count_kv=(0, 0, 2, 0), feed_forward_length=(0, 64, 0, 64), **STATE),
        [LayerCache(state=KEPT_ALONE), NONE, LayerCache(128, 128), NONE],
    ),
    "encoders": ("nomic-bert", shape(), [NONE] * 4),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_keeps_what_its_shape_says(name: str) -> None:
    architecture, stated, layers = SHAPES[name]
    assert list(gguf_cache(header(architecture, **stated))) == layers


@pytest.mark.parametrize(
    ("stated", "state"),
    [
        ({"shortconv__l_cache": 3}, 2 * 512),
        ({"wkv__head_size": 64, "token_shift_count": 2}, 2 * 512 + 64 * 512),
        ({"kda__head_dim": 32, "ssm__conv_kernel": 4}, 3 * 3 * 8 * 32 + 32 * 8 * 32),
    ],
)
def test_other_recurrent_layers_keep_their_own_state(stated: dict[str, int], state: int) -> None:
    cache = gguf_cache(header("other", **shape(attention__head_count_kv=(0, 0, 0, 1), **stated)))
    assert [layer.state for layer in cache] == [state, state, state, 0]
    assert state_bytes(cache[0], 3) == state * 4 * 3


def test_numbers_that_no_model_has_are_bounded() -> None:
    cache = gguf_cache(header("llama", block_count=2**39, attention__head_count=0, embedding_length=2**39))
    assert len(cache) == 4096 and cache[0] == LayerCache()


def test_cells_come_in_blocks_and_are_shared_or_divided() -> None:
    assert padded(1) == padded(256) == 256 and padded(257) == 512 and padded(0) == 0
    assert Cells(4000).of(0) == 4096
    assert Cells(1000, sequences=3, unified=False).of(0) == 3 * 512
    # A shared window holds what each sequence looks back at, and a batch.
    assert Cells(8192, sequences=2, batch=512).of(512) == 1536
    assert Cells(8192, sequences=4, unified=False, batch=512).of(512) == 4 * 1024
    assert Cells(1024, sequences=2, batch=512).of(4096) == 1024
    assert Cells(8192, windows_whole=True).of(512) == 8192


def test_quantised_numbers_take_their_scales_with_them() -> None:
    layer, cells = LayerCache(keys=1024, values=512), Cells(256)
    assert attention_bytes(layer, cells, "f16", "f16") == 256 * (1024 + 512) * 2
    assert attention_bytes(layer, cells, "q8_0", "q4_0") == 256 * (1024 * 34 // 32 + 512 * 18 // 32)
    assert attention_bytes(layer, cells, "f32", "bf16") == 256 * (1024 * 4 + 512 * 2)


def test_every_type_of_the_configuration_is_known() -> None:
    assert set(get_args(CacheType)) == set(TYPE_BYTES)
