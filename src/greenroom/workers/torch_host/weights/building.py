"""Builds modules with Transformers: without weights, to be bound to an arena, or whole where that cannot be done.

Owns the configuration, building on torch's meta device, the small buffers that no file holds, binding parameters to
places of an arena, and the head of embedding models. Quantised models, GGUF, pickles and files that fit no plan are
loaded whole into ordinary memory, which takes twice the memory and longer. Never loads a pickle that was not allowed.
"""

from __future__ import annotations

import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForTextEncoding

from ..engine.model_shape import text_config
from ..failures import BadModel, is_fatal, is_memory, shortened
from .arena import Layout, view_of
from .safetensors_files import StoredTensor
from .sentence_config import HEAD, PICKLE_NAME, SentenceConfig

DTYPES: Final = ("auto", "bfloat16", "float16", "float32")
PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
NAMED_MAX: Final = 4
# A buffer is filled with each of these before it is computed: if the results differ, it was not computed.
_FILLS: Final = (0, 1)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Which model to load, and how."""

    folder: Path
    attention: str | None
    """The name of an attention implementation; None: Transformers' default."""
    dtype: str = "auto"
    sentence: SentenceConfig | None = None
    """How it makes embeddings; None: it generates text."""
    trust_remote_code: bool = False
    allow_pickle: bool = False
    gguf_file: str | None = None

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of every Transformers loader: only local files, and whether the model's own code may run."""
        how: dict[str, Any] = {"trust_remote_code": self.trust_remote_code, "local_files_only": True}
        return how | ({"gguf_file": self.gguf_file} if self.gguf_file else {})


def read_config(options: BuildOptions) -> Any:
    """The model's configuration, with the wanted dtype. Raises BadModel."""
    if options.dtype not in DTYPES:
        raise BadModel(f"dtype {options.dtype!r} is not known; choose one of {', '.join(DTYPES)}.")
    if not options.folder.is_dir():
        raise BadModel(f"{options.folder} is not a folder with a model in it.")
    if options.gguf_file is None and not (options.folder / "config.json").is_file():
        raise BadModel(f"{options.folder} has no config.json. Is the download complete?")
    with foreign_code(options.folder):
        config = AutoConfig.from_pretrained(options.folder, **options.loading)
    if options.dtype != "auto":
        config.dtype = getattr(torch, options.dtype)
    elif isinstance(config.dtype, str):
        config.dtype = getattr(torch, config.dtype, None)
    return config


def auto_class_for(options: BuildOptions, config: Any) -> tuple[Any, dict[str, Any]]:
    """The auto class that builds the model, and extra arguments for it. Raises BadModel."""
    how: dict[str, Any] = {"attn_implementation": options.attention} if options.attention is not None else {}
    if options.sentence is None:
        return AutoModelForCausalLM, how
    encoder = _class_in(AutoModelForTextEncoding, config)
    if encoder is not None and encoder.__name__.endswith("EncoderModel"):
        return AutoModelForTextEncoding, how
    if getattr(config, "is_encoder_decoder", False):
        raise BadModel(f"{config.model_type} has an encoder and a decoder, and its encoder alone cannot be served.")
    # Hidden states do not depend on the pooler of older encoders, and many files lack its weights.
    whole = _class_in(AutoModel, config)
    if whole is not None and "add_pooling_layer" in inspect.signature(whole.__init__).parameters:
        how["add_pooling_layer"] = False
    return AutoModel, how


def _class_in(maker: Any, config: Any) -> Any:
    """The class an auto class builds for this configuration; None if it has none or several."""
    found = maker._model_mapping.get(type(config), None)
    return found if inspect.isclass(found) else None


def build(options: BuildOptions, config: Any, dtype: torch.dtype) -> torch.nn.Module | None:
    """The module on the meta device, with its computed buffers on the CPU; None if that cannot be done."""
    if getattr(config, "quantization_config", None) is not None or options.gguf_file is not None:
        return None
    maker, how = auto_class_for(options, config)

    def make() -> torch.nn.Module:
        made = maker.from_config(config, dtype=dtype, trust_remote_code=options.trust_remote_code, **how)
        if options.sentence is not None:
            attach_head(made, options.sentence, dtype, "meta")
        module: torch.nn.Module = made
        return module

    with foreign_code(options.folder):
        return without_weights(make)


