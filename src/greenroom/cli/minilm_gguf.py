"""MiniLM as GGUF: `python -m greenroom.cli.minilm_gguf SOURCE OUT`, run as a child process.

Owns the translation of a BERT sentence encoder (config.json, vocab.txt, model.safetensors in SOURCE) into the file
llama.cpp loads, at 16 bits. It is a program of its own because it needs numpy and gguf, which the gateway must not
import. Never downloads anything, and writes OUT only: its caller makes that atomic.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

NOT_INSTALLED: Final = 3
# The tensor table of a model of a hundred tensors is some 10 KB.
TABLE_MAX_BYTES: Final = 2**20
SPECIAL_TOKENS: Final = {"[PAD]": "pad", "[UNK]": "unk", "[CLS]": "bos", "[SEP]": "eos", "[MASK]": "mask"}
NORMAL_TOKEN, CONTROL_TOKEN = 1, 3
MEAN_POOLING, MOSTLY_F16 = 1, 1

# The encoder's parts and their names in a GGUF.
OUTER: Final = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
INNER: Final = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
LAYER: Final = "encoder.layer."
# llama.cpp adds these to 32-bit numbers and requires 32 bits.
KEPT_AT_32_BITS: Final = frozenset({"position_embd", "token_types"})


def gguf_name(name: str) -> str | None:
    """The tensor's name in a GGUF; None for those that sentence embeddings do not use (pooler, position ids)."""
    part, _, kind = name.rpartition(".")
    if part in OUTER:
        return f"{OUTER[part]}.{kind}"
    if not part.startswith(LAYER):
        return None
    layer, _, inner = part.removeprefix(LAYER).partition(".")
    return f"blk.{layer}.{INNER[inner]}.{kind}"


def gguf_tokens(vocabulary: str, size: int) -> list[str]:
    """The vocabulary as llama.cpp spells it: word beginnings are marked, not word continuations."""

    def spelled(token: str) -> str:
        if token in SPECIAL_TOKENS:
            return token
        return token.removeprefix("##") if token.startswith("##") else "\u2581" + token

    tokens = [spelled(token) for token in vocabulary.split("\n")[:size]]
    if len(tokens) < size or not set(SPECIAL_TOKENS) <= set(tokens):
        raise ValueError(f"vocab.txt has {len(tokens)} tokens of {size}, or lacks one of {', '.join(SPECIAL_TOKENS)}")
    return tokens


def tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """The 32-bit tensors of a safetensors file, one at a time."""
    import numpy as np

    with path.open("rb") as file:
        (table_bytes,) = struct.unpack("<Q", file.read(8))
        if table_bytes > TABLE_MAX_BYTES:
            raise ValueError(f"{path.name} has a table of {table_bytes:,} bytes")
        table = json.loads(file.read(table_bytes))
        for name, entry in table.items():
            if name == "__metadata__" or entry["dtype"] != "F32":
                continue
            begin, end = entry["data_offsets"]
            file.seek(8 + table_bytes + begin)
            yield name, np.frombuffer(file.read(end - begin), np.float32).reshape(entry["shape"])


def convert(source: Path, out: Path) -> None:
    import gguf

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    vocabulary = (source / "vocab.txt").read_text(encoding="utf-8")
    writer = gguf.GGUFWriter(out, "bert")
    add_shape(writer, config)
    add_tokenizer(writer, gguf_tokens(vocabulary, config["vocab_size"]))
    for name, tensor in tensors(source / "model.safetensors"):
        renamed = gguf_name(name)
        if renamed is not None:
            half = tensor.ndim == 2 and renamed.partition(".")[0] not in KEPT_AT_32_BITS
            writer.add_tensor(renamed, tensor.astype("float16") if half else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_file_type(MOSTLY_F16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_uint32("bert.pooling_type", MEAN_POOLING)


def add_tokenizer(writer: Any, tokens: list[str]) -> None:
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL_TOKEN if token in SPECIAL_TOKENS else NORMAL_TOKEN for token in tokens])
    writer.add_token_type_count(2)
    for token, role in SPECIAL_TOKENS.items():
        getattr(writer, f"add_{role}_token_id")(tokens.index(token))
    writer.add_sep_token_id(tokens.index("[SEP]"))


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m greenroom.cli.minilm_gguf SOURCE OUT", file=sys.stderr)
        return 2
    try:
        convert(Path(argv[0]), Path(argv[1]))
    except ModuleNotFoundError as missing:
        print(f"{missing.name} is not installed; pip install 'greenroom[demo]'", file=sys.stderr)
        return NOT_INSTALLED
    except (OSError, ValueError, KeyError, struct.error) as reason:
        print(f"{argv[0]} cannot be converted: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
