"""The memory llama.cpp will take for a GGUF file with given options, from the file's headers.

Owns where each part lies: layers are put on the GPU from the last one back, the output first; the table of embeddings
stays on the host; the cache goes with its layer. Weights and cache are exact, buffers are bounded from above, and what
a process takes besides is a constant. Headers are cached until their file changes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from greenroom.engines.estimates.estimate import (
    FILE_SIZE,
    GGUF,
    MIB,
    Estimate,
    EstimatePart,
    file_bytes,
    known,
    part,
    placed,
)
from greenroom.engines.estimates.gguf_header import (
    ENCODERS,
    BadModelFile,
    GgufHeader,
    read_header,
    read_weights,
    shards,
    split_names,
)
from greenroom.engines.estimates.gguf_tensors import WeightBytes
from greenroom.engines.estimates.kv_cache import Cells, LayerCache, attention_bytes, gguf_cache, padded, state_bytes
from greenroom.engines.estimates.llama_options import LlamaOptions

# What a CUDA process takes on each GPU before it has allocated anything: context, kernels, cuBLAS. 0.3 to 0.6 GiB by
# GPU and driver: the README of llama.cpp's fit-params shows 254 MiB beyond what its dry run counts; Ollama reserves
# 457. Not measured here with llama.cpp.
CONTEXT_MIB: Final = 400
# The process itself, libraries and vocabulary: 30 to 40 MiB were measured for the embedded build on a CPU, with
# vocabularies of up to 49,000 tokens. CUDA's libraries come on top; that figure is an allowance, not a measurement.
PROCESS_MIB: Final = 60
PROCESS_CUDA_MIB: Final = 300
# Weights as they lie in the file, plus cache and buffers, where the headers cannot be read.
FILE_SIZE_FACTOR: Final = 1.1
# Numbers a token takes in the widest step of the graph, beside two rows of the feed-forward part: up to 7.7 rows of
# the model's width were measured with the embedded build.
ROWS: Final = 8
# Masks are kept at half precision for flash attention, at full precision without it.
MASK_BYTES, MASK_BYTES_PLAIN = 2, 4
_F32: Final = 4
# Headers kept; each is some kilobytes.
HEADERS_MAX: Final = 512
# The context length of a model that does not state its own.
CONTEXT_DEFAULT: Final = 4_096
# A projector computes an image at once, in buffers of its own: an allowance, not a measurement.
PROJECTOR_FACTOR: Final = 1.3


def estimate_gguf(options: LlamaOptions, gpus: int, *, logits_all: bool) -> Estimate | None:
    """The parts; by the file's size if its headers are not readable; None if there is no file. `logits_all`: room is
    kept for the logits of a whole batch (as older llama-servers do), not only of sampled tokens."""
    path = Path(options.model or "")
    try:
        model = _Model.of(path)
        parts = _parts(options, model, 0 if options.no_gpu else gpus, logits_all)
        return Estimate(parts, GGUF, _cells(options, model.header).context)
    except BadModelFile:
        return _by_size(path, options, gpus)


def files_of(options: LlamaOptions) -> list[Path]:
    """All files that a load reads, whether they exist or not."""
    first = Path(options.model or "")
    try:
        parts = list(shards(first, _header(*_stamp(first))))
    except (BadModelFile, OSError, ValueError):
        parts = [first]
    beside = (*options.projectors, *options.adapters, *filter(None, (options.draft,)))
    return [*parts, *map(Path, beside)]


def header_of(path: str | Path) -> GgufHeader | None:
    """The header of a file; None if it cannot be read. Cached until the file changes."""
    try:
        return _header(*_stamp(Path(path)))
    except (BadModelFile, OSError, ValueError):
        return None


def weights_of(path: str | Path) -> WeightBytes:
    """The weights of all files that it is split over, by place. Raises BadModelFile. Cached as the header is."""
    return _Model.of(Path(path)).weights


def check_gguf(options: LlamaOptions) -> None:
    """Raises BadModelFile if the model's file, or another that it is split over, is not a complete GGUF file."""
    _Model.of(Path(options.model or ""))


@dataclass(frozen=True, slots=True)
class _Model:
    """A file's header, with the weights of all files it is split over."""

    header: GgufHeader
    weights: WeightBytes

    @staticmethod
    def of(path: Path) -> _Model:
        """Raises BadModelFile."""
        try:
            header = _header(*_stamp(path))
            files = shards(path, header)
            weights = header.weights if len(files) == 1 else _weights(*(_stamp(file) for file in files))
        except (OSError, ValueError) as reason:
            raise BadModelFile(f"{path} cannot be looked at: {reason}") from reason
        return _Model(header, weights)


def _stamp(path: Path) -> tuple[str, int, int]:
    seen = os.stat(path)
    return str(path), seen.st_size, seen.st_mtime_ns


@functools.lru_cache(maxsize=HEADERS_MAX)
def _header(path: str, size: int, changed_ns: int) -> GgufHeader:
    return read_header(path)


@functools.lru_cache(maxsize=HEADERS_MAX)
def _weights(*stamps: tuple[str, int, int]) -> WeightBytes:
    return read_weights(Path(path) for path, _, _ in stamps)


# --- the parts ------------------------------------------------------------------------------------------------------


