"""The memory of a pipeline of diffusers that our own worker hosts: ready, and asleep in the green room.

Owns which files of a pipeline are loaded: a component may have its weights in several precisions. `hf_folder.py` reads
headers. Everything in a folder is untrusted; never raises and never reads weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from greenroom.base.plain_file import read_plain
from greenroom.engines.estimates.estimate import FILE_SIZE, SAFETENSORS, Estimate, EstimatePart, known, mib
from greenroom.engines.estimates.gguf_header import BadModelFile
from greenroom.engines.estimates.hf_folder import (
    CONFIG_MAX_BYTES,
    DTYPE_BYTES,
    Facts,
    FolderOptions,
    folder_config,
    read_all,
    weight_bytes,
    weights_fault,
)
from greenroom.engines.estimates.hosted import ARENA_ROUNDING_MIB

INDEX: Final = "model_index.json"
# Names of half precision in the names of files, by the dtype that is wanted.
_VARIANTS: Final = {"float16": "fp16", "bfloat16": "bf16"}
COMPONENTS_MAX: Final = 64
# Components are arguments of Python classes.
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
# --- constants that measurements correct ----------------------------------------------------------------------------
# The decoder works on whole pictures: so many values of its widest layer at full size are held at once.
DECODER_COPIES: Final = 4
# Steps on latents, and the workspaces of cuDNN and cuBLAS.
STEPS_MIB: Final = 1_024
# The context of a worker that has several GPUs, on each of them, beside that of a worker that has one.
CONTEXT_MIB: Final = 512
# --------------------------------------------------------------------------------------------------------------------
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


def estimate_ready(folder: Path, dtype: str, gpus: int) -> Estimate | None:
    """Memory when ready on a GPU, or on the host if `gpus` is 0; None if there are no weights."""
    arena = _arena(folder, dtype)
    if arena is None:
        return None
    size_mib, source = arena
    work_mib = mib(_decoder_bytes(folder, dtype)) + STEPS_MIB
    host = EstimatePart("weights in the green room", 0, size_mib)
    if not gpus:
        return Estimate(known((host, EstimatePart("work", 0, work_mib))), source)
    return Estimate(known((EstimatePart("weights", size_mib, 0), EstimatePart("work", work_mib, 0), host)), source)


def estimate_asleep(folder: Path, dtype: str) -> Estimate | None:
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
        return weight_bytes(read_all(files), FolderOptions(dtype=None if dtype == "auto" else dtype)), SAFETENSORS
    except BadModelFile:
        return sum(map(_size, files)), FILE_SIZE


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
    vae = _facts(folder / "vae")
    widths = [int(word) for word in vae.words("block_out_channels") if word.isdigit()][:16]
    scale = 2 ** (len(widths) - 1) if widths else 1
    latents = max(_facts(folder / name).number("sample_size") for name in ("unet", "transformer"))
    side = min(latents * scale, SIDE_MAX) or SIDE
    width = 2 * min(widths, default=0)
    number_bytes = 4 if vae.is_on("force_upcast") else DTYPE_BYTES.get(dtype, 4)
    return DECODER_COPIES * side * side * width * number_bytes


def _facts(folder: Path) -> Facts:
    try:
        return Facts(folder_config(folder))
    except BadModelFile:
        return Facts({})


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
