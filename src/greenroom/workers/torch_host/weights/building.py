"""A model without its weights: the module as Transformers builds it, to be bound to memory that comes and goes.

Owns the configuration, the building on torch's meta device, the small buffers that no file holds (they are computed
once and stay on the device), and the binding of parameters to places of an arena. Never reads weights. A model that
cannot be built so is `None` here and goes through `fallback`.
"""

from __future__ import annotations

import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
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
# Two values a buffer is filled with before it is computed: what differs afterwards was not computed at all.
_FILLS: Final = (0, 1)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model is wanted, and how."""

    folder: Path
    attention: str | None
    """The name of an implementation; None: what Transformers takes by itself."""
    dtype: str = "auto"
    sentence: SentenceConfig | None = None
    """How its embeddings are made; None: it writes text."""
    trust_remote_code: bool = False
    allow_pickle: bool = False
    gguf_file: str | None = None

    @property
    def loading(self) -> dict[str, Any]:
        """What every loader of Transformers is told: this folder only, and whose code may run."""
        how: dict[str, Any] = {"trust_remote_code": self.trust_remote_code, "local_files_only": True}
        return how | ({"gguf_file": self.gguf_file} if self.gguf_file else {})


def read_config(options: ModelOptions) -> Any:
    """The model's configuration with the wanted dtype in it. Raises BadModel."""
    if options.dtype not in DTYPES:
        raise BadModel(f"dtype {options.dtype!r} is not known; choose one of {', '.join(DTYPES)}.")
    if not options.folder.is_dir():
        raise BadModel(f"{options.folder} is not a folder with a model in it.")
    if options.gguf_file is None and not (options.folder / "config.json").is_file():
        raise BadModel(f"{options.folder} has no config.json. Is the download complete?")
    config = call_transformers(options.folder, lambda: AutoConfig.from_pretrained(options.folder, **options.loading))
    if options.dtype != "auto":
        config.dtype = getattr(torch, options.dtype)
    elif isinstance(config.dtype, str):
        config.dtype = getattr(torch, config.dtype, None)
    return config


def auto_class_for(options: ModelOptions, config: Any) -> tuple[Any, dict[str, Any]]:
    """The class of Transformers that makes it, and what that is told beyond the usual. Raises BadModel."""
    how: dict[str, Any] = {"attn_implementation": options.attention} if options.attention is not None else {}
    if options.sentence is None:
        return AutoModelForCausalLM, how
    encoder = _class_in(AutoModelForTextEncoding, config)
    if encoder is not None and encoder.__name__.endswith("EncoderModel"):
        return AutoModelForTextEncoding, how
    if getattr(config, "is_encoder_decoder", False):
        raise BadModel(f"{config.model_type} has an encoder and a decoder, and its encoder alone cannot be served.")
    # The pooler of older encoders takes no part in hidden states, and many files lack its weights.
    whole = _class_in(AutoModel, config)
    if whole is not None and "add_pooling_layer" in inspect.signature(whole.__init__).parameters:
        how["add_pooling_layer"] = False
    return AutoModel, how


def _class_in(maker: Any, config: Any) -> Any:
    """The class by which a maker of Transformers makes models of this kind; None where it has none, or several."""
    found = maker._model_mapping.get(type(config), None)
    return found if inspect.isclass(found) else None


def build(options: ModelOptions, config: Any, dtype: torch.dtype) -> torch.nn.Module | None:
    """The module on the meta device, its own buffers real and on the CPU; None where that cannot be done."""
    if getattr(config, "quantization_config", None) is not None or options.gguf_file is not None:
        return None
    made = call_transformers(options.folder, lambda: _on_meta(options, config, dtype))
    if made is None:
        return None
    if options.sentence is not None:
        attach_head(made, options.sentence, dtype, "meta")
    module: torch.nn.Module = made.eval().requires_grad_(False)
    return module if _restore_buffers(module) and not _has_meta_tensor(module) else None


def _on_meta(options: ModelOptions, config: Any, dtype: torch.dtype) -> Any:
    maker, how = auto_class_for(options, config)
    try:
        with torch.device("meta"):
            return maker.from_config(config, dtype=dtype, trust_remote_code=options.trust_remote_code, **how)
    except (RuntimeError, NotImplementedError) as reason:
        # Code that looks at numbers while it builds; there are none here.
        if "meta" in str(reason):
            return None
        raise


