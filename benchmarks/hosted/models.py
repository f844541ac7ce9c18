"""The models of `swap`, `decode` and `mixed`: language models with random weights and a tokenizer.

    python -m benchmarks.hosted.models FOLDER NAME …

Writes one folder a model where it is not there yet. A token is a word (`w17`), so that whatever a random model answers
can be read, counted and sent again. The table is plain data; only writing needs torch, Transformers and a GPU.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any, Final

from benchmarks.rig.random_models import WRITTEN, draw, make, write_missing

EIGHT: Final = ("llama-8b-a", "llama-8b-b", "llama-8b-c")
SMALL, LARGE = "llama-1.5b", "llama-14b"
CHAT_TEMPLATE: Final = "{% for message in messages %}{{ message.content }} {% endfor %}"

_8B: Final[dict[str, Any]] = {
    "kind": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
_14B: Final[dict[str, Any]] = {
    "kind": "llama",
    "hidden_size": 5120,
    "intermediate_size": 13_824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152_064,
}
_1B5: Final[dict[str, Any]] = {
    "kind": "llama",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    **dict.fromkeys(EIGHT, _8B),
    LARGE: _14B,
    SMALL: _1B5,
    # To try this where there is no GPU.
    **{
        f"tiny-{letter}": {**_8B, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2_000}
        for letter in "abc"
    },
}


def make_models(python: str, folders: Path, *names: str) -> None:
    """All at once: drawing and writing them takes turns on GPU and disk."""
    make(python, "benchmarks.hosted.models", folders, [[name] for name in names])


def write(name: str, folder: Path) -> str:
    """Random weights, another draw for every name."""
    import torch
    from transformers import AutoConfig

    shape = dict(SHAPES[name])
    config = AutoConfig.for_model(shape.pop("kind"), max_position_embeddings=32_768, **shape)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = config.vocab_size - 1
    torch.manual_seed(zlib.crc32(name.encode()))
    draw(config, "bfloat16").save_pretrained(folder, max_shard_size="4GB")
    _write_tokenizer(config.vocab_size, folder)
    (folder / WRITTEN).write_text(json.dumps({"bytes": weight_bytes(folder)}))
    return f"{weight_bytes(folder) / 1e9:.1f} GB written"


def _write_tokenizer(words: int, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{number}": number for number in range(words - 1)} | {"<end>": words - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Replace("w", " w")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=CHAT_TEMPLATE)
    fast.save_pretrained(folder)


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


if __name__ == "__main__":
    write_missing(Path(sys.argv[1]), sys.argv[2:], write)
