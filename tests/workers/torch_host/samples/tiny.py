"""Tiny Transformers models made by code: a folder with config, safetensors and tokenizer, a few hundred KB.

`make_model` writes one of `KINDS` with random weights, whole or in shards; the same seed gives the same weights. As a
program: `python -m tests.workers.torch_host.samples.tiny FOLDER [--kind llama] [--seed 1] [--shards 3]`. Needs torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 384
CONTEXT = 512
BEGIN, END, PAD = "<s>", "</s>", "<pad>"
LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "the capital of France is Paris and the capital of Spain is Madrid",
    "one two three four five six seven eight nine ten",
    "user assistant system tool content role name arguments",
    'Grüße aus Köln: ein Männlein steht im Walde. 你好 🙂 {"name": "value"}',
]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# The head is a little wider than the tokenizer, as real ones are.
SHARED = {"vocab_size": VOCABULARY + 8, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
# The settings of each kind. Unusual head sizes and tied weights are among them on purpose.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES, "tie_word_embeddings": False},
    "llama-tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **SIZES, "head_dim": 16, "sliding_window": 24},
    "qwen2": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 32},
    "gemma2": {"model_type": "gemma2", **SIZES, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma3": {"model_type": "gemma3_text", **SIZES, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "phi3": {"model_type": "phi3", **SIZES},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT},
    "gpt_neox": {"model_type": "gpt_neox", **{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}},
    "bert": {"model_type": "bert", **{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}},
}
ENCODERS = {"bert"}


def make_model(
    folder: Path,
    kind: str = "llama",
    *,
    seed: int = 1,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    template: str | None = TEMPLATE,
    **changes: Any,
) -> Path:
    """Write a model of `kind` to `folder` and give the folder back. `changes` are keys of its config.json."""
    config = AutoConfig.for_model(**{**SHARED, **KINDS[kind], **changes})
    maker = AutoModel if kind in ENCODERS else AutoModelForCausalLM
    model = maker.from_config(config, dtype=torch.float32)
    fill(model, seed)
    model = model.to(dtype)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_weights(folder, weights_of(model), shards)
    save_tokenizer(folder, template)
    return folder


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every weight once: of tied ones the first name is kept."""
    seen: dict[int, str] = {}
    for name, tensor in model.state_dict().items():
        seen.setdefault(tensor.data_ptr(), name)
    state = model.state_dict()
    return {name: state[name].contiguous() for name in seen.values()}


def save_weights(folder: Path, weights: Mapping[str, torch.Tensor], shards: int = 1) -> None:
    """Write the weights as one safetensors file, or as `shards` of them with an index."""
    if shards == 1:
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    placed: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[number::shards]
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def store_oddly(folder: Path) -> Path:
    """Tie its embeddings, and store them under both names: which is right only Transformers knows, so it loads it."""
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "tie_word_embeddings": True}))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_weights(folder, weights)
    return folder


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """A byte-level BPE trained on `LINES`: any text goes in and comes out as it was."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        LINES * 4,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[BEGIN, END, PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BEGIN, eos_token=END, pad_token=PAD)
    fast.model_max_length = CONTEXT
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)


def fill(model: torch.nn.Module, seed: int) -> None:
    """Random weights wide enough that the most likely token is likely by far, whatever the rounding."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=random)
            else:
                parameter.normal_(0, 0.05, generator=random).add_(1.0 if parameter.mean() > 0.5 else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny model with random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=sorted(KINDS), default="llama")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    asked = parser.parse_args()
    make_model(asked.folder, asked.kind, seed=asked.seed, shards=asked.shards, dtype=getattr(torch, asked.dtype))


if __name__ == "__main__":
    main()