def state_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything of a module that lives in an arena, tied names included, in the order of computation."""
    yield from module.state_dict(keep_vars=True).items()


def fits(module: torch.nn.Module, layout: Layout) -> bool:
    """The layout has everything this module needs, in its shape and kind."""
    for name, tensor in state_of(module):
        place = layout.places.get(name)
        if place is None or place.shape != tuple(tensor.shape) or f"torch.{place.dtype}" != str(tensor.dtype):
            return False
    return True


def bind(module: torch.nn.Module, flat: torch.Tensor, layout: Layout) -> None:
    """Let parameters and persistent buffers look at their places in `flat`; the other buffers move to its device."""
    views: dict[tuple[object, int, int], torch.Tensor] = {}
    for path, owner in module.named_modules():
        for table, make in ((owner._parameters, _parameter), (owner._buffers, _same)):
            for name, old in list(table.items()):
                place = layout.places.get(f"{path}.{name}" if path else name)
                if old is None:
                    continue
                if place is None or name in owner._non_persistent_buffers_set:
                    table[name] = make(old.to(flat.device))
                    continue
                # Tied names get one and the same object, by which Transformers and torch know that they are tied.
                key = make, place.offset, place.size
                if key not in views:
                    views[key] = make(view_of(flat, place))
                table[name] = views[key]


def call_transformers(folder: Path, call: Callable[[], Any]) -> Any:
    """What Transformers answers; of its many errors, all but missing memory and a lost device are BadModel."""
    try:
        return call()
    except BadModel:
        raise
    except Exception as reason:
        if is_fatal(reason) or is_memory(reason):
            raise
        raise BadModel(_explained(folder, reason)) from reason


def _explained(folder: Path, reason: Exception) -> str:
    if "trust_remote_code" in str(reason):
        return f"{folder} brings code of its own. If you trust it, set trust_remote_code: true for this model."
    if isinstance(reason, json.JSONDecodeError):
        return f"{folder} has a file that is not JSON: {reason}."
    return shortened(f"Transformers cannot load {folder}: {type(reason).__name__}: {reason}")


def _parameter(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _restore_buffers(module: torch.nn.Module) -> bool:
    """Compute the buffers that no file holds, as Transformers itself does. False where one of them stayed unknown."""
    return all(_restore(keeper, owner) for keeper, owner in _owners(module, module))


def _owners(keeper: torch.nn.Module, module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Modules with such buffers, each with the model around it that knows how to compute them."""
    keeper = module if hasattr(module, "_init_weights") else keeper
    if any(module._buffers.get(name) is not None for name in module._non_persistent_buffers_set):
        yield keeper, module
    for child in module.children():
        yield from _owners(keeper, child)


def _restore(keeper: Any, owner: torch.nn.Module) -> bool:
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
    """A tensor without memory hides where no table knows it."""
    return any(
        isinstance(value, torch.Tensor) and value.device.type == "meta"
        for part in module.modules()
        for value in vars(part).values()
    )


PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
NAMED_MAX: Final = 4


def gguf_in(folder: Path) -> str | None:
    """The GGUF file that is this model, where there is exactly one and nothing else."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    found = sorted(path.name for path in folder.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def refuse_pickle(options: ModelOptions) -> None:
    """Raises BadModel where the weights are pickles, which can run code, and that was not allowed."""
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


def load_whole(options: ModelOptions, config: Any, dtype: torch.dtype) -> Any:
    """The model in ordinary memory, as Transformers makes it. Raises BadModel, also where weights would be made up."""
    maker, told = auto_class_for(options, config)
    how = options.loading | told | ({} if options.allow_pickle or options.gguf_file else {"use_safetensors": True})
    module, report = call_transformers(
        options.folder, lambda: maker.from_pretrained(options.folder, dtype=dtype, output_loading_info=True, **how)
    )
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
    _refuse_odd(module)
    return module.eval().requires_grad_(False)


def _refuse_odd(module: torch.nn.Module) -> None:
    for name, tensor in state_of(module):
        if tensor.device.type == "meta" or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            kind = type(tensor).__name__ if tensor.device.type != "meta" else "left without a value"
            raise BadModel(
                shortened(f"{name} is {kind}, which cannot be kept in an arena. Use the model unquantised or as GGUF.")
            )


def attach_head(module: Any, sentence: SentenceConfig, dtype: torch.dtype, device: str) -> None:
    """Give the module its head, without weights on the meta device. Raises BadModel where widths do not fit."""
    width = int(text_config(module.config).hidden_size) * len(sentence.pooling)
    steps: list[torch.nn.Module] = []
    for step in sentence.steps:
        if step == "normalize":
            # It has no weights; this keeps its place.
            steps.append(torch.nn.Identity())
            continue
        if step.inside != width:
            raise BadModel(f"{step.folder} projects {step.inside:,} numbers, and is given {width:,}.")
        linear = torch.nn.Linear(width, step.outside, bias=step.has_bias, dtype=dtype, device=device)
        activation = getattr(torch.nn, step.activation)()
        steps.append(torch.nn.Sequential(OrderedDict(linear=linear, activation=activation)))
        width = step.outside
    # The elements of a list wait for their own weights only, as layers do.
    module.add_module(HEAD, torch.nn.ModuleList(steps).eval().requires_grad_(False))


def stored_head_weights(sentence: SentenceConfig, allow_pickle: bool) -> dict[str, StoredTensor]:
    """Where its weights lie in files, by the names they have in the module. Pickles are left out.

    Raises BadModel for files with others than the configuration says, and for pickles that were not allowed.
    """
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
    """Read all weights into ordinary memory, pickles too. Raises BadModel."""
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
