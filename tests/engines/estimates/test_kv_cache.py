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


def test_heads_shared_between_queries_are_kept_once() -> None:
    assert gguf_cache(header("llama", **shape())) == (LayerCache(512, 512),) * 4
    assert gguf_cache(header("llama", **shape(attention__head_count_kv=2))) == (LayerCache(128, 128),) * 4


def test_keys_and_values_may_differ_in_length() -> None:
    stated = shape(attention__head_count_kv=2, attention__key_length=96, attention__value_length=64)
    assert gguf_cache(header("llama", **stated))[0] == LayerCache(192, 128)


def test_heads_may_differ_by_layer_and_be_none() -> None:
    cache = gguf_cache(header("llama", **shape(attention__head_count_kv=(1, 0, 2, 8))))
    assert [layer.keys for layer in cache] == [64, 0, 128, 512]


def test_compressed_keys_hold_the_values_too() -> None:
    stated = shape(attention__head_count_kv=1, attention__key_length=576, attention__value_length=512)
    compressed = gguf_cache(
        header("deepseek2", **stated, attention__key_length_mla=192, attention__value_length_mla=128)
    )
    assert compressed == (LayerCache(576, 0),) * 4
    assert gguf_cache(header("deepseek2", **stated)) == (LayerCache(576, 512),) * 4


@pytest.mark.parametrize(
    ("architecture", "pattern", "windows"),
    [
        ("gemma2", None, [1024, 0, 1024, 0]),
        ("gemma3", None, [1024, 1024, 1024, 1024]),
        ("cohere2", None, [1024, 1024, 1024, 0]),
        ("gemma3", 2, [1024, 0, 1024, 0]),
        ("any", (1, 0, 0, 1), [1024, 0, 0, 1024]),
        ("any", (1,), [1024, 0, 0, 0]),
        # Some state a window that the engine does not use.
        ("phi3", None, [0, 0, 0, 0]),
    ],
)
def test_windows_follow_the_pattern(
    architecture: str, pattern: int | tuple[int, ...] | None, windows: list[int]
) -> None:
    stated = shape(attention__sliding_window=1024)
    if pattern is not None:
        stated["attention__sliding_window_pattern"] = pattern
    assert [layer.window for layer in gguf_cache(header(architecture, **stated))] == windows


def test_layers_with_a_window_may_have_other_heads() -> None:
    stated = shape(attention__sliding_window=512, attention__head_count_kv=2, attention__key_length=128)
    cache = gguf_cache(header("gemma2", **stated, attention__key_length_swa=64, attention__value_length_swa=32))
    assert cache[0] == LayerCache(128, 64, 512) and cache[1] == LayerCache(256, 128, 0)


def test_chunks_without_a_key_are_known() -> None:
    assert [layer.window for layer in gguf_cache(header("llama4", **shape()))] == [8192, 8192, 8192, 0]


def test_layers_that_use_the_cache_of_others_have_none() -> None:
    cache = gguf_cache(header("gemma3n", **shape(attention__shared_kv_layers=3)))
    assert [layer.keys for layer in cache] == [512, 0, 0, 0]


def test_hybrids_have_attention_every_few_layers_and_a_state_in_the_others() -> None:
    state = {"ssm__conv_kernel": 4, "ssm__inner_size": 256, "ssm__state_size": 16, "ssm__group_count": 2}
    cache = gguf_cache(header("qwen3next", **shape(attention__head_count_kv=2, **state)))
    kept = 3 * (256 + 2 * 2 * 16) + 16 * 256
    assert [layer.keys for layer in cache] == [0, 0, 0, 128]
    assert [layer.state for layer in cache] == [kept, kept, kept, 0]
    every_second = gguf_cache(header("qwen3next", **shape(full_attention_interval=2, **state)))
    assert [bool(layer.state) for layer in every_second] == [True, False, True, False]


def test_both_in_each_layer_where_heads_are_stated_for_all() -> None:
    state = {"ssm__conv_kernel": 4, "ssm__inner_size": 256, "ssm__state_size": 16}
    cache = gguf_cache(header("falcon-h1", **shape(attention__head_count_kv=2, **state)))
    assert all(layer.keys and layer.state for layer in cache)


def test_layers_of_feed_forward_alone_keep_nothing() -> None:
    state = {"ssm__conv_kernel": 4, "ssm__inner_size": 256, "ssm__state_size": 16}
    stated = shape(attention__head_count_kv=(0, 0, 2, 0), feed_forward_length=(0, 64, 0, 64), **state)
    cache = gguf_cache(header("nemotron_h", **stated))
    assert [(bool(layer.keys), bool(layer.state)) for layer in cache] == [
        (False, True),
        (False, False),
        (True, False),
        (False, False),
    ]


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


def test_encoders_remember_nothing() -> None:
    assert gguf_cache(header("nomic-bert", **shape())) == (LayerCache(),) * 4


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
