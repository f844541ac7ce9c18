"""Tiny models for a real engine, made by code, with answers known beforehand.

`make_gguf` writes a Llama whose layers are really computed but whose embedding and output head are a script: whatever
it is asked, it says " <name> says hello" and ends, or (loop) " <name> one two three … twenty one two …" without end.
So a test can tell which model answered. `make_hf` writes the same model as a folder for Transformers.
`make_bert_gguf` writes an encoder that sees a text as the bag of its words: an embedding of it is near that of a text
with the same words, and as a reranker it prefers the document that says "good".

How the script works: each scripted token has an axis of its own, every other token lies on the axis `start`. The head's
row of a token points along the axis of the token it follows. After the last norm that axis is far longer than anything
the quiet layers add, so that sampling at any temperature up to 1 follows the script.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.samples.hf_folder import bpe, llama_tensors, special, write_json, write_safetensors, write_tokenizer

Array = npt.NDArray[np.float32]

# fmt: off
NUMBERS = [
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]
BERT_WORDS = [
    "good", "red", "green", "blue", "apple", "pear", "plum", "car", "train", "ship", "the", "a", "is", "of", "and",
]
# fmt: on
UNKNOWN, BEGIN, END = 0, 1, 2
SPECIALS = ["<unk>", "<s>", "</s>"]
CONTEXT_LENGTH = 4096
# The script's logits stand this far above all others, times the square root of the width.
GAIN = 3.0
QUIET = 1e-3
NORM_EPSILON = 1e-5
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Of tools and messages it prints only what tells llama.cpp how calls are written: prompts stay short.
TOOLS_TEMPLATE = (
    "{{ tools | length }} tools\n{% for message in messages %}{{ message.role }}:"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "assistant:{% if messages[-1].role == 'tool' %}<s>{% endif %}"
)


def make_gguf(
    path: Path,
    name: str,
    *,
    loop: bool = False,
    noise: bool = False,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    call: str = "",
) -> None:
    """Write a scripted Llama (0.9 MB as it stands; hidden=1024, layers=16 makes 300 MB, a load that takes time).

    With `noise` there is no script: the head is random, which is good for nothing but the work it makes.
    With `call`, an object with a tool's name and arguments in words that all differ, it calls that tool unless the
    last message is a tool's result.
    """
    tokens, tensors = _scripted(name, loop, noise, hidden, layers, heads, call)
    writer = gguf_writer(path, "llama", name, hidden=hidden, layers=layers, heads=heads)
    writer.add_head_count_kv(heads // 2)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)
    add_sentencepiece(writer, tokens, TOOLS_TEMPLATE if call else TEMPLATE)
    write_gguf(writer, tensors)


def make_lora_gguf(path: Path, name: str, *, hidden: int = 128) -> None:
    """Write an adapter for the Llama of this name: applied as it is, all that it says is "hello"."""
    tokens, _ = _scripted(name, False, False, hidden, 1, 4)
    words = ["▁" + name, "▁says", "▁hello"]
    # The axis of tokens outside the script, from which the head makes the first word.
    outside, said = np.zeros((1, hidden), np.float32), np.zeros((len(tokens), 1), np.float32)
    outside[0, len(words)], said[tokens.index(words[-1]), 0] = 1, 2 * GAIN
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 1.0)
    names = ("output.weight.lora_a", "output.weight.lora_b")
    write_gguf(writer, dict(zip(names, (outside, said), strict=True)), exact=names)


def make_projector_gguf(path: Path, *, hidden: int = 128, width: int = 32) -> None:
    """Write a projector of LLaVA's kind with small random weights: images of 28 × 28 pixels become four tokens."""
    random = np.random.default_rng(0)

    def tensor(*shape: int) -> Array:
        return random.standard_normal(shape, np.float32) * np.float32(0.02)

    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    numbers = {"image_size": 28, "patch_size": 14, "embedding_length": width, "feed_forward_length": 2 * width}
    numbers |= {"projection_dim": hidden, "block_count": 2, "attention.head_count": 2}
    for key, number in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", NORM_EPSILON)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    tensors = {"v.patch_embd.weight": tensor(width, 3, 14, 14), "v.position_embd.weight": tensor(4, width)}
    for layer in ("v.blk.0", "v.blk.1"):
        for norm in ("ln1", "ln2"):
            tensors |= {f"{layer}.{norm}.weight": np.ones(width, np.float32), f"{layer}.{norm}.bias": tensor(width)}
        tensors |= {
            f"{layer}.{part}.weight": tensor(width, width) for part in ("attn_q", "attn_k", "attn_v", "attn_out")
        }
        tensors |= {
            f"{layer}.ffn_up.weight": tensor(2 * width, width),
            f"{layer}.ffn_down.weight": tensor(width, 2 * width),
        }
    tensors |= {"mm.0.weight": tensor(hidden, width), "mm.0.bias": tensor(hidden)}
    tensors |= {"mm.2.weight": tensor(hidden, hidden), "mm.2.bias": tensor(hidden)}
    write_gguf(writer, tensors, exact=("v.position_embd.weight",))


