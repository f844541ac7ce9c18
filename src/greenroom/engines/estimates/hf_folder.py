"""The memory a Transformers folder will take: shapes from config.json, weights from safetensors headers.

Owns the reading of such folders (and of diffusers pipelines, which are folders of folders). Weights are exact; the
cache follows the formulas of `kv_cache.py`; activations are bounded from above. Everything in a folder is untrusted:
stated lengths are bounded and must fit the file. Never reads weights.
"""

from __future__ import annotations

import functools
import io
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from greenroom.base.plain_file import open_plain, read_plain, why
from greenroom.engines.estimates.estimate import (
    FILE_SIZE,
    MIB,
    SAFETENSORS,
    Estimate,
    EstimatePart,
    file_bytes,
    known,
    part,
    placed,
)
from greenroom.engines.estimates.gguf_header import BadModelFile
from greenroom.engines.estimates.gguf_tensors import LAYERS_MAX
from greenroom.engines.estimates.kv_cache import LayerCache

# --- constants that measurements correct ----------------------------------------------------------------------------
# What a PyTorch process takes on each GPU beside its tensors: the CUDA context and the kernels of cuBLAS and attention,
# which are loaded when first used. Measured on an H200 with PyTorch 2.11: 518 MiB for the context alone, 742 with the
# kernels for 32-bit numbers and 758 with those for 16-bit ones.
CONTEXT_MIB: Final = 758
# The workspace of cuBLAS, allocated at the first use; 32 MiB on Hopper.
WORKSPACE_MIB: Final = 32
# PyTorch takes memory from the driver in pieces and rounds each up; this share of weights and cache is never used.
CACHING_SHARE: Final = 0.002
# Where heads share keys and values, attention copies those of one layer for all heads while it runs; with what the
# allocator cannot use again in time, so many copies of the keys alone are held at once.
WIDENED_COPIES: Final = 3
# The process itself, with torch and CUDA's own libraries: an allowance, not a measurement.
PROCESS_MIB: Final = 1_500
# Tokens computed at once while a prompt is read, if the context is longer.
TOKENS_AT_ONCE: Final = 2_048
# --------------------------------------------------------------------------------------------------------------------

# Weights as they lie in the files, plus cache and activations, where a header cannot be read.
FILE_SIZE_FACTOR: Final = 1.3
# Files of weights that are programs at the same time.
PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")
CONFIG_MAX_BYTES: Final = 4 * 2**20
CONTEXT_DEFAULT: Final = 4_096
NUMBER_MAX: Final = 2**31
# Bytes of a number, by its name in configurations and options.
# fmt: off
DTYPE_BYTES: Final[Mapping[str, float]] = {
    "float64": 8, "float32": 4, "float": 4, "fp32": 4, "F32": 4, "F64": 8, "bfloat16": 2, "bf16": 2, "BF16": 2,
    "float16": 2, "half": 2, "fp16": 2, "F16": 2, "fp8": 1, "float8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "int8": 1, "I8": 1,
}
# fmt: on


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """How it is run: how long a text, how many at once, in which kind of numbers (None or auto: as the files say), how
    many tokens are cached (None: as its server chooses). `host_copy`: the weights lie on the host, too, while ready."""

    context: int | None = None
    sequences: int = 1
    dtype: str | None = None
    cache_tokens: int | None = None
    host_copy: bool = False

    @property
    def wanted_dtype(self) -> str | None:
        return None if self.dtype == "auto" else self.dtype


