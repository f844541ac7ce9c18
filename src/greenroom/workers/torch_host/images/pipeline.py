"""A pipeline of diffusers as one model: its components share an arena, and sleep and wake together.

Owns how components become one module, which dtype they are in, and how the pipeline is put together around them.
Diffusers loads what has no weights: tokenizers, schedulers, settings. Weights are read straight into the arena where
the files allow it.
"""

from __future__ import annotations

import hashlib
import importlib
from contextlib import AbstractContextManager
from typing import Any, Final

import diffusers
import torch
import transformers

from ..failures import BadModel
from ..weights import building
from ..weights.arena import Layout
from ..weights.read_plan import StoredParts, Unplanned, fill, translated, untranslated
from ..weights.reading import TORCH_DTYPES, TensorRead
from .pipeline_files import Component, PipelineFiles

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
