"""The models of `estimates`: made here with random weights, in the shapes of models that people run.

    python -m benchmarks.memory.models FOLDER [NAME …]

Writes one folder a model (config.json and safetensors) where it is not there yet. The table is plain data, so that the
benchmark reads it without torch; only writing needs Transformers.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rig.random_models import WRITTEN, draw, write_missing


@dataclass(frozen=True, slots=True)
class Shape:
    """A model on disk: its kind in Transformers' words, its dtype, and its sizes where they are not that kind's own."""

    kind: str
    dtype: str
    sizes: dict[str, Any] = field(hash=False)


def _sizes(
    width: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 65_536,
        **more,
    }


_LLAMA_1B = _sizes(2048, 8192, 16, 32, 8, 128_256, tie_word_embeddings=True)
_TIED_128 = {"head_dim": 128, "tie_word_embeddings": True}
_EXPERTS = {"head_dim": 128, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
# Five of six layers attend to the last 512 tokens only.
_GEMMA = {"head_dim": 256, "sliding_window": 512}
# Every layer attends to the last 4,096 tokens only.
_MISTRAL = {"head_dim": 128, "sliding_window": 4096}

SHAPES = {
    "llama-0.1b-f32": Shape("llama", "float32", _sizes(768, 2048, 12, 12, 12, 32_000)),
    "qwen3-0.6b-bf16": Shape("qwen3", "bfloat16", _sizes(1024, 3072, 28, 16, 8, 151_936, **_TIED_128)),
    "llama-1b-bf16": Shape("llama", "bfloat16", _LLAMA_1B),
    "llama-1b-f16": Shape("llama", "float16", _LLAMA_1B),
    "gemma3-1b-bf16": Shape("gemma3_text", "bfloat16", _sizes(1152, 6912, 26, 4, 1, 262_144, **_GEMMA)),
    "qwen2-1.5b-bf16": Shape("qwen2", "bfloat16", _sizes(1536, 8960, 28, 12, 2, 151_936, tie_word_embeddings=True)),
    "mistral-3b-f16": Shape("mistral", "float16", _sizes(3072, 8192, 26, 24, 8, 32_000, **_MISTRAL)),
    "qwen3-moe-3b-bf16": Shape("qwen3_moe", "bfloat16", _sizes(2048, 6144, 16, 32, 4, 151_936, **_EXPERTS)),
    "llama-3b-f32": Shape("llama", "float32", _sizes(3072, 8192, 28, 24, 8, 128_256, **_TIED_128)),
    "llama-8b-bf16": Shape("llama", "bfloat16", _sizes(4096, 14336, 32, 32, 8, 128_256)),
}


@dataclass(frozen=True, slots=True)
class Configuration:
    """A model and the context it is served with."""

    shape: str
    context: int

    @property
    def id(self) -> str:
        return f"{self.shape}-{self.context // 1024}k"


def _served(shape: str, *contexts_k: int) -> tuple[Configuration, ...]:
    return tuple(Configuration(shape, 1024 * context) for context in contexts_k)


CONFIGURATIONS = (
    *_served("llama-0.1b-f32", 2),
    *_served("qwen3-0.6b-bf16", 8, 32),
    *_served("llama-1b-bf16", 4),
    *_served("llama-1b-f16", 16),
    *_served("gemma3-1b-bf16", 8, 32),
    *_served("qwen2-1.5b-bf16", 12),
    *_served("mistral-3b-f16", 16),
    *_served("qwen3-moe-3b-bf16", 8),
    *_served("llama-3b-f32", 2, 8),
    *_served("llama-8b-bf16", 8, 32),
)


def write(name: str, folder: Path) -> str:
    import torch
    from transformers import AutoConfig

    shape = SHAPES[name]
    model = draw(AutoConfig.for_model(shape.kind, **shape.sizes), shape.dtype)
    model.save_pretrained(folder, max_shard_size="4GB")
    count = sum(part.numel() for part in model.parameters())
    (folder / WRITTEN).write_text(json.dumps({"parameters": count}))
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return f"{count:,} weights"


def parameters(folder: Path) -> int:
    count: int = json.loads((folder / WRITTEN).read_text())["parameters"]
    return count


if __name__ == "__main__":
    write_missing(Path(sys.argv[1]), sys.argv[2:] or list(SHAPES), write)