class Facts:
    """A config.json of unknown shape. Missing or wrong values give a default, and numbers are bounded."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        # Multimodal models nest the shape of their language part.
        inner = said.get("text_config") or said.get("llm_config")
        self._said = {**said, **inner} if isinstance(inner, Mapping) else said

    @classmethod
    def of(cls, folder: Path) -> Facts:
        """Those of a folder; none if its config.json cannot be read, which fails its own load."""
        try:
            return cls(folder_config(folder))
        except BadModelFile:
            return cls({})

    @property
    def context(self) -> int:
        return self.number("max_position_embeddings", "n_positions", default=CONTEXT_DEFAULT)

    def step_numbers(self, tokens: int) -> int:
        """Numbers of activations while so many tokens are computed: the feed-forward part, and some rows."""
        width = self.number("hidden_size", "n_embd", "d_model")
        feed = self.number("intermediate_size", "ffn_dim", "n_inner", default=4 * width)
        experts = self.number("num_experts_per_tok") * self.number("moe_intermediate_size")
        return tokens * (3 * max(feed, experts) + 6 * width)

    def number(self, *names: str, default: int = 0) -> int:
        for name in names:
            value = self._said.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= NUMBER_MAX:
                return value
        return default

    def text(self, *names: str) -> str:
        return next((value for name in names if isinstance(value := self._said.get(name), str)), "")

    def words(self, name: str) -> tuple[str, ...]:
        value = self._said.get(name)
        return tuple(map(str, value[:LAYERS_MAX])) if isinstance(value, Sequence) and not isinstance(value, str) else ()

    def is_on(self, name: str) -> bool:
        return self._said.get(name) is True


def is_folder(path: Path) -> bool:
    """True if this is a Transformers or diffusers folder. Never raises."""
    try:
        return (path / "config.json").is_file() or (path / "model_index.json").is_file()
    except (OSError, ValueError):
        return False


def estimate_folder(path: Path, options: FolderOptions, gpus: int) -> Estimate | None:
    """The parts; by the files' size if a header is bad; None if there are no weights."""
    files = weight_files(path)
    if not files:
        return None
    try:
        weights, facts = read_all(files), Facts(folder_config(path))
    except BadModelFile:
        return _by_size(files, gpus)
    return Estimate(known(_parts(weights, facts, options, gpus)), SAFETENSORS)


def weight_files(path: Path) -> list[Path]:
    """The safetensors of a folder, or of the components of a pipeline that lie in folders below it."""
    try:
        is_pipeline = (path / "model_index.json").is_file()
        found = sorted(path.glob("*/*.safetensors" if is_pipeline else "*.safetensors"))[:FILES_MAX]
    except (OSError, ValueError):
        return []
    # Some hubs keep the same weights in one file and in parts; they are loaded once.
    split = [one for one in found if "-of-" in one.name]
    folders = {one.parent for one in split}
    return [one for one in found if one in split or one.parent not in folders]


