"""Transformers: folders with config.json and safetensors. They write text, or make embeddings. Owns which of the two a
folder does, its abilities and its sizes. `torch_engine.py` says how its workers start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from greenroom.config.schema import Ability, Model
from greenroom.config.sections.model import TEMPLATE_ENDING
from greenroom.core.model import Claim, DeviceId
from greenroom.engines.base import EngineFacts
from greenroom.engines.builtin.torch_engine import PIPELINE_INDEX, TorchEngine
from greenroom.engines.estimates.estimate import Estimate
from greenroom.engines.estimates.gguf_header import BadModelFile, has_tools
from greenroom.engines.estimates.hf_folder import folder_config, folder_fault
from greenroom.engines.estimates.hosted import (
    BATCH_DEFAULT,
    CONTEXTS_CACHED,
    MODULE_FILES,
    HostedOptions,
    estimate_asleep,
    estimate_ready,
)
from greenroom.engines.identity import FILES_MAX, file_identity, packages_identity
from greenroom.engines.installed import packages_missing
from greenroom.errors import UnusableModel

# Without one of these no model can be loaded.
PACKAGES: Final = ("torch", "transformers", "h11", "jinja2")
# Its presence says that a folder holds a model of sentence-transformers.
MODULES: Final = "modules.json"
# How architectures are called that give hidden states only, and which of them write text all the same.
HEADLESS: Final = ("Model", "ForMaskedLM")
WITH_HEAD: Final = ("LMHeadModel", "DoubleHeadsModel")
WRITES: Final = "AutoModelForCausalLM"
_A_PIPELINE: Final = "{path} is a pipeline of diffusers. Set `engine: diffusers` for it"
TEMPLATE_FILES: Final = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


class TransformersEngine(TorchEngine):
    name = "transformers"
    keeps_json = True

    def facts(self, model: Model) -> EngineFacts:
        return EngineFacts(_abilities(model), can_sleep=True, keeps_prefixes=not embeds(model))

    def estimate(self, model: Model, gpus: int) -> Estimate | None:
        return estimate_ready(Path(model.path or ""), _sizes(model), gpus)

    def estimate_asleep(self, model: Model, gpus: int) -> Estimate | None:
        return estimate_asleep(Path(model.path or ""), _sizes(model))

    def identity(self, model: Model) -> tuple[str, str]:
        return file_identity([Path(model.path or "")]), packages_identity(model.python, ("torch", "transformers"))

    def concurrency(self, model: Model) -> int:
        return model.concurrency or BATCH_DEFAULT

    def files(self, model: Model) -> list[Path]:
        """The files of its folder; for an embedding model also those of its modules, such as `1_Pooling`."""
        folder = Path(model.path or "")
        try:
            below = folder.glob(MODULE_FILES) if embeds(model) else ()
            return sorted(one for one in (*folder.iterdir(), *below) if one.is_file())[:FILES_MAX]
        except (OSError, ValueError):
            return []

    def unusable(self, model: Model) -> str | None:
        folder = Path(model.path or "")
        if os.path.isfile(folder / PIPELINE_INDEX):
            return _A_PIPELINE.format(path=model.path)
        # A folder of sentence-transformers has its parts in folders below.
        is_sentences = os.path.isfile(folder / MODULES)
        return None if is_sentences else folder_fault(folder, takes_pickles=model.allow_pickle)

    def missing(self, model: Model) -> str | None:
        return packages_missing(model, PACKAGES, "transformers")

    def options(self, model: Model, gpus: tuple[DeviceId, ...] | None, claim: Claim) -> Mapping[str, object]:
        if os.path.isfile(os.path.join(model.path or "", PIPELINE_INDEX)):
            raise UnusableModel(f"{_A_PIPELINE.format(path=model.path)}.")
        sizes = _sizes(model)
        return {
            **super().options(model, gpus, claim),
            "context": sizes.context,
            "cache_tokens": sizes.cache_tokens,
            "batch_max": sizes.batch_max,
            "embedding": embeds(model),
            "device": "cpu" if model.device == "cpu" or gpus == () else "auto",
            "trust_remote_code": model.trust_remote_code,
            "allow_pickle": model.allow_pickle,
            "skip_check": model.skip_check,
            "chat_template": model.chat_template,
            "threads": model.threads,
        }


def embeds(model: Model) -> bool:
    """As the operator says; else true for a folder of sentence-transformers, or a model without a head for text."""
    if model.says_mode:
        return model.embedding
    folder = Path(model.path or "")
    return os.path.isfile(folder / MODULES) or _is_headless(folder)


def _is_headless(folder: Path) -> bool:
    try:
        config = folder_config(folder)
    except BadModelFile:
        return False
    architectures, own_code = config.get("architectures"), config.get("auto_map")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if isinstance(own_code, dict) and WRITES in own_code:
        return False
    return bool(names) and all(name.endswith(HEADLESS) and not name.endswith(WITH_HEAD) for name in names)


def _abilities(model: Model) -> frozenset[Ability]:
    if embeds(model):
        return frozenset({Ability.EMBEDDINGS})
    tools = {Ability.TOOLS} if template_has_tools(model) else set()
    return frozenset({Ability.CHAT, Ability.COMPLETIONS, *tools})


def template_has_tools(model: Model) -> bool:
    """True if its chat template, or one of its folder, has a place for tools. Never raises."""
    given = model.chat_template or ""
    names = (given,) if given.endswith(TEMPLATE_ENDING) else TEMPLATE_FILES
    return any(has_tools(Path(model.path or "", name)) for name in names)


def _sizes(model: Model) -> HostedOptions:
    context = model.ctx_size or None
    cache_tokens = model.cache_tokens or (CONTEXTS_CACHED * context if context else None)
    return HostedOptions(context, cache_tokens, model.concurrency or BATCH_DEFAULT, model.dtype)
