"""The memory of a folder that our own worker hosts: ready, and asleep in the green room.

Owns the arithmetic of hosted slots: weights are once in an arena on the host, ready slots have a copy on the device, KV
memory is paged and of a fixed size. The worker process itself (its context on the GPU, its libraries on the host) hosts
many slots and is part of no estimate. `hf_folder.py` reads shapes and weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from greenroom.engines.estimates.estimate import FILE_SIZE, SAFETENSORS, Estimate, EstimatePart, known, mib
from greenroom.engines.estimates.gguf_header import BadModelFile
from greenroom.engines.estimates.gguf_tensors import LAYERS_MAX
from greenroom.engines.estimates.hf_folder import (
    CONTEXT_DEFAULT,
    DTYPE_BYTES,
    TOKENS_AT_ONCE,
    Facts,
    FolderOptions,
    folder_config,
    read_all,
    weight_bytes,
    weight_files,
)

# --- as the worker lays it out --------------------------------------------------------------------------------------
# Tokens of a block of KV memory; one more block is kept as padding. Each store begins at a multiple of STORE_ALIGN.
BLOCK_TOKENS: Final = 16
STORE_ALIGN: Final = 512
# Rounding of the arena to large pages, and the description at its end.
ARENA_ROUNDING_MIB: Final = 4
# Texts of full length that KV memory holds by default.
CONTEXTS_CACHED: Final = 4
BATCH_DEFAULT: Final = 32
# --- constants that measurements correct ----------------------------------------------------------------------------
# Copies of a layer's keys and values that are gathered for attention at once.
GATHERED_COPIES: Final = 2
# Logits of a batch at full precision: as computed, as penalised and masked, and sorted.
LOGITS_COPIES: Final = 3
# Captured graphs of the usual batch sizes, and the workspace of cuBLAS: an allowance until measured.
GRAPHS_MIB: Final = 288
# --------------------------------------------------------------------------------------------------------------------

# Weights that are not safetensors; these, and files with bad headers, count by their size.
OTHER_ENDINGS: Final = ("*.bin", "*.pt", "*.gguf")
FILES_MAX: Final = 1_000
# Module files of an embedding model. Workers read modules from nowhere else.
MODULE_FILES: Final = "[0-9]*_*/*"


@dataclass(frozen=True, slots=True)
class HostedOptions:
    """How it is run; None: as the model's configuration says. `dtype` may be `auto`, which is the same."""

    context: int | None = None
    cache_tokens: int | None = None
    batch_max: int = BATCH_DEFAULT
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class _Folder:
    """The facts read from it."""

    arena_mib: int
    number_bytes: float
    facts: Facts
    source: str


def estimate_ready(path: Path, options: HostedOptions, gpus: int) -> Estimate | None:
    """Memory when ready on a GPU, or on the host if `gpus` is 0; None if there are no weights. Never raises."""
    folder = _read(path, options)
    if folder is None:
        return None
    arena = EstimatePart("weights in the green room", 0, folder.arena_mib)
    kv_mib, work_mib = mib(_kv_bytes(folder, options)), mib(_work_bytes(folder, options))
    if not gpus:
        parts: Sequence[EstimatePart] = (arena, EstimatePart("KV memory", 0, kv_mib), EstimatePart("work", 0, work_mib))
    else:
        on_gpu = (
            EstimatePart("weights", folder.arena_mib, 0),
            EstimatePart("KV memory", kv_mib, 0),
            EstimatePart("work", work_mib, 0),
        )
        parts = (*on_gpu, EstimatePart("graphs", GRAPHS_MIB, 0), arena)
    return Estimate(known(parts), folder.source)


def estimate_asleep(path: Path, options: HostedOptions) -> Estimate | None:
    """Memory when asleep: the arena on the host and nothing else. Never raises."""
    folder = _read(path, options)
    return None if folder is None else Estimate((EstimatePart("weights", 0, folder.arena_mib),), folder.source)


# --- what is read ---------------------------------------------------------------------------------------------------


def _read(path: Path, options: HostedOptions) -> _Folder | None:
    files, facts = [*weight_files(path), *_projection_files(path)], _facts(path)
    dtype = _dtype(facts, options)
    try:
        weights = read_all(files)
    except BadModelFile:
        weights = None
    if not files or weights is None:
        size, number_bytes = sum(map(_size, files or _other_files(path))), _number_bytes(dtype)
        return _Folder(mib(size) + ARENA_ROUNDING_MIB, number_bytes, facts, FILE_SIZE) if size else None
    arena_bytes = weight_bytes(weights, FolderOptions(dtype=dtype))
    return _Folder(mib(arena_bytes) + ARENA_ROUNDING_MIB, _number_bytes(dtype or weights.dtype), facts, SAFETENSORS)