def without_weights(make: Callable[[], torch.nn.Module]) -> torch.nn.Module | None:
    """What `make` builds, on the meta device, with its computed buffers on the CPU; None if that cannot be done."""
    try:
        with torch.device("meta"):
            made = make()
    except (RuntimeError, NotImplementedError) as reason:
        # The model's code reads values while it builds, and meta tensors have none.
        if "meta" in str(reason):
            return None
        raise
    module = made.eval().requires_grad_(False)
    return module if _restore_buffers(module) and not _has_meta_tensor(module) else None


def state_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a module that belong into an arena, tied names included, in the order of computation."""
    yield from module.state_dict(keep_vars=True).items()


def fits(module: torch.nn.Module, layout: Layout) -> bool:
    """True if the layout has every tensor of this module, with its shape and dtype."""
    for name, tensor in state_of(module):
        place = layout.places.get(name)
        if place is None or place.shape != tuple(tensor.shape) or f"torch.{place.dtype}" != str(tensor.dtype):
            return False
    return True


def bind(module: torch.nn.Module, flat: torch.Tensor, layout: Layout, prefix: str = "") -> None:
    """Make parameters and persistent buffers views of their places in `flat`; move other buffers to its device.
    `prefix` is the name of this module in the layout; empty: it is all of it."""
    views: dict[tuple[object, int, int], torch.Tensor] = {}
    for path, owner in module.named_modules(prefix=prefix):
        for table, make in ((owner._parameters, _parameter), (owner._buffers, _same)):
            for name, old in list(table.items()):
                place = layout.places.get(f"{path}.{name}" if path else name)
                if old is None:
                    continue
                if place is None or name in owner._non_persistent_buffers_set:
                    table[name] = make(old.to(flat.device))
                    continue
                # Tied names get the same object: Transformers and torch recognize ties by it.
                key = make, place.offset, place.size
                if key not in views:
                    views[key] = make(view_of(flat, place))
                table[name] = views[key]


@contextmanager
def foreign_code(folder: Path, package: str = "Transformers") -> Iterator[None]:
    """Inside, errors become BadModel, except lack of memory and a lost device."""
    try:
        yield
    except BadModel:
        raise
    except Exception as reason:
        if is_fatal(reason) or is_memory(reason):
            raise
        raise BadModel(_explained(folder, reason, package)) from reason


def _explained(folder: Path, reason: Exception, package: str) -> str:
    if "trust_remote_code" in str(reason):
        return f"{folder} brings code of its own. If you trust it, set trust_remote_code: true for this model."
    if isinstance(reason, json.JSONDecodeError):
        return f"{folder} has a file that is not JSON: {reason}."
    return shortened(f"{package} cannot load {folder}: {type(reason).__name__}: {reason}")


def _parameter(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _restore_buffers(module: torch.nn.Module) -> bool:
    """Compute the buffers that no file holds, as Transformers does. False if one could not be computed."""
    return all(_restore(keeper, owner) for keeper, owner in _owners(module, module))


def _owners(keeper: torch.nn.Module, module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Modules with such buffers, each with the model around it that can compute them."""
    keeper = module if hasattr(module, "_init_weights") else keeper
    if any(module._buffers.get(name) is not None for name in module._non_persistent_buffers_set):
        yield keeper, module
    for child in module.children():
        yield from _owners(keeper, child)


def _restore(keeper: Any, owner: torch.nn.Module) -> bool:
    if not hasattr(keeper, "_init_weights"):
        return False
    names = [name for name in owner._non_persistent_buffers_set if owner._buffers.get(name) is not None]
    computed: list[list[torch.Tensor]] = []
    for fill in _FILLS:
        for name in names:
            old = owner._buffers[name]
            if old is not None:
                owner._buffers[name] = torch.full_like(old, fill, device="cpu")
        with torch.no_grad():
            keeper._init_weights(owner)
        computed.append([tensor for name in names if (tensor := owner._buffers[name]) is not None])
    return all(torch.equal(one, other) for one, other in zip(*computed, strict=True))


def _has_meta_tensor(module: torch.nn.Module) -> bool:
    """True if a plain attribute of a module is a meta tensor: it would stay without a value."""
    return any(
        isinstance(value, torch.Tensor) and value.device.type == "meta"
        for part in module.modules()
        for value in vars(part).values()
    )


