"""Which bytes of which files fill an arena, where that is known without loading the model.

Owns the match between tensors in files and places of the module. Transformers translates the names. Experts that are
stored one by one follow each other in the arena, so each has a place of its own. Whatever would have to be computed is
`Unplanned`, and Transformers loads the model instead. Never reads weights. Read `plan` first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .arena import Layout, TensorPlace
from .reading import CONVERTED, TORCH_DTYPES, TensorRead
from .safetensors_files import StoredTensor


class Unplanned(Exception):
    """The files do not match the module as they are. The message says why."""


@dataclass(slots=True)
class StoredParts:
    """The stored tensors for one name of the module: one, or several to be joined."""

    converter: Any = None
    by_pattern: dict[str, list[StoredTensor]] = field(default_factory=dict)


def plan(module: Any, layout: Layout, tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> list[TensorRead]:
    """Transfers that fill every place of a model of Transformers. Raises Unplanned."""
    return fill(layout, translated(module, tensors, dtype))


def fill(layout: Layout, found: Mapping[str, StoredParts]) -> list[TensorRead]:
    """Transfers that fill every place with the stored tensors of its name. Raises Unplanned."""
    return [transfer for place, names in _by_place(layout) for transfer in _transfers(place, names, found)]


def translated(module: Any, tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> dict[str, StoredParts]:
    """The files' tensors by the names of a module of Transformers. Raises Unplanned."""
    wanted = module.state_dict()
    for pattern in module._get_dtype_plan(dtype) if hasattr(module, "_get_dtype_plan") else ():
        if any(re.search(pattern.replace("*", r"\w+"), name) for name in wanted):
            raise Unplanned(f"the model keeps {pattern} in another dtype")
    return _translated(module, tensors, wanted)


def untranslated(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredParts]:
    """The same where the names in the files are those of the module."""
    return {name: StoredParts(None, {"": [tensor]}) for name, tensor in tensors.items()}


def _translated(
    module: Any, tensors: Mapping[str, StoredTensor], wanted: Mapping[str, torch.Tensor]
) -> dict[str, StoredParts]:
    """As this version of Transformers translates them."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError as reason:
        raise Unplanned(f"this version of Transformers translates names in another way: {reason}") from reason
    changes = get_model_conversion_mapping(module)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    owners = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = module.base_model_prefix
    found: dict[str, StoredParts] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        parts = found.setdefault(target, StoredParts(owners.get(pattern)))
        parts.by_pattern.setdefault(pattern or "", []).append(tensors[name])
    return found


def _by_place(layout: Layout) -> list[tuple[TensorPlace, list[str]]]:
    found: dict[int, tuple[TensorPlace, list[str]]] = {}
    for name, place in layout.places.items():
        # Empty places share an offset with the next place; there is nothing to read for them.
        if place.size:
            found.setdefault(place.offset, (place, []))[1].append(name)
    return list(found.values())


def _transfers(place: TensorPlace, names: list[str], found: Mapping[str, StoredParts]) -> Iterator[TensorRead]:
    stored = [found[name] for name in names if name in found]
    if not stored:
        raise Unplanned(f"no file has {names[0]}")
    if len(stored) > 1:
        # The configuration says they are tied; whether they are equal is known only after reading both.
        raise Unplanned(f"{names[0]} and {names[1]} are one in the model and two in the files")
    if stored[0].converter is not None:
        yield from _joined(place, names[0], stored[0])
        return
    sources = [source for tensors in stored[0].by_pattern.values() for source in tensors]
    if len(sources) > 1:
        raise Unplanned(f"{names[0]} is in the files more than once")
    yield _transfer(sources[0], place)


def _joined(place: TensorPlace, name: str, parts: StoredParts) -> Iterator[TensorRead]:
    """Experts stored one by one: `[expert, rows, columns]`, with the rows of several projections in sequence."""
    sources = [parts.by_pattern.get(pattern, []) for pattern in parts.converter.source_patterns]
    if not _only_joins(parts.converter, len(sources)) or len(place.shape) != 3:
        raise Unplanned(f"{name} is stored in another form than it is used in")
    experts, rows, columns = place.shape
    if any(len(tensors) != experts for tensors in sources):
        raise Unplanned(f"{name} has {experts} experts, and the files {[len(tensors) for tensors in sources]}")
    if any(len(tensor.shape) != 2 for tensors in sources for tensor in tensors):
        raise Unplanned(f"{name} is made of tensors that are no matrices")
    start = place.offset
    item = getattr(torch, place.dtype).itemsize
    for together in zip(*sources, strict=True):
        if sum(tensor.shape[0] for tensor in together) != rows:
            raise Unplanned(f"{name} has {rows} rows for each expert, and the files another number")
        for tensor in together:
            shape = (tensor.shape[0], columns)
            yield _transfer(tensor, replace(place, shape=shape, offset=start, size=math.prod(shape) * item))
            start += math.prod(shape) * item


def _only_joins(converter: Any, count: int) -> bool:
    """True if the converter only concatenates: rows of projections, then experts."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    wanted = [("MergeModulelist", 0), ("Concatenate", 1)]
    return len(converter.target_patterns) == 1 and steps == wanted[: 1 if count == 1 else 2]


def _transfer(source: StoredTensor, place: TensorPlace) -> TensorRead:
    if source.shape != place.shape:
        raise Unplanned(
            f"{source.name} is {list(source.shape)} in {source.file.name} and {list(place.shape)} in the model"
        )
    kind = TORCH_DTYPES.get(source.dtype)
    if kind is None or (kind != place.dtype and not {kind, place.dtype} <= CONVERTED):
        raise Unplanned(f"{source.name} is {source.dtype} in {source.file.name} and {place.dtype} in the model")
    return TensorRead(source, place)