def _projection_files(path: Path) -> list[Path]:
    """Weights of the modules behind the pooling of an embedding model, which lie in folders such as `2_Dense`."""
    try:
        is_sentences = (path / "modules.json").is_file()
        found = (one for one in path.glob(MODULE_FILES) if one.name == "model.safetensors")
        return sorted(found)[:FILES_MAX] if is_sentences else []
    except (OSError, ValueError):
        return []


def _facts(path: Path) -> Facts:
    """A configuration that cannot be read fails its own load; until then only the weights count."""
    try:
        return Facts(folder_config(path))
    except BadModelFile:
        return Facts({})


def _other_files(path: Path) -> list[Path]:
    try:
        return sorted(file for ending in OTHER_ENDINGS for file in path.glob(ending))[:FILES_MAX]
    except (OSError, ValueError):
        return []


def _size(file: Path) -> int:
    try:
        return os.path.getsize(file)
    except OSError:
        return 0


def _dtype(facts: Facts, options: HostedOptions) -> str | None:
    """The dtype of the weights: the operator's, else the model's; None: as in the files."""
    if options.dtype is not None and options.dtype != "auto":
        return options.dtype
    return facts.text("dtype", "torch_dtype") or None


def _number_bytes(dtype: str | None) -> float:
    """Bytes of a number in computation: numbers packed below two bytes are unpacked."""
    return max(2, DTYPE_BYTES.get(dtype or "", 2))


# --- the parts ------------------------------------------------------------------------------------------------------


def _context(folder: _Folder, options: HostedOptions) -> int:
    return options.context or folder.facts.number("max_position_embeddings", "n_positions", default=CONTEXT_DEFAULT)


def _cache_tokens(folder: _Folder, options: HostedOptions) -> int:
    return options.cache_tokens or CONTEXTS_CACHED * _context(folder, options)


def _kv_bytes(folder: _Folder, options: HostedOptions) -> int:
    """Exactly what the worker allocates: stores of keys and of values for each layer, windows at full length."""
    layers = min(folder.facts.number("num_hidden_layers", "n_layer", "num_layers"), LAYERS_MAX)
    slots = (-(-_cache_tokens(folder, options) // BLOCK_TOKENS) + 1) * BLOCK_TOKENS
    stores = (-(-int(slots * numbers * folder.number_bytes) // STORE_ALIGN) for numbers in _numbers(folder.facts))
    return layers * sum(stores) * STORE_ALIGN


def _numbers(facts: Facts) -> tuple[int, int]:
    """Numbers of keys and of values for one token in one layer."""
    heads = facts.number("num_attention_heads", "n_head")
    if facts.number("kv_lora_rank") and facts.number("qk_nope_head_dim"):
        keys = facts.number("qk_nope_head_dim") + facts.number("qk_rope_head_dim")
        return heads * keys, heads * facts.number("v_head_dim")
    kv_heads = 1 if facts.is_on("multi_query") else facts.number("num_key_value_heads", default=heads)
    size = facts.number("head_dim", default=facts.number("hidden_size", "n_embd") // heads if heads else 0)
    return kv_heads * size, kv_heads * size


def _work_bytes(folder: _Folder, options: HostedOptions) -> float:
    """Peak while part of a prompt is read next to a full batch: activations, gathered keys and values, logits."""
    facts, number_bytes = folder.facts, folder.number_bytes
    width, vocabulary = facts.number("hidden_size", "n_embd", "d_model"), facts.number("vocab_size")
    feed = facts.number("intermediate_size", "ffn_dim", "n_inner", default=4 * width)
    experts = facts.number("num_experts_per_tok") * facts.number("moe_intermediate_size")
    tokens = min(_context(folder, options), TOKENS_AT_ONCE)
    activations = tokens * (3 * max(feed, experts) + 6 * width)
    gathered = GATHERED_COPIES * _cache_tokens(folder, options) * sum(_numbers(facts))
    logits = LOGITS_COPIES * options.batch_max * vocabulary
    return (activations + gathered) * number_bytes + logits * 4