def make_hf(
    folder: Path,
    name: str,
    *,
    loop: bool = False,
    noise: bool = False,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
) -> None:
    """Write the same model as a folder for Transformers, at 32 bits."""
    folder.mkdir()
    tokens, tensors = _scripted(name, loop, noise, hidden, layers, heads)
    write_safetensors(folder / "model.safetensors", llama_tensors(tensors, heads, heads // 2))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": NORM_EPSILON,
        "tie_word_embeddings": False,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "dtype": "float32",
    }
    write_json(folder / "config.json", config)
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    parts = {
        "added_tokens": [special(id, token) for id, token in enumerate(SPECIALS)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": bpe(tokens, [], byte_fallback=True),
    }
    names = {"unk_token": SPECIALS[UNKNOWN], "bos_token": SPECIALS[BEGIN], "eos_token": SPECIALS[END]}
    write_tokenizer(folder, parts, {**names, "model_max_length": CONTEXT_LENGTH, "chat_template": TEMPLATE})


def _scripted(
    name: str, loop: bool, noise: bool, hidden: int, layers: int, heads: int, call: str = ""
) -> tuple[list[str], dict[str, Array]]:
    """The tokens and, by llama.cpp's names, the tensors of a scripted Llama."""
    random = np.random.default_rng(0)
    calling = f"<tool_call>{call}</tool_call>".split() if call else []
    words = [*calling, *([name, *NUMBERS] if loop else [name, "says", "hello"])]
    tokens = SPECIALS + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁" + word for word in words]
    script = list(range(len(tokens) - len(words), len(tokens)))
    successors = [*script[1:], script[1] if loop else END]
    if calling:
        # The call is an answer of its own. The words follow BEGIN, which ends the prompt after a tool's result.
        script, successors = [*script, BEGIN], [*successors, script[len(calling)]]
        successors[len(calling) - 1] = END

    start = len(script)
    embedding = np.zeros((len(tokens), hidden), np.float32)
    # Other tokens differ from each other beyond the script's axes, so that embeddings of different texts differ.
    embedding[:, start + 1 :] = _unit_rows(random.standard_normal((len(tokens), hidden - start - 1), np.float32))
    embedding[:, start] = 1
    head = np.zeros_like(embedding)
    head[script[0], start] = GAIN
    for axis, (token, successor) in enumerate(zip(script, successors, strict=True)):
        embedding[token] = np.eye(hidden, dtype=np.float32)[axis]
        head[successor, axis] = GAIN
    if noise:
        head = random.standard_normal(head.shape, np.float32)

    block = _llama_block(random, hidden, heads)
    whole = {"token_embd.weight": embedding, "output.weight": head, "output_norm.weight": np.ones(hidden, np.float32)}
    # One block's numbers serve for all layers: random numbers are the slow part of making a large model.
    return tokens, whole | {f"blk.{at}.{part}": tensor for at in range(layers) for part, tensor in block.items()}


def _llama_block(random: np.random.Generator, hidden: int, heads: int) -> dict[str, Array]:
    ffn, kv = 2 * hidden, hidden // heads * (heads // 2)

    def matrix(rows: int, columns: int, scale: float = 0.02) -> Array:
        return random.standard_normal((rows, columns), np.float32) * np.float32(scale)

    return {
        "attn_norm.weight": np.ones(hidden, np.float32),
        "attn_q.weight": matrix(hidden, hidden),
        "attn_k.weight": matrix(kv, hidden),
        "attn_v.weight": matrix(kv, hidden),
        "attn_output.weight": matrix(hidden, hidden, QUIET),
        "ffn_norm.weight": np.ones(hidden, np.float32),
        "ffn_gate.weight": matrix(ffn, hidden),
        "ffn_up.weight": matrix(ffn, hidden),
        "ffn_down.weight": matrix(hidden, ffn, QUIET),
    }


BERT_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_bert_gguf(path: Path, name: str, *, rank: bool = False, hidden: int = 64) -> None:
    """Write a one-layer BERT that averages its words: embeddings (mean pooling), or a reranker that likes "good".

    Words are those of BERT_WORDS and single letters. Attention without queries looks everywhere alike, so that each
    position, the first included, which the rank head reads, gets the mean of all.
    """
    random = np.random.default_rng(0)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = BERT_SPECIALS + ["▁" + word for word in dict.fromkeys(BERT_WORDS + letters)] + letters
    embedding = _unit_rows(random.standard_normal((len(tokens), hidden), np.float32))
    embedding[: len(BERT_SPECIALS)] *= 0.01
    identity, nothing = np.eye(hidden, dtype=np.float32), np.zeros((hidden, hidden), np.float32)
    one, zero = np.ones(hidden, np.float32), np.zeros(hidden, np.float32)
    tensors = {
        "token_embd.weight": embedding,
        "position_embd.weight": np.zeros((CONTEXT_LENGTH, hidden), np.float32),
        "token_types.weight": np.zeros((2, hidden), np.float32),
    }
    squares = {"attn_q": nothing, "attn_k": nothing, "attn_v": 4 * identity, "attn_output": identity}
    squares |= {"ffn_up": nothing, "ffn_down": nothing}
    for part, matrix in squares.items():
        tensors |= {f"blk.0.{part}.weight": matrix, f"blk.0.{part}.bias": zero}
    for norm in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        tensors |= {f"{norm}.weight": one, f"{norm}.bias": zero}
    if rank:
        taste = embedding[tokens.index("▁good")] - embedding[tokens.index("▁good")].mean()
        tensors |= {"cls.weight": identity * 0.1, "cls.bias": zero}
        tensors |= {"cls.output.weight": taste[None, :] * 10, "cls.output.bias": np.zeros(1, np.float32)}
    writer = gguf_writer(path, "bert", name, hidden=hidden, layers=1, heads=4, ffn=hidden)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK if rank else gguf.PoolingType.MEAN)
    writer.add_token_type_count(2)
    _add_wordpiece(writer, tokens)
    write_gguf(writer, tensors, exact=("position_embd.weight", "token_types.weight"))


def gguf_writer(
    path: Path, architecture: str, name: str, *, hidden: int, layers: int, heads: int, ffn: int | None = None
) -> Any:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn or 2 * hidden)
    writer.add_head_count(heads)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    return writer


def add_sentencepiece(writer: Any, tokens: list[str], template: str = TEMPLATE) -> None:
    """Any text is read byte by byte, since no token is a letter; only the script's words are ever said whole."""
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + 256 * [gguf.TokenType.BYTE]
    kinds += (len(tokens) - len(kinds)) * [gguf.TokenType.NORMAL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_unk_token_id(UNKNOWN)
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(template)


def _add_wordpiece(writer: Any, tokens: list[str]) -> None:
    special = len(BERT_SPECIALS)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types(
        special * [int(gguf.TokenType.CONTROL)] + (len(tokens) - special) * [int(gguf.TokenType.NORMAL)]
    )
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)


def write_gguf(writer: Any, tensors: Mapping[str, Array], *, exact: tuple[str, ...] = ()) -> None:
    """Matrices at 16 bits, as real files have them; vectors and what the engine wants `exact` at 32."""
    for name, tensor in tensors.items():
        small = tensor.ndim == 2 and name not in exact
        writer.add_tensor(name, np.ascontiguousarray(tensor.astype(np.float16) if small else tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _unit_rows(matrix: Array) -> Array:
    rows: Array = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    return rows
