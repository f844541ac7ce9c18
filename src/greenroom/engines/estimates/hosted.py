"""The memory of models that our own workers host: ready, and asleep in the green room. Folders of Transformers, and
pipelines of diffusers, which are folders of folders.

Owns the arithmetic of hosted slots: weights are once in an arena on the host, ready slots have a copy on the device, KV
memory is paged and of a fixed size. The worker process itself (its context on the GPU, its libraries on the host) hosts
many slots and is part of no estimate. Also owns which files of a pipeline are loaded: a component may have its weights
in several precisions. `hf_folder.py` reads shapes and weights. Everything in a folder is untrusted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from greenroom.base.plain_file import read_plain
from greenroom.engines.estimates.estimate import (
    FILE_SIZE,
    SAFETENSORS,
    Estimate,
    EstimatePart,
    file_bytes,
    known,
    mib,
)
from greenroom.engines.estimates.gguf_header import BadModelFile
from greenroom.engines.estimates.gguf_tensors import LAYERS_MAX
from greenroom.engines.estimates.hf_folder import (
    CONFIG_MAX_BYTES,
    DTYPE_BYTES,
    FILES_MAX,
    TOKENS_AT_ONCE,
    Facts,
    FolderOptions,
    read_all,
    weight_bytes,
    weight_files,
    weights_fault,
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
# The decoder works on whole pictures: so many values of its widest layer at full size are held at once.
DECODER_COPIES: Final = 4
# Steps on latents, and the workspaces of cuDNN and cuBLAS.
STEPS_MIB: Final = 1_024
# The context of a worker that has several GPUs, on each of them, beside that of a worker that has one.
CONTEXT_MIB: Final = 512
# --------------------------------------------------------------------------------------------------------------------

# Weights that are not safetensors; these, and files with bad headers, count by their size.
OTHER_ENDINGS: Final = ("*.bin", "*.pt", "*.gguf")
# Module files of an embedding model. Workers read modules from nowhere else.
MODULE_FILES: Final = "[0-9]*_*/*"


@dataclass(frozen=True, slots=True)
class _Folder:
    """The facts read from it."""

    arena_mib: int
    number_bytes: float
    facts: Facts
    source: str


def estimate_ready(path: Path, options: FolderOptions, gpus: int) -> Estimate | None:
    """Memory when ready on a GPU, or on the host if `gpus` is 0; None if there are no weights. Never raises."""
    folder = _read(path, options)
    if folder is None:
        return None
    kv_mib, work_mib = mib(_kv_bytes(folder, options)), mib(_work_bytes(folder, options))
    return _ready(folder.arena_mib, work_mib, folder.source, gpus, kv_mib, GRAPHS_MIB)


def estimate_asleep(path: Path, options: FolderOptions) -> Estimate | None:
    """Memory when asleep: the arena on the host and nothing else. Never raises."""
    folder = _read(path, options)
    return None if folder is None else Estimate((EstimatePart("weights", 0, folder.arena_mib),), folder.source)


def _ready(arena_mib: int, work_mib: int, source: str, gpus: int, kv_mib: int = 0, graphs_mib: int = 0) -> Estimate:
    arena = EstimatePart("weights in the green room", 0, arena_mib)
    own = (("KV memory", kv_mib), ("work", work_mib))
    if not gpus:
        return Estimate(known((arena, *(EstimatePart(what, 0, size) for what, size in own))), source)
    on_gpu = (("weights", arena_mib), *own, ("graphs", graphs_mib))
    return Estimate(known((*(EstimatePart(what, size, 0) for what, size in on_gpu), arena)), source)


# --- what is read ---------------------------------------------------------------------------------------------------


def _read(path: Path, options: FolderOptions) -> _Folder | None:
    files, facts = [*weight_files(path), *_projection_files(path)], Facts.of(path)
    # The operator's, else the model's, else as in the files.
    dtype = options.wanted_dtype or facts.text("dtype", "torch_dtype") or None
    try:
        weights = read_all(files)
    except BadModelFile:
        weights = None
    if not files or weights is None:
        size, number_bytes = sum(map(file_bytes, files or _other_files(path))), _number_bytes(dtype)
        return _Folder(mib(size) + ARENA_ROUNDING_MIB, number_bytes, facts, FILE_SIZE) if size else None
    arena_mib = mib(weight_bytes(weights, dtype)) + ARENA_ROUNDING_MIB
    return _Folder(arena_mib, _number_bytes(dtype or weights.dtype), facts, SAFETENSORS)


def _projection_files(path: Path) -> list[Path]:
    """Weights of the modules behind the pooling of an embedding model, which lie in folders such as `2_Dense`."""
    try:
        is_sentences = (path / "modules.json").is_file()
        found = (one for one in path.glob(MODULE_FILES) if one.name == "model.safetensors")
        return sorted(found)[:FILES_MAX] if is_sentences else []
    except (OSError, ValueError):
        return []


def _other_files(path: Path) -> list[Path]:
    try:
        return sorted(file for ending in OTHER_ENDINGS for file in path.glob(ending))[:FILES_MAX]
    except (OSError, ValueError):
        return []


def _number_bytes(dtype: str | None) -> float:
    """Bytes of a number in computation: numbers packed below two bytes are unpacked."""
    return max(2, DTYPE_BYTES.get(dtype or "", 2))


# --- the parts ------------------------------------------------------------------------------------------------------


def _cache_tokens(folder: _Folder, options: FolderOptions) -> int:
    return options.cache_tokens or CONTEXTS_CACHED * (options.context or folder.facts.context)


def _kv_bytes(folder: _Folder, options: FolderOptions) -> int:
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


def _work_bytes(folder: _Folder, options: FolderOptions) -> float:
    """Peak while part of a prompt is read next to a full batch: activations, gathered keys and values, logits."""
    facts = folder.facts
    activations = facts.step_numbers(min(options.context or facts.context, TOKENS_AT_ONCE))
    gathered = GATHERED_COPIES * _cache_tokens(folder, options) * sum(_numbers(facts))
    logits = LOGITS_COPIES * options.sequences * facts.number("vocab_size")
    return (activations + gathered) * folder.number_bytes + logits * 4


# --- pipelines --------------------------------------------------------------------------------------------------------

INDEX: Final = "model_index.json"
# Names of half precision in the names of files, by the dtype that is wanted.
_VARIANTS: Final = {"float16": "fp16", "bfloat16": "bf16"}
COMPONENTS_MAX: Final = 64
# Components are arguments of Python classes.
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
# Weights are mapped and copied in chunks: a component may end inside its first and its last, and where chunks are
# folded two more are needed on each GPU.
CHUNK_MIB: Final = 64
EXTRA_CHUNKS: Final = 2
# The side of a picture where nothing tells it.
SIDE: Final = 1_024
SIDE_MAX: Final = 4_096


def index_of(folder: Path) -> dict[str, Any]:
    """Its model_index.json; empty if it cannot be read."""
    try:
        said = msgspec.json.decode(read_plain(folder / INDEX, CONFIG_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def pipeline_files(folder: Path, dtype: str) -> list[Path]:
    """The index, and the files of its components as they are loaded."""
    found = [folder / INDEX]
    for part in _components(folder):
        try:
            others = (one for one in part.iterdir() if one.is_file() and one.suffix != ".safetensors")
            found += sorted(others) + _weights(part, dtype)
        except OSError:
            continue
    return found


def pipeline_fault(folder: Path, dtype: str, *, takes_pickles: bool) -> str | None:
    """Why it cannot be loaded; None if it can. Never raises."""
    if not index_of(folder):
        return f"{folder / INDEX} cannot be read: a pipeline of diffusers has one"
    try:
        return next(filter(None, (_component_fault(part, dtype, takes_pickles) for part in _components(folder))), None)
    except BadModelFile as error:
        return error.message.rstrip(".")


def _component_fault(part: Path, dtype: str, takes_pickles: bool) -> str | None:
    """Components with a config.json are models; others, such as tokenizers, have no weights."""
    if not os.path.isdir(part):
        return f"there is no component {part.name} in {part.parent}, which {INDEX} names"
    if not os.path.isfile(part / "config.json"):
        return None
    return weights_fault(part, _weights(part, dtype), takes_pickles=takes_pickles)


def estimate_pipeline(folder: Path, dtype: str, gpus: int) -> Estimate | None:
    """Memory when ready on a GPU, or on the host if `gpus` is 0; None if there are no weights."""
    arena = _arena(folder, dtype)
    if arena is None:
        return None
    return _ready(arena[0], mib(_decoder_bytes(folder, dtype)) + STEPS_MIB, arena[1], gpus)


def estimate_pipeline_asleep(folder: Path, dtype: str) -> Estimate | None:
    """Memory when asleep: the arena on the host."""
    arena = _arena(folder, dtype)
    return None if arena is None else Estimate((EstimatePart("weights", 0, arena[0]),), arena[1])


def component_mib(folder: Path, dtype: str) -> dict[str, int]:
    """The weights of each component that has any, as they are loaded."""
    found = {part.name: mib(_weight_bytes(_weights(part, dtype), dtype)[0]) for part in _components(folder)}
    return {name: size_mib for name, size_mib in found.items() if size_mib}


def spread_mib(parts: Mapping[str, int]) -> int:
    """What each GPU needs in addition if these components are spread over several."""
    return CONTEXT_MIB + CHUNK_MIB * EXTRA_CHUNKS * (1 + len(parts)) if parts else 0


def _arena(folder: Path, dtype: str) -> tuple[int, str] | None:
    size, source = _weight_bytes([file for part in _components(folder) for file in _weights(part, dtype)], dtype)
    return (mib(size) + ARENA_ROUNDING_MIB, source) if size else None


def _weight_bytes(files: list[Path], dtype: str) -> tuple[float, str]:
    try:
        return weight_bytes(read_all(files), dtype), SAFETENSORS
    except BadModelFile:
        return sum(map(file_bytes, files)), FILE_SIZE


def _components(folder: Path) -> list[Path]:
    """Those that it has: of optional ones that it lacks the index says null."""
    said = index_of(folder).items()
    named = [name for name, what in said if isinstance(what, list) and any(what) and _NAME.fullmatch(name)]
    return [folder / name for name in named[:COMPONENTS_MAX]]


def _weights(part: Path, dtype: str) -> list[Path]:
    """The safetensors of one component in the precision that is loaded: the wanted one, else full, else any."""
    try:
        files = sorted(part.glob("*.safetensors"))
    except (OSError, ValueError):
        return []
    for variant in dict.fromkeys((_VARIANTS.get(dtype), None, *_VARIANTS.values())):
        found = [file for file in files if _variant(file) == variant]
        if found:
            return found
    return []


def _variant(file: Path) -> str | None:
    """`fp16` for `model.fp16.safetensors` and for `model.fp16-00001-of-00002.safetensors`."""
    words = file.name.split(".")[1:]
    return next((name for name in _VARIANTS.values() if any(word.startswith(name) for word in words)), None)


def _decoder_bytes(folder: Path, dtype: str) -> float:
    """Peak while a picture of the usual size is decoded."""
    vae = Facts.of(folder / "vae")
    widths = [int(word) for word in vae.words("block_out_channels") if word.isdigit()][:16]
    scale = 2 ** (len(widths) - 1) if widths else 1
    latents = max(Facts.of(folder / name).number("sample_size") for name in ("unet", "transformer"))
    side = min(latents * scale, SIDE_MAX) or SIDE
    width = 2 * min(widths, default=0)
    number_bytes = 4 if vae.is_on("force_upcast") else DTYPE_BYTES.get(dtype, 4)
    return DECODER_COPIES * side * side * width * number_bytes