def _parts(options: LlamaOptions, model: _Model, gpus: int, logits_all: bool) -> tuple[EstimatePart, ...]:
    header, cache = model.header, gguf_cache(model.header)
    on_gpu = _layers_on_gpu(options.gpu_layers, len(cache)) if gpus else range(0)
    cells, keeps_on_gpu = _cells(options, header), on_gpu if options.kv_offload else range(0)
    kv_sizes = [attention_bytes(layer, cells, options.type_k, options.type_v) for layer in cache]
    projector_bytes = sum(map(file_bytes, options.projectors)) * PROJECTOR_FACTOR
    parts = [
        _weights_part(options, model.weights, on_gpu, len(cache)),
        _shared_out("KV cache", kv_sizes, keeps_on_gpu),
        _shared_out("recurrent state", [state_bytes(layer, options.sequences) for layer in cache], keeps_on_gpu),
        _compute_part(options, model, cache, cells, bool(on_gpu), logits_all),
        placed("projector", projector_bytes, bool(gpus) and options.projector_offload),
        placed("adapters", sum(map(file_bytes, options.adapters)), bool(on_gpu)),
        *_draft(options, gpus, logits_all),
        EstimatePart("context", CONTEXT_MIB * gpus if on_gpu else 0, 0),
        EstimatePart("process", 0, PROCESS_CUDA_MIB if on_gpu else PROCESS_MIB),
    ]
    return known(parts)


def _layers_on_gpu(gpu_layers: int, count: int) -> range:
    """Numbers of the layers on the GPU. The output counts as the layer after the last and goes there first."""
    most = count + 1
    return range(max(0, most - (most if gpu_layers < 0 else gpu_layers)), most)


def _cells(options: LlamaOptions, header: GgufHeader) -> Cells:
    context = options.context or header.context_length or CONTEXT_DEFAULT
    batch = min(options.ubatch, options.batch, padded(context)) or options.batch
    return Cells(context, options.sequences, options.unified, batch, options.windows_whole)


def _weights_part(options: LlamaOptions, weights: WeightBytes, on_gpu: range, count: int) -> EstimatePart:
    gpu = host = 0
    for number, (dense, experts) in enumerate(weights.layers):
        is_there = number in on_gpu
        stay = experts if number < options.cpu_experts else 0
        gpu += dense + experts - stay if is_there else 0
        host += stay if is_there else dense + experts
    # An embedding table that is also the head is on the host for the input and once more on the GPU for the output.
    head = weights.output_bytes + (0 if weights.has_head else weights.embedding_bytes)
    if count in on_gpu:
        return part("weights", gpu + head + weights.other_bytes, host + weights.input_bytes)
    return part("weights", gpu, host + weights.input_bytes + weights.output_bytes + weights.other_bytes)


def _shared_out(what: str, sizes: Sequence[int], on_gpu: range) -> EstimatePart:
    gpu = sum(size for number, size in enumerate(sizes) if number in on_gpu)
    return part(what, gpu, sum(sizes) - gpu)


def _compute_part(
    options: LlamaOptions, model: _Model, cache: Sequence[LayerCache], cells: Cells, on_gpu: bool, logits_all: bool
) -> EstimatePart:
    """An upper bound of the graph's widest step, the masks, and without flash attention the scores of one layer."""
    header, tokens = model.header, cells.batch
    looked_at = _looked_at(header, cache, cells)
    masks = tokens * sum(looked_at) * (MASK_BYTES if options.flash else MASK_BYTES_PLAIN)
    scores = 0 if options.flash else tokens * max(looked_at) * header.number("attention.head_count") * _F32
    width, logits = header.number("embedding_length"), model.weights.vocabulary * _F32
    rows = tokens if logits_all and not (options.embedding or options.reranking) else min(tokens, cells.sequences)
    widest = max(tokens * (2 * _feed_forward(header) + ROWS * width) * _F32, rows * logits + tokens * width * _F32)
    total = masks + scores + widest
    if not on_gpu:
        return part("compute buffers", 0, total)
    # Inputs are assembled on the host: masks and one row for each token.
    return part("compute buffers", total, masks + tokens * width * _F32 + cells.sequences * logits)


def _looked_at(header: GgufHeader, cache: Sequence[LayerCache], cells: Cells) -> list[int]:
    """Tokens that one token attends to, for each length of window: each has a mask of its own."""
    if ENCODERS.search(header.architecture):
        return [cells.batch]
    streams = 1 if cells.unified else cells.sequences
    return [cells.of(window) // streams for window in {layer.window for layer in cache if layer.keys}] or [0]


def _feed_forward(header: GgufHeader) -> int:
    """Width of the feed-forward part of one token; with experts, of all that are active at once."""
    experts = header.number("expert_used_count") * header.number("expert_feed_forward_length")
    return max(header.number("feed_forward_length"), experts + header.number("expert_shared_feed_forward_length"))


def _draft(options: LlamaOptions, gpus: int, logits_all: bool) -> list[EstimatePart]:
    """A draft model has weights and a cache of its own, in the same process."""
    if options.draft is None:
        return []
    own = LlamaOptions(
        model=options.draft,
        context=options.draft_context or options.context,
        gpu_layers=options.draft_gpu_layers,
        parallel=options.parallel,
        flash=options.flash,
    )
    found = estimate_gguf(own, gpus, logits_all=logits_all)
    parts = () if found is None else found.parts
    return [
        EstimatePart(f"draft {one.what}", one.gpu_mib, one.host_mib)
        for one in parts
        if one.what not in ("context", "process")
    ]


def _by_size(path: Path, options: LlamaOptions, gpus: int) -> Estimate | None:
    """All parts of a split file together."""
    size = sum(file_bytes(one) for one in split_names(path))
    on_gpu = bool(gpus) and options.gpu_layers != 0 and not options.no_gpu
    # At least 1 MiB, so that no file counts as nothing.
    whole = int(size * FILE_SIZE_FACTOR / MIB) + 1
    return (
        Estimate((EstimatePart("file", whole if on_gpu else 0, 0 if on_gpu else whole),), FILE_SIZE) if size else None
    )
