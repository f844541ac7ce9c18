"""From a model's files to a filled arena and a module that fits it.

Owns the order of attempts: adopt what another worker left, else fill the arena straight from the files by a plan, else
let the model's own package load it and copy it. On any failure the arena is left empty. Read `load` first.
"""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import transformers

from ..engine.model_shape import text_config
from ..failures import BadModel
from . import building
from .arena import HostArena, Layout, lay_out, view_of
from .building import BuildOptions
from .fold import ChunkTable
from .folding import Folding, FoldingFailed
from .read_plan import Unplanned, plan
from .reading import TORCH_DTYPES, LoadContext, TensorRead, read_all
from .safetensors_files import StoredTensor, files_of, find_tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModule:
    module: torch.nn.Module
    arena: HostArena
    read_bytes: int


class ModelSource(Protocol):
    """The files of one model, and what can be made of them. Its methods raise BadModel."""

    identity: str
    """A hash of what an arena filled from it holds."""
    maker: str
    """The package that loads it whole, as messages call it."""

    def build(self) -> torch.nn.Module | None:
        """The module without its weights; None if it cannot be built before they are there."""

    def plan(self, module: torch.nn.Module, layout: Layout) -> list[TensorRead]:
        """Which bytes of the files fill which places. Raises Unplanned if they would have to be computed."""

    def load_whole(self) -> torch.nn.Module:
        """The module with its weights in ordinary memory."""


def load(source: ModelSource, descriptor: int, filled: bool, context: LoadContext) -> LoadedModule:
    """Fill or adopt the arena behind this memfd. Raises BadModel, OutOfMemory, WorkCancelled; then it is empty."""
    context.raise_if_cancelled()
    module = source.build()
    context.raise_if_cancelled()
    if filled and module is not None:
        arena = HostArena.adopt(descriptor, source.identity, unfolds=context.folds)
        if arena is not None and building.fits(module, arena.layout):
            context.on_built(module, arena)
            context.on_reading()
            return LoadedModule(module, arena, 0)
    try:
        return _planned(source, module, descriptor, context)
    except Unplanned as reason:
        log.info("weights are loaded by %s: %s", source.maker, reason)
        unplanned = str(reason)
    try:
        return _whole(source, module, descriptor, context)
    except BadModel as error:
        # The messages of these packages seldom name a tensor; the reason why there was no plan does.
        raise BadModel(f"{error} ({unplanned})") from error


def _planned(
    source: ModelSource, module: torch.nn.Module | None, descriptor: int, context: LoadContext
) -> LoadedModule:
    if module is None:
        raise Unplanned("it cannot be built before its weights are there")
    layout = lay_out(building.state_of(module))
    transfers = source.plan(module, layout)
    arena = HostArena.create(descriptor, layout, source.identity, context.arena_max_bytes, context.host_free_bytes)
    context.on_built(module, arena)
    return LoadedModule(module, arena, _fill(arena, descriptor, context, transfers))


def _whole(source: ModelSource, module: torch.nn.Module | None, descriptor: int, context: LoadContext) -> LoadedModule:
    context.on_thread()
    context.on_reading()
    loaded = source.load_whole()
    context.raise_if_cancelled()
    layout = lay_out(building.state_of(loaded))
    arena = HostArena.create(descriptor, layout, source.identity, context.arena_max_bytes, context.host_free_bytes)
    copied = _fill(arena, descriptor, context, loaded)
    if module is None or not building.fits(module, layout):
        module = loaded
    del loaded
    # The first copy of the weights must be freed before memory is measured.
    gc.collect()
    context.on_built(module, arena)
    return LoadedModule(module, arena, copied)


def _fill(
    arena: HostArena, descriptor: int, context: LoadContext, content: Sequence[TensorRead] | torch.nn.Module
) -> int:
    """Fill, fold and seal the arena and return the bytes read. On failure the arena is left empty."""
    size = arena.layout.bytes
    places = {place.offset: place.size for place in arena.layout.places.values() if place.size}
    with ExitStack() as undo:
        undo.callback(arena.discard)
        folding = Folding(descriptor, size if context.folds else 0, places.items(), context.folding)
        undo.callback(folding.stop)
        done = _pour(content, arena, context, folding)
        try:
            folds = folding.finish(context.cancelled)
        except FoldingFailed as reason:
            if not context.cancelled.is_set():
                log.warning("weights are read again, and not folded: %s", reason)
            context.raise_if_cancelled()
            done, folds = _pour(content, arena, context, folding), {}
        context.raise_if_cancelled()
        arena.seal(ChunkTable(size, folds))
        undo.pop_all()
    return done


def _pour(
    content: Sequence[TensorRead] | torch.nn.Module, arena: HostArena, context: LoadContext, folding: Folding
) -> int:
    """Fill the arena from files, or with the tensors of a module, and return the bytes. Once folding has finished, it
    ignores what is filled again."""
    if isinstance(content, torch.nn.Module):
        done = copy_tensors(content, arena, context, folding)
    else:
        done = read_all(content, arena, context, folding)
    context.raise_if_cancelled()
    return done


def copy_tensors(module: torch.nn.Module, arena: HostArena, context: LoadContext, folding: Folding) -> int:
    """Copy every tensor to its place and return the bytes copied."""
    done: set[int] = set()
    copied = 0
    for name, tensor in building.state_of(module):
        place = arena.layout.places[name]
        if place.size and place.offset not in done:
            context.raise_if_cancelled()
            view_of(arena.tensor, place).copy_(tensor.detach())
            folding.filled(place.offset, place.size)
            done.add(place.offset)
            copied += place.size
    return copied


# --- text models ------------------------------------------------------------------------------------------------------


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

    def plan(self, module: torch.nn.Module, layout: Layout) -> list[TensorRead]:
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
    kinds = (TORCH_DTYPES.get(tensor.dtype) for tensor in tensors.values())
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
