"""The models of `swap.py`, `decode.py` and `mixed.py`: language models with random weights and a tokenizer.

    python benchmarks/hosted/models.py FOLDER NAME …

Writes one folder a model where it is not there yet. A token is a word (`w17`), so that whatever a random model says can
be read, counted and sent again. The table is plain data; only writing needs torch, Transformers and a GPU.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Final

# Written last, so that a folder that was left half-written is made anew.
WRITTEN: Final = "written.json"
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
    **{f"llama-8b-{letter}": _8B for letter in "abc"},
    "llama-14b": _14B,
    "llama-1.5b": _1B5,
    # To try the scripts where there is no GPU.
    **{
        f"tiny-{letter}": {**_8B, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2_000}
        for letter in "abc"
    },
}


def write(name: str, folder: Path) -> None:
    """Random weights, another draw for every name, made on the GPU where there is one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    said = dict(SHAPES[name])
    config = AutoConfig.for_model(said.pop("kind"), max_position_embeddings=32_768, **said)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = config.vocab_size - 1
    torch.manual_seed(zlib.crc32(name.encode()))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    _write_tokenizer(config.vocab_size, folder)
    (folder / WRITTEN).write_text(json.dumps({"bytes": weight_bytes(folder)}))


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


def main(root: Path, names: list[str]) -> None:
    for name in names:
        if not (root / name / WRITTEN).exists():
            began = time.monotonic()
            write(name, root / name)
            size, took_s = weight_bytes(root / name) / 1e9, time.monotonic() - began
            print(f"{name}: {size:.1f} GB written in {took_s:.1f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