def folder_config(path: Path) -> dict[str, Any]:
    """Its config.json; empty if there is none. Raises BadModelFile if it cannot be read."""
    try:
        said = msgspec.json.decode(read_plain(path / "config.json", CONFIG_MAX_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as reason:
        raise BadModelFile(f"{path}/config.json cannot be read: {reason}.") from reason
    return said if isinstance(said, dict) else {}


def folder_fault(path: Path, *, takes_pickles: bool) -> str | None:
    """Why its weights cannot be loaded; None if they can. Never raises."""
    try:
        if not os.path.lexists(path / "config.json"):
            return f"there is no config.json in {path}"
        folder_config(path)
        return weights_fault(path, weight_files(path), takes_pickles=takes_pickles)
    except BadModelFile as error:
        return error.message.rstrip(".")


def weights_fault(path: Path, files: Sequence[Path], *, takes_pickles: bool) -> str | None:
    """The same for these safetensors of a folder. Raises BadModelFile if one of them is bad."""
    if files:
        read_all(files)
        return None
    try:
        has_pickles = any(one.suffix in PICKLES for one in path.iterdir())
    except OSError:
        has_pickles = False
    if has_pickles and takes_pickles:
        return None
    said = "only pickles, which can run any code; convert them to safetensors, or set allow_pickle: true"
    return f"{path} has {said}" if has_pickles else f"{path} has no weights; is it complete?"


def _by_size(files: Sequence[Path], gpus: int) -> Estimate | None:
    size = sum(map(file_bytes, files))
    whole = int(size * FILE_SIZE_FACTOR / MIB) + 1
    return Estimate((EstimatePart("files", whole if gpus else 0, 0 if gpus else whole),), FILE_SIZE) if size else None


# --- the parts ------------------------------------------------------------------------------------------------------


def _parts(weights: SafetensorsHeader, facts: Facts, options: FolderOptions, gpus: int) -> list[EstimatePart]:
    number_bytes = DTYPE_BYTES.get(options.dtype or facts.text("torch_dtype", "dtype") or weights.dtype, 2)
    context = options.context or facts.context
    in_memory = weight_bytes(weights, options.dtype)
    layers = folder_cache(facts)
    cache_bytes = sum(_layer_bytes(layer, context, options.sequences) for layer in layers) * max(number_bytes, 1)
    parts = [
        placed("weights", in_memory, gpus > 0),
        placed("KV cache", cache_bytes, gpus > 0),
        placed("compute buffers", _activation_bytes(facts, layers, context, max(number_bytes, 2)), gpus > 0),
    ]
    if not gpus:
        return [*parts, EstimatePart("process", 0, PROCESS_MIB)]
    rounding = (in_memory + cache_bytes) * CACHING_SHARE
    return [
        *parts,
        part("allocator", rounding),
        EstimatePart("context", (CONTEXT_MIB + WORKSPACE_MIB) * gpus, PROCESS_MIB),
    ]


def weight_bytes(weights: SafetensorsHeader, dtype: str | None) -> float:
    """Size in memory: as in the files, unless a dtype converts them. Packed weights stay packed."""
    wanted = DTYPE_BYTES.get(dtype or "")
    if wanted is None:
        return weights.tensor_bytes
    kinds = weights.by_dtype.items()
    return sum(
        size * wanted / DTYPE_BYTES[kind] if kind in ("F64", "F32", "F16", "BF16") else size for kind, size in kinds
    )


def folder_cache(facts: Facts) -> tuple[LayerCache, ...]:
    """The cache of each layer as Transformers keeps it: keys and values of every KV head, windows cut to length."""
    count = min(facts.number("num_hidden_layers", "n_layer", "num_layers"), LAYERS_MAX)
    heads = facts.number("num_attention_heads", "n_head")
    kv_heads = facts.number("num_key_value_heads", default=heads)
    size = facts.number("head_dim", default=facts.number("hidden_size", "n_embd") // heads if heads else 0)
    keys = kv_heads * (facts.number("qk_nope_head_dim") + facts.number("qk_rope_head_dim") or size)
    values = kv_heads * facts.number("v_head_dim", default=size)
    windows = _windows(facts, count)
    kinds = facts.words("layer_types") or ("full_attention",) * count
    return tuple(
        LayerCache(keys, values, windows[number]) if "attention" in kind and "linear" not in kind else LayerCache()
        for number, kind in zip(range(count), kinds, strict=False)
    )


def _windows(facts: Facts, count: int) -> list[int]:
    window, kinds = facts.number("sliding_window", "attention_chunk_size"), facts.words("layer_types")
    if kinds:
        return [window if "full" not in kind else 0 for kind in (*kinds, *("full",) * count)[:count]]
    if pattern := facts.number("sliding_window_pattern"):
        return [window if (number + 1) % pattern else 0 for number in range(count)]
    # Qwen uses its window only if use_sliding_window is set; Mistral always does.
    return [window if facts.text("model_type") == "mistral" or facts.is_on("use_sliding_window") else 0] * count


def _layer_bytes(layer: LayerCache, context: int, sequences: int) -> int:
    """Count of numbers (not bytes) kept for a text of this length."""
    tokens = min(context, layer.window) if layer.window else context
    return (layer.keys + layer.values) * tokens * max(1, sequences)


def _activation_bytes(facts: Facts, layers: Sequence[LayerCache], context: int, number_bytes: float) -> float:
    """Peak while a prompt is read: the activations of a step, widened keys and values, logits of one token."""
    numbers = facts.step_numbers(min(context, TOKENS_AT_ONCE)) + _widened(facts, layers, context)
    return numbers * number_bytes + facts.number("vocab_size") * 4


def _widened(facts: Facts, layers: Sequence[LayerCache], context: int) -> int:
    """Numbers in the widened copies of a layer's keys, if heads share keys; of the largest layer."""
    heads = facts.number("num_attention_heads", "n_head")
    kv_heads = facts.number("num_key_value_heads", default=heads)
    if not kv_heads or kv_heads >= heads:
        return 0
    longest = max(
        (layer.keys * (min(context, layer.window) if layer.window else context) for layer in layers), default=0
    )
    return WIDENED_COPIES * longest * heads // kv_heads


# The format's own limit is 100 MB; the longest in use, with every expert by name, have 10.
HEADER_MAX_BYTES: Final = 32 * 2**20
# Files of one model.
FILES_MAX: Final = 1_000
HEADERS_MAX: Final = 2_048
_LENGTH: Final = struct.Struct("<Q")


class _Tensor(msgspec.Struct):
    dtype: str = ""
    # Absent in the file's metadata entry.
    data_offsets: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Bytes of all tensors, and by kind of number (`BF16`, `F8_E4M3` …)."""

    tensor_bytes: int
    by_dtype: Mapping[str, int]

    @property
    def dtype(self) -> str:
        """The dtype of most bytes."""
        return max(self.by_dtype, key=lambda kind: (self.by_dtype[kind], kind), default="")


def read_safetensors(path: str | Path) -> SafetensorsHeader:
    """One file's header. Raises BadModelFile for everything that is not a complete safetensors file. Blocks."""
    try:
        seen = os.stat(path)
        return _read(str(path), seen.st_size, seen.st_mtime_ns)
    except (OSError, ValueError) as reason:
        raise BadModelFile(f"{path} cannot be read: {why(reason)}.") from reason


def read_all(paths: Iterable[Path]) -> SafetensorsHeader:
    """All files of one model together. Raises BadModelFile if one of them is bad."""
    by_dtype: dict[str, int] = {}
    for path in list(paths)[:FILES_MAX]:
        for dtype, size in read_safetensors(path).by_dtype.items():
            by_dtype[dtype] = by_dtype.get(dtype, 0) + size
    return SafetensorsHeader(sum(by_dtype.values()), by_dtype)


@functools.lru_cache(maxsize=HEADERS_MAX)
def _read(path: str, file_bytes: int, changed_ns: int) -> SafetensorsHeader:
    with open_plain(path) as file:
        start = file.read(_LENGTH.size)
        if len(start) < _LENGTH.size:
            raise _bad(path, "it ends inside its header")
        length = _LENGTH.unpack(start)[0]
        if length > min(HEADER_MAX_BYTES, file_bytes - _LENGTH.size):
            raise _bad(path, f"its header would have {length:,} bytes")
        return _summed(path, _whole(file, length), file_bytes - _LENGTH.size - length)


def _whole(file: io.FileIO, length: int) -> bytes:
    """Read all `length` bytes: a single read may return less."""
    found = bytearray()
    while len(found) < length and (more := file.read(length - len(found))):
        found += more
    return bytes(found)


def _summed(path: str, header: bytes, data_bytes: int) -> SafetensorsHeader:
    try:
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
    except (msgspec.MsgspecError, RecursionError) as reason:
        raise _bad(path, f"its header is not understood ({reason})") from reason
    by_dtype: dict[str, int] = {}
    for name, tensor in tensors.items():
        begin, end = tensor.data_offsets
        if not 0 <= begin <= end <= data_bytes:
            raise _bad(path, "a tensor lies beyond its end; perhaps the copy or download was cut short")
        if name != "__metadata__":
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + end - begin
    return SafetensorsHeader(sum(by_dtype.values()), by_dtype)


def _bad(path: str, what: str) -> BadModelFile:
    return BadModelFile(f"{path} is not a usable safetensors file: {what}.")
