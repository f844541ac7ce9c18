"""A pipeline of diffusers as one model: its components share an arena, and sleep and wake together.

Owns how components become one module, which dtype they are in, and how the pipeline is put together around them.
Diffusers loads what has no weights: tokenizers, schedulers, settings. Weights are read straight into the arena where
the files allow it.

Owns what of a folder is trusted: components stay inside it, weights are safetensors unless pickles are allowed, and its
own code is refused unless allowed. `read_pipeline` reads the index and headers, never weights. Every error is
`BadModel`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import diffusers
import torch
import transformers

from ..failures import BadModel
from ..weights import building
from ..weights.arena import Layout
from ..weights.read_plan import StoredParts, Unplanned, fill, translated, untranslated
from ..weights.reading import TORCH_DTYPES, TensorRead
from ..weights.safetensors_files import StoredTensor, find_tensors

DTYPES: Final = ("float32", "float16", "bfloat16")


class Components(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """The components of a pipeline by name, in the order of computation."""

    def __init__(self, parts: dict[str, torch.nn.Module]) -> None:
        super().__init__()
        self.config = None
        for name, part in parts.items():
            self.add_module(name, part)


class PipelineSource:
    """Implements `ModelSource`."""

    maker = "diffusers"

    def __init__(self, files: PipelineFiles, dtype: str, *, trust_remote_code: bool, allow_pickle: bool) -> None:
        self._files = files
        if not trust_remote_code and not hasattr(diffusers, files.class_name):
            raise BadModel(
                f"{files.folder} is a {files.class_name[:100]}, which diffusers {diffusers.__version__} does not have."
                " Is a newer version needed?"
            )
        self._dtype: torch.dtype = getattr(torch, dtype if dtype != "auto" else _stored_dtype(files))
        self._trusts, self._allows_pickle = trust_remote_code, allow_pickle
        self.identity = _identity(files, self._dtype)

    def build(self) -> torch.nn.Module | None:
        parts: dict[str, torch.nn.Module] = {}
        for component in self._files.components:
            made = self._built(component) if component.tensors else None
            if made is None:
                return None
            parts[component.name] = made
        return Components(parts)

    def plan(self, module: torch.nn.Module, layout: Layout) -> list[TensorRead]:
        found: dict[str, StoredParts] = {}
        for component in self._files.components:
            part: Any = getattr(module, component.name)
            if component.package == "transformers":
                stored = translated(part, component.tensors, self._dtype)
            elif getattr(part, "_keep_in_fp32_modules", None) and self._dtype != torch.float32:
                raise Unplanned(f"{component.name} keeps some modules in float32")
            else:
                stored = untranslated(component.tensors)
            found |= {f"{component.name}.{name}": parts for name, parts in stored.items()}
        return fill(layout, found)

    def load_whole(self) -> torch.nn.Module:
        known = {component.name: _class_of(component) for component in self._files.components}
        if None in known.values():
            # Only diffusers finds such classes, and only where its code is trusted.
            with self._foreign_code():
                found = diffusers.DiffusionPipeline.from_pretrained(**self._source, **self._how(None))
            parts = {name: getattr(found, name) for name in known}
        else:
            parts = {one.name: self._loaded(one, known[one.name]) for one in self._files.components}
        module = Components(parts)
        building.refuse_odd(module)
        return module.eval().requires_grad_(False)

    def _loaded(self, component: Component, kind: Any) -> torch.nn.Module:
        how = {"dtype": self._dtype, "local_files_only": True, "output_loading_info": True}
        with self._foreign_code():
            module, report = kind.from_pretrained(str(component.folder), **how, **self._how(component.variant))
        if missing := sorted(report.get("missing_keys") or ()):
            # Both packages would go on with random weights.
            raise BadModel(
                f"{component.folder} lacks {len(missing):,} weights of {component.class_name}, among them"
                f" {', '.join(missing[: building.NAMED_MAX])}. Is it complete?"
            )
        loaded: torch.nn.Module = module
        return loaded

    def _how(self, variant: str | None) -> dict[str, Any]:
        how: dict[str, Any] = {"variant": variant} if variant else {}
        return how | ({} if self._allows_pickle else {"use_safetensors": True})

    def assemble(self, module: torch.nn.Module) -> Any:
        """The pipeline around these components, which it shares. Raises BadModel."""
        parts = {component.name: getattr(module, component.name) for component in self._files.components}
        with self._foreign_code():
            pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(**self._source, **parts)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @property
    def _source(self) -> dict[str, Any]:
        return {
            "pretrained_model_name_or_path": str(self._files.folder),
            "dtype": self._dtype,
            "local_files_only": True,
            "trust_remote_code": self._trusts,
        }

    def _built(self, component: Component) -> torch.nn.Module | None:
        kind = _class_of(component)
        if kind is None:
            return None
        with self._foreign_code():
            return building.without_weights(lambda: _made(kind, component, self._dtype))

    def _foreign_code(self) -> AbstractContextManager[None]:
        return building.foreign_code(self._files.folder, self.maker)


def _made(kind: Any, component: Component, dtype: torch.dtype) -> torch.nn.Module:
    module: torch.nn.Module
    if component.package == "transformers":
        config = kind.config_class.from_pretrained(component.folder, local_files_only=True)
        if getattr(config, "quantization_config", None) is not None:
            raise BadModel(f"{component.folder} is quantised, and such weights cannot be kept in an arena.")
        module = kind._from_config(config, dtype=dtype)
    else:
        config = kind.load_config(component.folder, local_files_only=True)
        if config.get("quantization_config") is not None:
            raise BadModel(f"{component.folder} is quantised, and such weights cannot be kept in an arena.")
        # Past the method of diffusers, which warns of modules that it keeps in float32 even if there are none.
        module = torch.nn.Module.to(kind.from_config(config), dtype)
    return module


def _class_of(component: Component) -> Any:
    """The class of a component; None if it is not one of these packages, and only diffusers itself can find it."""
    packages: dict[str, Any] = {"diffusers": diffusers, "transformers": transformers}
    package = packages.get(component.package)
    if package is None:
        # A class beside its pipeline, such as `stable_diffusion.StableDiffusionSafetyChecker`.
        try:
            package = importlib.import_module(f"diffusers.pipelines.{component.package}")
        except ImportError:
            return None
    kind = getattr(package, component.class_name, None)
    if kind is None and component.package in packages:
        raise BadModel(
            f"{component.name} is a {component.class_name[:100]}, which {component.package} {package.__version__} does"
            " not have. Is a newer version needed?"
        )
    is_model = isinstance(kind, type) and issubclass(kind, torch.nn.Module) and hasattr(kind, "load_config")
    return kind if component.package == "transformers" or is_model else None


def _stored_dtype(files: PipelineFiles) -> str:
    """The dtype of most of the stored numbers."""
    sizes: dict[str, int] = dict.fromkeys(DTYPES, 0)
    for component in files.components:
        for tensor in component.tensors.values():
            kind = TORCH_DTYPES.get(tensor.dtype, "")
            if kind in sizes:
                sizes[kind] += tensor.size
    return max(sizes, key=lambda kind: sizes[kind])


def _identity(files: PipelineFiles, dtype: torch.dtype) -> str:
    """A hash of an arena's content: the files as they are now, the dtype, and the versions of the packages."""
    found = hashlib.sha256()
    for part in (str(dtype), diffusers.__version__, transformers.__version__):
        found.update(part.encode() + b"\0")
    for path in files.files:
        seen = path.stat()
        found.update(f"{path.relative_to(files.folder)}\0{seen.st_size}\0{seen.st_mtime_ns}\0".encode())
    return found.hexdigest()


# --- the folder -----------------------------------------------------------------------------------------------------


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
