"""The files of one model of Transformers, in the form that `loading` takes.

Owns which files count, the dtype, and what identifies an arena that was filled from them. `building` makes modules,
`read_plan` matches tensors.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from ..engine.model_shape import text_config
from ..failures import BadModel
from . import building, reading
from .arena import Layout
from .building import BuildOptions
from .read_plan import plan
from .safetensors_files import StoredTensor, files_of, find_tensors

# Few models have a hundred layers. Some share the tensors of one layer, so having fewer tensors than layers is legal.
LAYERS_PLAUSIBLE: Final = 1_000


class TextModel:
    """Implements `ModelSource`. Reads headers only; raises BadModel."""

    maker = "Transformers"

    def __init__(self, options: BuildOptions) -> None:
        self._options = options
        self._config = building.read_config(options)
        self._tensors = _tensors(options)
        _check_layers(options, self._config, self._tensors)
        self._dtype = _dtype(self._config, self._tensors)
        self.identity = _identity(options, self._dtype)

    def build(self) -> torch.nn.Module | None:
        return building.build(self._options, self._config, self._dtype)

    def plan(self, module: torch.nn.Module, layout: Layout) -> list[reading.TensorRead]:
        return plan(module, layout, self._tensors, self._dtype)

    def load_whole(self) -> torch.nn.Module:
        module: torch.nn.Module = building.load_whole(self._options, self._config, self._dtype)
        return module


def _tensors(options: BuildOptions) -> dict[str, StoredTensor]:
    """The tensors of the files; empty for other formats than safetensors. Raises BadModel if those are not allowed."""
    head = building.stored_head_weights(options.sentence, options.allow_pickle) if options.sentence is not None else {}
    if options.gguf_file is not None:
        return {}
    if files_of(options.folder):
        return find_tensors(options.folder) | head
    if not options.allow_pickle:
        building.refuse_pickle(options)
    return {}


def _check_layers(options: BuildOptions, config: Any, tensors: dict[str, StoredTensor]) -> None:
    """Raises BadModel for an implausible number of layers: building them could exhaust time and memory."""
    layers = getattr(text_config(config), "num_hidden_layers", None)
    if tensors and isinstance(layers, int) and layers > max(len(tensors), LAYERS_PLAUSIBLE):
        raise BadModel(
            f"{options.folder} has {layers:,} layers by its config.json, and {len(tensors):,} tensors in its files. Is "
            "the download complete?"
        )


def _dtype(config: Any, tensors: dict[str, StoredTensor]) -> torch.dtype:
    """The configuration's dtype, else that of the first weights in a dtype we compute in."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    kinds = (reading.TORCH_DTYPES.get(tensor.dtype) for tensor in tensors.values())
    found = next((kind for kind in kinds if kind in ("bfloat16", "float16", "float32")), "float32")
    dtype: torch.dtype = getattr(torch, found)
    return dtype


def _identity(options: BuildOptions, dtype: torch.dtype) -> str:
    """A hash of an arena's content: the files as they are now, the options, and the version of Transformers."""
    found = hashlib.sha256()
    for part in (str(dtype), str(options.sentence), transformers.__version__):
        found.update(part.encode() + b"\0")
    for path in sorted(_sources(options)):
        seen = path.stat()
        found.update(f"{path.name}\0{seen.st_size}\0{seen.st_mtime_ns}\0".encode())
    return found.hexdigest()


def _sources(options: BuildOptions) -> list[Path]:
    head = options.sentence.projections.values() if options.sentence is not None else ()
    projections = [projection.weights_file for projection in head]
    if options.gguf_file is not None:
        return [options.folder / options.gguf_file, *projections]
    weights = files_of(options.folder) or sorted(options.folder.glob("pytorch_model*"))
    return [options.folder / "config.json", *weights, *projections]
