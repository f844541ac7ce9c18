"""Folders as Transformers reads them, written with numpy alone: what the gateway's tests know of that format.

Owns the way from llama.cpp's names and order of a Llama's tensors to those of Transformers, and the safetensors format.
Never imports torch: the environment that runs the gateway has none.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
DTYPES = {"float32": "F32", "float16": "F16"}
ALIGNMENT = 8


def llama_name(gguf_name: str) -> str:
    """A tensor's name in Transformers by its name in a GGUF file of a Llama."""
    if gguf_name in WHOLE:
        return WHOLE[gguf_name]
    block, layer, part, kind = gguf_name.split(".")
    assert block == "blk", f"no tensor of a Llama: {gguf_name}"
    return f"model.layers.{layer}.{PARTS[part]}.{kind}"


def halves_apart(matrix: Array, heads: int) -> Array:
    """Rows of queries or keys as Transformers turns them: llama.cpp has the two halves of each pair side by side."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def llama_tensors(of_gguf: Mapping[str, Array], heads: int, kv_heads: int) -> dict[str, Array]:
    """A Llama's tensors by their names in Transformers."""
    turned = {"attn_q": heads, "attn_k": kv_heads}
    return {
        llama_name(name): halves_apart(tensor, turned[part]) if (part := name.split(".")[-2]) in turned else tensor
        for name, tensor in of_gguf.items()
    }


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).data)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def special(id: int, content: str) -> dict[str, Any]:
    """A token of tokenizer.json that no text becomes by chance."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": content, **plain, "special": True}


def write_tokenizer(folder: Path, parts: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """tokenizer.json of these parts and its companion of this configuration."""
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    write_json(folder / "tokenizer.json", {"version": "1.0", **nothing, **parts})
    common = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", {**common, **config})


def bpe(tokens: list[str], merges: list[list[str]], *, byte_fallback: bool) -> dict[str, Any]:
    nothing = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    vocabulary = {token: id for id, token in enumerate(tokens)}
    flags = {"fuse_unk": False, "byte_fallback": byte_fallback, "ignore_merges": False}
    return {"type": "BPE", **nothing, **flags, "vocab": vocabulary, "merges": merges}