def gguf_in(folder: Path) -> str | None:
    """The name of the folder's only GGUF file; None if there are several or a config.json."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    found = sorted(path.name for path in folder.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def refuse_pickle(options: BuildOptions) -> None:
    """Raises BadModel if there are no safetensors: pickles can run code and must be allowed."""
    if options.allow_pickle:
        return
    found = [name for name in PICKLES if (options.folder / name).exists()]
    found += sorted(path.name for path in options.folder.glob("*.bin") if path.name.startswith("pytorch_model-"))[:1]
    if found:
        raise BadModel(
            f"{options.folder} has its weights in {found[0]}, a pickle. Convert it to safetensors, or set"
            " allow_pickle: true for this model if you trust it."
        )
    raise BadModel(f"{options.folder} has no weights: no model.safetensors and no index of such files. Is it complete?")


def load_whole(options: BuildOptions, config: Any, dtype: torch.dtype) -> Any:
    """The model in ordinary memory, loaded by Transformers. Raises BadModel, also if weights are missing."""
    maker, told = auto_class_for(options, config)
    how = options.loading | told | ({} if options.allow_pickle or options.gguf_file else {"use_safetensors": True})
    with foreign_code(options.folder):
        module, report = maker.from_pretrained(options.folder, dtype=dtype, output_loading_info=True, **how)
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        named = ", ".join(missing[:NAMED_MAX])
        raise BadModel(
            f"{options.folder} lacks {len(missing):,} weights of {type(module).__name__}, among them {named}. Is this"
            " the right kind of model, and is it complete?"
        )
    if options.sentence is not None:
        attach_head(module, options.sentence, dtype, "cpu")
        fill_head(module, options.sentence)
    refuse_odd(module)
    return module.eval().requires_grad_(False)


def refuse_odd(module: torch.nn.Module) -> None:
    for name, tensor in state_of(module):
        if tensor.device.type == "meta" or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            kind = type(tensor).__name__ if tensor.device.type != "meta" else "left without a value"
            raise BadModel(
                shortened(f"{name} is {kind}, which cannot be kept in an arena. Use the model unquantised or as GGUF.")
            )


def attach_head(module: Any, sentence: SentenceConfig, dtype: torch.dtype, device: str) -> None:
    """Add the embedding head to the module; on the meta device it has no weights. Raises BadModel if widths differ."""
    width = int(text_config(module.config).hidden_size) * len(sentence.pooling)
    steps: list[torch.nn.Module] = []
    for step in sentence.steps:
        if step == "normalize":
            # No weights; keeps the numbering of the steps.
            steps.append(torch.nn.Identity())
            continue
        if step.inside != width:
            raise BadModel(f"{step.folder} projects {step.inside:,} numbers, and is given {width:,}.")
        linear = torch.nn.Linear(width, step.outside, bias=step.has_bias, dtype=dtype, device=device)
        activation = getattr(torch.nn, step.activation)()
        steps.append(torch.nn.Sequential(OrderedDict(linear=linear, activation=activation)))
        width = step.outside
    # Elements of a module list wait for their own weights only, as layers do.
    module.add_module(HEAD, torch.nn.ModuleList(steps).eval().requires_grad_(False))


def stored_head_weights(sentence: SentenceConfig, allow_pickle: bool) -> dict[str, StoredTensor]:
    """The head's tensors in its files, by their names in the module. Pickles are left out. Raises BadModel for files
    that differ from the configuration, and for pickles that were not allowed."""
    found: dict[str, StoredTensor] = {}
    for number, projection in sentence.projections.items():
        if projection.weights_file.name != PICKLE_NAME:
            found |= {f"{HEAD}.{number}.{name}": tensor for name, tensor in projection.stored().items()}
        elif not allow_pickle:
            raise BadModel(
                f"{projection.weights_file} is a pickle. Convert it to safetensors, or set allow_pickle: true for this"
                " model if you trust it."
            )
    return found


def fill_head(module: Any, sentence: SentenceConfig) -> None:
    """Load the head's weights into ordinary memory, also from pickles. Raises BadModel."""
    from safetensors.torch import load_file

    for number, projection in sentence.projections.items():
        path = projection.weights_file
        try:
            is_pickle = path.name == PICKLE_NAME
            weights = torch.load(path, map_location="cpu", weights_only=True) if is_pickle else load_file(path)
            getattr(module, HEAD)[number].load_state_dict(weights)
        except Exception as reason:
            if is_memory(reason):
                raise
            raise BadModel(shortened(f"{path} cannot be read: {type(reason).__name__}: {reason}")) from reason
