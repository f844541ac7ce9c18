"""A diffusers folder: model_index.json, the components it names, and where their weights are.

Owns what of a folder is trusted: components stay inside it, weights are safetensors unless pickles are allowed, and its
own code is refused unless allowed. Reads the index and headers, never weights. Every error is `BadModel`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..failures import BadModel
from ..weights.safetensors_files import StoredTensor, find_tensors

INDEX: Final = "model_index.json"
INDEX_MAX_BYTES: Final = 2**20
# The order of computation: texts are encoded, pictures denoised, then decoded. Others come last.
_ORDER: Final = ("text_encoder", "image_encoder", "prior", "transformer", "unet", "vae")
_NAME: Final = re.compile(r"[A-Za-z0-9_]+")
# How the packages name weight files. Diffusers puts the variant before the ending.
_WEIGHTS: Final = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Half-precision weights beside the full ones, by the dtype they are wanted for.
_VARIANTS: Final = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Component:
    """A part of a pipeline that has weights."""

    name: str
    package: str
    class_name: str
    folder: Path
    variant: str | None
    tensors: Mapping[str, StoredTensor]
    """Empty for a pickle."""


@dataclass(frozen=True, slots=True)
class PipelineFiles:
    folder: Path
    class_name: str
    components: tuple[Component, ...]
    """In the order of computation."""

    @property
    def files(self) -> list[Path]:
        """Everything that decides what an arena holds."""
        own = (file for component in self.components for file in component.folder.iterdir() if file.is_file())
        return sorted({self.folder / INDEX, *own})


def read_pipeline(folder: Path, dtype: str, *, trust_remote_code: bool, allow_pickle: bool) -> PipelineFiles:
    """What the folder holds. Raises BadModel."""
    index = _index(folder)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str) and not trust_remote_code:
        raise BadModel(
            f"{folder} brings the code of its pipeline. If you trust it, set trust_remote_code: true for this model."
        )
    named = [(name, said) for name, said in index.items() if isinstance(said, list) and said != [None, None]]
    found = [
        component
        for name, said in named
        if (component := _component(folder, name, said, dtype, trust_remote_code, allow_pickle)) is not None
    ]
    if not found:
        raise BadModel(f"{folder / INDEX} names no component with weights. Is it a pipeline of diffusers?")
    return PipelineFiles(folder, str(class_name), tuple(sorted(found, key=lambda one: _rank(one.name))))


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise BadModel(f"{folder} has no {INDEX}, so it is no pipeline of diffusers. Is the download complete?")
    if path.stat().st_size > INDEX_MAX_BYTES:
        raise BadModel(f"{path} has more than {INDEX_MAX_BYTES:,} bytes, which no index has.")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as reason:
        raise BadModel(f"{path} is not JSON: {reason or type(reason).__name__}.") from reason
    if not isinstance(index, dict):
        raise BadModel(f"{path} is no JSON object.")
    return index


def _component(
    folder: Path, name: str, said: list[Any], dtype: str, trust_remote_code: bool, allow_pickle: bool
) -> Component | None:
    """The component, or None if it has no weights (tokenizers, schedulers, image processors)."""
    if len(said) != 2 or not all(isinstance(word, str) for word in said) or not _NAME.fullmatch(name):
        raise BadModel(f"{folder / INDEX} says {str(said)[:100]} of {name[:100]}, which names no package and class.")
    package, class_name = said
    if not _NAME.fullmatch(package) or not _NAME.fullmatch(class_name):
        raise BadModel(f"{folder / INDEX} names a package or class that cannot be one: {str(said)[:100]}.")
    own = folder / name
    if not own.is_dir():
        raise BadModel(f"{folder / INDEX} names {name}, and there is no folder {own}. Is the download complete?")
    if any(own.glob("*.py")) and not trust_remote_code:
        raise BadModel(f"{own} brings code of its own. If you trust it, set trust_remote_code: true for this model.")
    stem = _WEIGHTS.get(package, "model")
    for variant in dict.fromkeys((_VARIANTS.get(dtype), None, *_VARIANTS.values())):
        if tensors := _tensors(own, stem, variant):
            return Component(name, package, class_name, own, variant, tensors)
    if not (own / "config.json").is_file():
        return None
    pickle = next((file for pattern in _PICKLES for file in sorted(own.glob(pattern))), None)
    if pickle is None:
        # Image processors of Transformers have a configuration and no weights.
        if package == "transformers" and class_name.endswith(("Processor", "Extractor")):
            return None
        raise BadModel(f"{own} has no weights: no {stem}.safetensors and no index of such files. Is it complete?")
    if not allow_pickle:
        raise BadModel(
            f"{own} has its weights in {pickle.name}, a pickle. Convert it to safetensors, or set allow_pickle: true"
            " for this model if you trust it."
        )
    return Component(name, package, class_name, own, None, {})


def _tensors(folder: Path, stem: str, variant: str | None) -> dict[str, StoredTensor]:
    """The tensors of one variant; empty if it is not there."""
    dotted = f".{variant}" if variant else ""
    whole = f"{stem}{dotted}.safetensors"
    indexes = (f"{stem}.safetensors.index{dotted}.json", f"{whole}.index.json")
    index = next((name for name in indexes if (folder / name).exists()), indexes[0])
    if not (folder / index).exists() and not (folder / whole).exists():
        return {}
    return find_tensors(folder, whole, index)


def _rank(name: str) -> tuple[int, str]:
    """Places of the order; `text_encoder_2` follows `text_encoder`."""
    known = [place for place, start in enumerate(_ORDER) if name.startswith(start)]
    return (known[0] if known else len(_ORDER), name)
