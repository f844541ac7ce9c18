"""Small models of many shapes, made by code, for what is estimated about them to be compared with a real engine.

Their numbers are random: they answer nonsense, and take the memory that a sensible model of their shape would take.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.samples import tiny_llm
from tests.samples.tiny_llm import Array

TOKENS = tiny_llm.SPECIALS + [f"<0x{byte:02X}>" for byte in range(256)]
_random = np.random.default_rng(0)


def windowed(path: Path, *, layers: int = 12, hidden: int = 128, window: int = 512) -> Path:
    """A Gemma 3: five of six layers look through a window; the head is the table of embeddings."""
    head = hidden // 4
    writer = tiny_llm.gguf_writer(path, "gemma3", "windowed", hidden=hidden, layers=layers, heads=4)
    writer.add_head_count_kv(2)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(window)
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    block = {f"{norm}.weight": _ones(hidden) for norm in norms} | _attention(hidden, head, 2) | _feed_forward(hidden)
    block |= {f"{norm}.weight": _ones(head) for norm in ("attn_q_norm", "attn_k_norm")}
    return _written(path, writer, hidden, [block] * layers)


def compressed(path: Path, *, layers: int = 3, hidden: int = 128, rank: int = 64, rope: int = 16) -> Path:
    """A DeepSeek 2: keys and values are kept as one short vector (MLA)."""
    heads, plain, value, query = 4, 32, 32, 32
    writer = tiny_llm.gguf_writer(path, "deepseek2", "compressed", hidden=hidden, layers=layers, heads=heads)
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(plain + rope)
    writer.add_value_length_mla(value)
    writer.add_kv_lora_rank(rank)
    writer.add_q_lora_rank(query)
    writer.add_rope_dimension_count(rope)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_leading_dense_block_count(layers)
    writer.add_vocab_size(len(TOKENS))
    writer.add_expert_feed_forward_length(32)
    writer.add_expert_shared_count(0)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    block = _feed_forward(hidden) | {
        "attn_norm.weight": _ones(hidden),
        "ffn_norm.weight": _ones(hidden),
        "attn_q_a.weight": _matrix(query, hidden),
        "attn_q_a_norm.weight": _ones(query),
        "attn_q_b.weight": _matrix(heads * (plain + rope), query),
        "attn_kv_a_mqa.weight": _matrix(rank + rope, hidden),
        "attn_kv_a_norm.weight": _ones(rank),
        "attn_k_b.weight": _matrix(heads, rank, plain),
        "attn_v_b.weight": _matrix(heads, value, rank),
        "attn_output.weight": _matrix(hidden, heads * value),
    }
    return _written(path, writer, hidden, [block] * layers, head=True)


def hybrid(path: Path, *, kv_heads: Iterable[int] = (0, 2, 0, 2), hidden: int = 64) -> Path:
    """A Jamba: layers with attention between recurrent ones."""
    heads = list(kv_heads)
    writer = tiny_llm.gguf_writer(path, "jamba", "hybrid", hidden=hidden, layers=len(heads), heads=4)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    _state_keys(writer, hidden)
    norms = {f"{norm}.weight": _ones(hidden) for norm in ("attn_norm", "ffn_norm")} | _feed_forward(hidden)
    names = {"ssm_dt_norm.weight": _ones(8), "ssm_b_norm.weight": _ones(16), "ssm_c_norm.weight": _ones(16)}
    recurrent = norms | _recurrent(hidden) | names
    blocks = [norms | _attention(hidden, hidden // 4, count) if count else recurrent for count in heads]
    return _written(path, writer, hidden, blocks)


def recurrent(path: Path, *, layers: int = 3, hidden: int = 64) -> Path:
    """A Mamba: no attention at all."""
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_name("recurrent")
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    _state_keys(writer, hidden)
    return _written(path, writer, hidden, [{"attn_norm.weight": _ones(hidden)} | _recurrent(hidden)] * layers)


def _state_keys(writer: Any, hidden: int) -> None:
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(2 * hidden)
    writer.add_ssm_state_size(16)
    writer.add_ssm_time_step_rank(8)


def _attention(hidden: int, head: int, kv_heads: int) -> dict[str, Array]:
    return {
        "attn_q.weight": _matrix(hidden, hidden),
        "attn_k.weight": _matrix(kv_heads * head, hidden),
        "attn_v.weight": _matrix(kv_heads * head, hidden),
        "attn_output.weight": _matrix(hidden, hidden),
    }


def _feed_forward(hidden: int) -> dict[str, Array]:
    wide = {f"ffn_{part}.weight": _matrix(2 * hidden, hidden) for part in ("gate", "up")}
    return wide | {"ffn_down.weight": _matrix(hidden, 2 * hidden)}


def _recurrent(hidden: int) -> dict[str, Array]:
    inner, state, steps = 2 * hidden, 16, 8
    return {
        "ssm_in.weight": _matrix(2 * inner, hidden),
        "ssm_conv1d.weight": _matrix(inner, 4),
        "ssm_conv1d.bias": _ones(inner),
        "ssm_x.weight": _matrix(steps + 2 * state, inner),
        "ssm_dt.weight": _matrix(inner, steps),
        "ssm_dt.bias": _ones(inner),
        "ssm_a": -np.ones((inner, state), np.float32),
        "ssm_d": _ones(inner),
        "ssm_out.weight": _matrix(hidden, inner),
    }


def _matrix(*shape: int) -> Array:
    return _random.standard_normal(shape, np.float32) * np.float32(0.02)


def _ones(size: int) -> Array:
    return np.ones(size, np.float32)


def _written(path: Path, writer: Any, hidden: int, blocks: list[dict[str, Array]], *, head: bool = False) -> Path:
    tiny_llm.add_sentencepiece(writer, TOKENS)
    tensors = {"token_embd.weight": _matrix(len(TOKENS), hidden), "output_norm.weight": _ones(hidden)}
    if head:
        tensors["output.weight"] = _matrix(len(TOKENS), hidden)
    tensors |= {f"blk.{number}.{name}": tensor for number, block in enumerate(blocks) for name, tensor in block.items()}
    exact = tuple(name for name in tensors if "ssm_a" in name or "conv1d" in name)
    tiny_llm.write_gguf(writer, tensors, exact=exact)
    return path
