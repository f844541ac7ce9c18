"""The memory of a folder that a server with a paged KV cache runs: vLLM or SGLang, ready and asleep.

Owns the arithmetic of such servers: weights as they lie in the files, a KV cache for so many tokens, activations of one
step, captured graphs, and a context on each GPU. The KV cache then fills what is left of the claim, so an estimate that
is too small makes the cache smaller and does not run out of memory. `hf_folder.py` reads shapes and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from greenroom.engines.estimates.estimate import FILE_SIZE, SAFETENSORS, Estimate, EstimatePart, known, mib
from greenroom.engines.estimates.gguf_header import BadModelFile
from greenroom.engines.estimates.hf_folder import (
    CONTEXT_MIB,
    DTYPE_BYTES,
    PROCESS_MIB,
    WORKSPACE_MIB,
    Facts,
    FolderOptions,
    estimate_folder,
    folder_cache,
    folder_config,
    read_all,
    weight_bytes,
    weight_files,
)
from greenroom.engines.estimates.kv_cache import LayerCache

# --- allowances, until measured -------------------------------------------------------------------------------------
# Tokens of all requests that one step computes at most, as both servers choose on large GPUs.
STEP_TOKENS: Final = 8_192
# Logits of each sequence at full precision: as computed, as penalised, and sorted.
LOGITS_COPIES: Final = 3
# Captured graphs of the usual batch sizes.
GRAPHS_MIB: Final = 512
# Buffers of NCCL on each of several GPUs.
NCCL_MIB: Final = 512
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sizes:
    weights_mib: int
    cache_mib: int
    work_mib: int
    source: str
    cache_tokens: int = 0


def estimate_paged(path: Path, options: FolderOptions, gpus: int) -> Estimate | None:
    """Memory when ready on `gpus` GPUs, 0 for the host; None if there are no weights. Never raises."""
    sizes = _read(path, options)
    if sizes is None:
        return None
    own = (("weights", sizes.weights_mib), ("KV cache", sizes.cache_mib), ("compute buffers", sizes.work_mib))
    if not gpus:
        parts: Sequence[EstimatePart] = [EstimatePart(what, 0, size) for what, size in own]
        return Estimate(known([*parts, _processes(1)]), sizes.source, sizes.cache_tokens)
    parts = [
        *(EstimatePart(what, size, 0) for what, size in own),
        EstimatePart("host copy", 0, sizes.weights_mib if options.host_copy else 0),
        *_beside(gpus),
    ]
    return Estimate(known(parts), sizes.source, sizes.cache_tokens)


def estimate_paged_asleep(path: Path, options: FolderOptions, gpus: int) -> Estimate | None:
    """Memory when asleep: weights on the host; context, graphs and buffers stay on each GPU. Never raises."""
    sizes = _read(path, options)
    if sizes is None:
        return None
    parts = (EstimatePart("weights", 0, sizes.weights_mib), *_beside(gpus))
    return Estimate(known(parts), sizes.source)


def _beside(gpus: int) -> Sequence[EstimatePart]:
    """What each GPU and its process take beside weights and cache, awake or asleep."""
    return (
        EstimatePart("graphs", GRAPHS_MIB * gpus, 0),
        EstimatePart("context", (CONTEXT_MIB + WORKSPACE_MIB) * gpus, 0),
        EstimatePart("NCCL", NCCL_MIB * gpus if gpus > 1 else 0, 0),
        _processes(gpus),
    )


def cache_mib(path: Path, options: FolderOptions) -> int | None:
    """MiB of the KV cache alone; None if the folder does not tell. Never raises."""
    sizes = _read(path, options)
    return None if sizes is None else sizes.cache_mib or None


def attention_heads(path: Path) -> int | None:
    """Its attention heads, which must be divisible by the number of GPUs; None if unknown. Never raises."""
    return Facts.of(path).number("num_attention_heads", "n_head") or None


def _processes(gpus: int) -> EstimatePart:
    """The server, and a process for each GPU."""
    return EstimatePart("processes", 0, PROCESS_MIB * (1 + gpus))


def _read(path: Path, options: FolderOptions) -> _Sizes | None:
    files, dtype = weight_files(path), options.wanted_dtype
    if not files:
        return None
    try:
        weights, facts = read_all(files), Facts(folder_config(path))
    except BadModelFile:
        whole = estimate_folder(path, FolderOptions(), 1)
        return None if whole is None else _Sizes(whole.need.gpu_mib, 0, 0, FILE_SIZE)
    number_bytes = max(2, DTYPE_BYTES.get(dtype or facts.text("dtype", "torch_dtype") or weights.dtype, 2))
    context = options.context or facts.context
    tokens = options.cache_tokens or context * options.sequences
    return _Sizes(
        mib(weight_bytes(weights, dtype)),
        mib(sum(_layer_numbers(layer, facts, context, tokens) for layer in folder_cache(facts)) * number_bytes),
        mib(_work_bytes(facts, options, number_bytes)),
        SAFETENSORS,
        tokens,
    )


def _layer_numbers(layer: LayerCache, facts: Facts, context: int, tokens: int) -> int:
    if facts.number("kv_lora_rank"):
        # Latent attention keeps one compressed vector for all heads.
        return (facts.number("kv_lora_rank") + facts.number("qk_rope_head_dim")) * tokens
    share = min(layer.window, context) / context if layer.window else 1
    return int((layer.keys + layer.values) * tokens * share)


def _work_bytes(facts: Facts, options: FolderOptions, number_bytes: float) -> float:
    logits = LOGITS_COPIES * options.sequences * facts.number("vocab_size")
    return facts.step_numbers(STEP_TOKENS) * number_bytes + logits * 4
