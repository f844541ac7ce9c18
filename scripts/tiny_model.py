#!/usr/bin/env python3
"""Writes the smallest model that llama.cpp serves, for trying things without a hub: tiny_model.py FILE.gguf …

A Llama of 260 KB whose one layer adds nothing. Its embedding and its head are a script: whatever it is asked, it answers
" FILE says hello" and ends, so that an answer tells which file it is from. Needs nothing but Python.
"""

from __future__ import annotations

import struct
import sys
from array import array
from pathlib import Path

HIDDEN = 64
SPECIALS = ["<unk>", "<s>", "</s>"]
END = 2
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# How far the scripted token's logit stands above all others, times the square root of HIDDEN.
GAIN = 3.0
UINT, INT, FLOAT, BOOL, TEXT, LIST = 4, 5, 6, 7, 8, 9
F32, ALIGNMENT = 0, 32
Scalar = int | float | str


def scripted(words: list[str], vocabulary: int) -> dict[str, tuple[tuple[int, ...], array[float]]]:
    """Each word has an axis of its own, all other tokens share the next; the head's row of a word points along the axis
    of what it follows."""
    first, others = vocabulary - len(words), len(words)
    embedding, head = (array("f", bytes(4 * vocabulary * HIDDEN)) for _ in range(2))
    for token in range(vocabulary):
        axis = token - first if token >= first else others
        embedding[token * HIDDEN + axis] = 1.0
        successor = first if axis == others else token + 1 if token + 1 < vocabulary else END
        head[successor * HIDDEN + axis] = GAIN
    ones, square = array("f", [1.0] * HIDDEN), array("f", bytes(4 * HIDDEN * HIDDEN))
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors = {"token_embd": ((HIDDEN, vocabulary), embedding), "output": ((HIDDEN, vocabulary), head)}
    tensors |= {name: ((HIDDEN,), ones) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    return tensors | {f"blk.0.{name}": ((HIDDEN, HIDDEN), square) for name in matrices}


def text(said: str) -> bytes:
    encoded = said.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def scalar(kind: int, said: Scalar) -> bytes:
    return text(str(said)) if kind == TEXT else struct.pack({UINT: "<I", INT: "<i", FLOAT: "<f", BOOL: "<?"}[kind], said)


def entry(key: str, kind: int, said: Scalar | list[Scalar]) -> bytes:
    if not isinstance(said, list):
        return text(key) + struct.pack("<I", kind) + scalar(kind, said)
    return text(key) + struct.pack("<IIQ", LIST, kind, len(said)) + b"".join(scalar(kind, one) for one in said)


def tiny_model(name: str) -> bytes:
    words = [f"▁{word}" for word in (name, "says", "hello")]
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    # Unknown, two of control, bytes, and normal ones.
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    sizes = {"embedding_length": HIDDEN, "feed_forward_length": HIDDEN, "rope.dimension_count": HIDDEN}
    sizes |= {"context_length": 4096, "block_count": 1, "attention.head_count": 1, "attention.head_count_kv": 1}
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": END}
    entries = [entry("general.architecture", TEXT, "llama"), entry("general.name", TEXT, name)]
    entries += [entry(f"llama.{key}", UINT, size) for key, size in sizes.items()]
    entries += [entry("llama.attention.layer_norm_rms_epsilon", FLOAT, 1e-5)]
    entries += [entry("tokenizer.ggml.model", TEXT, "llama"), entry("tokenizer.ggml.tokens", TEXT, [*tokens])]
    entries += [entry("tokenizer.ggml.scores", FLOAT, [0.0] * len(tokens))]
    entries += [entry("tokenizer.ggml.token_type", INT, [*kinds])]
    entries += [entry(f"tokenizer.ggml.{key}", UINT, id) for key, id in ids.items()]
    entries += [entry("tokenizer.ggml.add_space_prefix", BOOL, False), entry("tokenizer.chat_template", TEXT, TEMPLATE)]
    infos, data = b"", b""
    tensors = scripted(words, len(tokens))
    for tensor, (shape, values) in tensors.items():
        infos += text(f"{tensor}.weight") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, F32, len(data))
        data += values.tobytes()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries) + infos
    return head + bytes(-len(head) % ALIGNMENT) + data


for path in map(Path, sys.argv[1:]):
    part = path.with_suffix(".part")
    part.write_bytes(tiny_model(path.stem))
    part.replace(path)
