"""How a model's folder says to make embeddings, in the files that sentence-transformers writes.

Owns which modules, pooling modes and settings can be served; everything else is refused by name when the model is
loaded. Never imports torch, nor anything that a file names. Read `read_sentence_config` first.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from ..failures import BadModel
from .safetensors_files import StoredTensor, read_header

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
POOLING_MODES: Final[tuple[PoolingMode, ...]] = get_args(PoolingMode)
# The keys of older versions, in the order in which several modes are concatenated.
LEGACY_POOLING: Final[Mapping[str, PoolingMode]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Classes of torch.nn that a projection may name. They are looked up in torch.nn; no path is imported.
# fmt: off
ACTIVATIONS: Final = frozenset({
    "Identity", "Tanh", "ReLU", "ReLU6", "LeakyReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Sigmoid",
    "LogSigmoid", "Hardtanh", "Hardswish", "Hardsigmoid", "Softplus", "Softsign", "Tanhshrink",
})
# fmt: on
ACTIVATION_HOMES: Final = ("torch.nn", "torch.nn.modules.activation", "torch.nn.modules.linear")
# Modules may be anywhere in the package: their paths have changed between versions.
PACKAGE: Final = "sentence_transformers."
SETTINGS_FILES: Final = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# The gateway checks only folders of this form for whether their files may be read.
MODULE_PATH: Final = re.compile(r"[0-9]{1,3}_[A-Za-z0-9]{1,64}")
# Arguments for Transformers that change only the rounding of a vector.
# fmt: off
HARMLESS_ARGUMENTS: Final = frozenset({
    "trust_remote_code", "torch_dtype", "dtype", "attn_implementation", "padding_side", "use_fast", "use_cache",
    "local_files_only", "revision", "token",
})
# fmt: on
WEIGHTS_NAME: Final = "model.safetensors"
PICKLE_NAME: Final = "pytorch_model.bin"
# The submodule that holds the steps. No Transformers model has one of this name.
HEAD: Final = "sentence_head"
CONFIG_BYTES_MAX: Final = 4 * 2**20
MODULES_MAX: Final = 32
NUMBER_MAX: Final = 2**31


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer and an activation (a class of torch.nn) after the pooling. `folder` holds its weights."""

    folder: Path
    inside: int
    outside: int
    has_bias: bool
    activation: str

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its weights, by name."""
        bias = {"linear.bias": (self.outside,)} if self.has_bias else {}
        return {"linear.weight": (self.outside, self.inside), **bias}

    def stored(self) -> dict[str, StoredTensor]:
        """Its tensors in the safetensors file, by name. Raises BadModel if they differ from `shapes`."""
        found = {tensor.name: tensor for tensor in read_header(self.folder / WEIGHTS_NAME)}
        if {name: tensor.shape for name, tensor in found.items()} != self.shapes:
            has = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in list(found.items())[:4])
            wants = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes.items())
            raise BadModel(f"{self.folder / WEIGHTS_NAME} has {has}; by its config.json it should have {wants}.")
        return found

    @property
    def weights_file(self) -> Path:
        """Raises BadModel if there is none."""
        for name in (WEIGHTS_NAME, PICKLE_NAME):
            if (self.folder / name).exists():
                return self.folder / name
        raise BadModel(f"{self.folder} has no {WEIGHTS_NAME}. Is the download complete?")


HeadStep = Projection | Literal["normalize"]


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """How the hidden states of a text become a vector."""

    pooling: tuple[PoolingMode, ...] = ("mean",)
    includes_prompt: bool = True
    """False: tokens of the prompt are not pooled."""
    steps: tuple[HeadStep, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    tokens_max: int | None = None
    lowers_case: bool = False
    dimensions: int | None = None
    """Vectors are cut to this length."""

    @property
    def normalizes(self) -> bool:
        """True if vectors have norm one."""
        return bool(self.steps) and self.steps[-1] == "normalize"

    @property
    def projections(self) -> dict[int, Projection]:
        """The projections by their index among the steps."""
        return {number: step for number, step in enumerate(self.steps) if isinstance(step, Projection)}


def read_sentence_config(folder: Path) -> SentenceConfig:
    """Raises BadModel for invalid files, and for settings that cannot be served as sentence-transformers would."""
    modules = _read(folder / "modules.json")
    limit = _read_object(folder / "tokenizer_config.json").get("model_max_length")
    tokens_max = limit if isinstance(limit, int) and 0 < limit < NUMBER_MAX else None
    if modules is None:
        return SentenceConfig(pooling=_pooling_of_plain(folder), tokens_max=tokens_max)
    paths = _module_paths(folder, modules)
    settings = _settings(folder)
    config = _read_object(folder / "config_sentence_transformers.json")
    if config.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        raise BadModel(
            f"{folder} is a {config['model_type']} of sentence-transformers; only SentenceTransformer embeds."
        )
    prompts, default = _prompts(folder, config)
    pooling, includes_prompt = _pooling(paths[1][1])
    return SentenceConfig(
        pooling=pooling,
        includes_prompt=includes_prompt,
        steps=tuple(_step(kind, path) for kind, path in paths[2:] if kind != "Dropout"),
        prompts=prompts,
        default_prompt=default,
        tokens_max=_count(folder, settings, "max_seq_length") or tokens_max,
        lowers_case=settings.get("do_lower_case") is True,
        dimensions=_count(folder, config, "truncate_dim"),
    )


def _pooling_of_plain(folder: Path) -> tuple[PoolingMode, ...]:
    """For a folder without modules: its pooling config, else the last token for decoders and the mean for others."""
    if (folder / "1_Pooling" / "config.json").exists():
        return _pooling(folder / "1_Pooling")[0]
    config = _read_object(folder / "config.json")
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    return ("lasttoken",) if str(first).endswith("ForCausalLM") and config.get("is_causal", True) else ("mean",)


def _module_paths(folder: Path, modules: Any) -> list[tuple[str, Path]]:
    """Each module's kind and folder: a Transformer, a Pooling, then the steps."""
    file = folder / "modules.json"
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules) or len(modules) > MODULES_MAX:
        raise BadModel(f"{file} is not a list of modules.")
    found: list[tuple[str, Path]] = []
    for number, one in enumerate(modules):
        kind, path = one.get("type"), one.get("path")
        if not isinstance(kind, str) or not isinstance(path, str):
            raise BadModel(f"{file}: a module lacks its type or path.")
        if number and MODULE_PATH.fullmatch(path) is None:
            raise BadModel(f"{file} names {path[:120]!r}; its modules lie in folders such as 1_Pooling beside it.")
        name = kind.rpartition(".")[2]
        wanted = (("Transformer",), ("Pooling",))[number] if number < 2 else ("Dense", "Normalize", "Dropout")
        if not kind.startswith(PACKAGE) or name not in wanted:
            raise BadModel(
                f"{file}: module {number} is {kind[:120]}; {' or '.join(wanted)} can be served there and nothing else."
            )
        found.append((name, folder / path))
    if len(found) < 2:
        raise BadModel(f"{file} names no Pooling behind a Transformer.")
    if modules[0]["path"]:
        raise BadModel(f"{file}: its Transformer lies in {modules[0]['path'][:120]!r}. Move it to the folder itself.")
    return found


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of the Transformer module. Raises BadModel for those that are not supported."""
    file = next((folder / name for name in SETTINGS_FILES if (folder / name).exists()), folder / SETTINGS_FILES[0])
    config = _read_object(file)
    if (task := config.get("transformer_task", "feature-extraction")) != "feature-extraction":
        raise BadModel(f"{file}: its transformer_task is {task}; only feature-extraction embeds.")
    plain = {"method": "forward", "method_output_name": "last_hidden_state"}
    modes = config.get("modality_config", {"text": plain})
    if not isinstance(modes, dict) or "message" in modes or modes.get("text") != plain:
        raise BadModel(f"{file}: its modality_config has a message or no plain text; only plain text can be embedded.")
    if (output := config.get("module_output_name", "token_embeddings")) != "token_embeddings":
        raise BadModel(f"{file}: its module_output_name is {output}; only token_embeddings can be pooled.")
    if config.get("processing_kwargs"):
        raise BadModel(f"{file} has processing_kwargs, which are not supported.")
    for owner in ("model", "tokenizer", "processor", "config"):
        for name in (f"{owner}_args", f"{owner}_kwargs"):
            arguments = config.get(name) or {}
            if not isinstance(arguments, dict):
                raise BadModel(f"{file}: its {name} are no arguments by name.")
            if odd := sorted(set(arguments) - HARMLESS_ARGUMENTS):
                raise BadModel(f"{file}: {name} has {odd[0][:80]}, which is not supported.")
    return config


def _prompts(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """The prompts by name, and the default one, which precedes a text if none is chosen."""
    file = folder / "config_sentence_transformers.json"
    found = config.get("prompts") or {}
    if not isinstance(found, dict) or not all(isinstance(text, str | None) for text in found.values()):
        raise BadModel(f"{file}: its prompts are not texts.")
    # These two always exist; they are empty unless the model defines them.
    prompts = {"query": "", "document": ""} | {name: text or "" for name, text in found.items()}
    default = config.get("default_prompt_name")
    if default is None:
        return prompts, ""
    if not isinstance(default, str) or default not in prompts:
        raise BadModel(f"{file}: its default_prompt_name is {str(default)[:80]!r}, which is none of its prompts.")
    return prompts, prompts[default]


def _pooling(folder: Path) -> tuple[tuple[PoolingMode, ...], bool]:
    file = folder / "config.json"
    if not file.exists():
        raise BadModel(f"{file} is missing. Is the download complete?")
    config = _read_object(file)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in LEGACY_POOLING.items() if config.get(key)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    odd = [mode for mode in modes if mode not in POOLING_MODES] if isinstance(modes, list) and modes else [modes]
    if odd:
        raise BadModel(f"{file}: it pools by {str(odd[0])[:80]!r}; known: {', '.join(POOLING_MODES)}.")
    if len(modes) > len(POOLING_MODES):
        raise BadModel(f"{file}: it joins {len(modes):,} ways of pooling; there are {len(POOLING_MODES)}.")
    return tuple(modes), config.get("include_prompt", True) is not False


def _step(kind: str, folder: Path) -> HeadStep:
    file = folder / "config.json"
    config = _read_object(file)
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in (None, "sentence_embedding"):
            raise BadModel(f"{file}: its {name} is {str(config[name])[:80]!r}; only sentence_embedding is supported.")
    if kind == "Normalize":
        return "normalize"
    if config.get("use_residual"):
        raise BadModel(f"{file} has use_residual, which is not supported.")
    inside, outside = _count(folder, config, "in_features"), _count(folder, config, "out_features")
    if inside is None or outside is None:
        raise BadModel(f"{file} lacks in_features or out_features.")
    module, _, activation = str(config.get("activation_function", "torch.nn.Tanh")).rpartition(".")
    if module not in ACTIVATION_HOMES or activation not in ACTIVATIONS:
        named = str(config["activation_function"])[:120]
        raise BadModel(f"{file}: its activation_function is {named}; known: {', '.join(sorted(ACTIVATIONS))} of torch.")
    return Projection(folder, inside, outside, config.get("bias", True) is not False, activation)


def _count(folder: Path, config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is not None and (type(value) is not int or not 0 < value < NUMBER_MAX):
        raise BadModel(
            f"{folder}: {name} is {str(value)[:80]!r}, and should be a whole number from 1 to {NUMBER_MAX - 1:,}."
        )
    return value


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in this file; empty if there is no such file. Raises BadModel for anything else."""
    config = _read(path)
    if config is not None and not isinstance(config, dict):
        raise BadModel(f"{path} is not a JSON object.")
    return config or {}


def _read(path: Path) -> Any:
    try:
        seen = path.stat()
        if not stat.S_ISREG(seen.st_mode) or seen.st_size > CONFIG_BYTES_MAX:
            raise BadModel(f"{path} is not a plain file of at most {CONFIG_BYTES_MAX:,} bytes.")
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as reason:
        raise BadModel(f"{path} cannot be read: {reason.strerror}.") from reason
    except (ValueError, RecursionError) as reason:
        raise BadModel(f"{path} is not JSON: {reason}.") from reason
