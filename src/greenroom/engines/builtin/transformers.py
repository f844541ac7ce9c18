"""Transformers: folders with config.json and safetensors. They write text, or make embeddings. Owns which of the two a
folder does, its abilities and its sizes.

Also owns what is common to the engines whose models our torch workers host (`TorchEngine`), which sleep in host memory
and wake at the speed of the bus: how a worker is started, which one a model belongs to, the options that all take.
Imports nothing of torch: a worker has a Python of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from greenroom.config.schema import Ability, Model
from greenroom.config.sections.model import TEMPLATE_ENDING
from greenroom.core.model import Claim, DeviceId
from greenroom.engines.base import LAUNCH, EngineFacts, HostedEngine, HostKey, worker_environment
from greenroom.engines.estimates.estimate import Estimate
from greenroom.engines.estimates.gguf_header import BadModelFile, has_tools
from greenroom.engines.estimates.hf_folder import FolderOptions, folder_config, folder_fault
from greenroom.engines.estimates.hosted import (
    BATCH_DEFAULT,
    CONTEXTS_CACHED,
    INDEX,
    MODULE_FILES,
    estimate_asleep,
    estimate_ready,
)
from greenroom.engines.identity import FILES_MAX, file_identity, packages_identity, packages_missing
from greenroom.errors import LoadFailed, UnusableModel
from greenroom.process.spawn import Command

PROGRAM: Final = "torch_host.main"
# Serve the files of the folder and fetch nothing. Ask NVML whether there is a GPU: CUDA would fix the visible GPUs, and
# a spare learns its GPUs only with its first model. Write log lines at once.
_OWN_ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONUNBUFFERED": "1"}
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


class TorchEngine(HostedEngine):
    """Models of one kind, which have workers of their own: `name` is also that of the worker's program."""

    def host_key(self, slot: str, model: Model, gpus: tuple[DeviceId, ...] | None) -> HostKey:
        # A version that loads in the process that answers would take half of its speed meanwhile.
        is_alone = model.isolate or model.versions is not None
        return HostKey(
            program=self.name,
            python=model.python or sys.executable,
            gpus=() if model.device == "cpu" else gpus,
            alone=slot if is_alone else "",
            env=tuple(sorted(model.env.items())),
            cwd=model.cwd,
        )

    def launch_worker(self, key: HostKey, socket: str) -> Command:
        if shutil.which(key.python) is None:
            raise LoadFailed(f"there is no Python {key.python}. Correct `python` in the configuration.")
        return Command(
            (key.python, LAUNCH, PROGRAM, "--program", key.program, "--control", socket),
            worker_environment(key, _OWN_ENVIRONMENT),
            key.cwd,
        )

    def options(self, model: Model, gpus: tuple[DeviceId, ...] | None, claim: Claim) -> Mapping[str, object]:
        if not os.path.isdir(model.path or ""):
            if os.path.isfile(model.path or ""):
                raise UnusableModel(
                    f"{model.path} is a file, and {self.name} serves folders. Correct `path` or `engine`."
                )
            raise UnusableModel(f"there is no folder {model.path}. Correct `path` in the configuration.")
        return {
            "dtype": model.dtype,
            "device": "cpu" if model.device == "cpu" or gpus == () else "auto",
            "trust_remote_code": model.trust_remote_code,
            "allow_pickle": model.allow_pickle,
            "threads": model.threads,
        }


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
        if os.path.isfile(folder / INDEX):
            return _A_PIPELINE.format(path=model.path)
        # A folder of sentence-transformers has its parts in folders below.
        is_sentences = os.path.isfile(folder / MODULES)
        return None if is_sentences else folder_fault(folder, takes_pickles=model.allow_pickle)

    def missing(self, model: Model) -> str | None:
        return packages_missing(model, PACKAGES, "transformers")

    def options(self, model: Model, gpus: tuple[DeviceId, ...] | None, claim: Claim) -> Mapping[str, object]:
        if os.path.isfile(os.path.join(model.path or "", INDEX)):
            raise UnusableModel(f"{_A_PIPELINE.format(path=model.path)}.")
        sizes = _sizes(model)
        return {
            **super().options(model, gpus, claim),
            "context": sizes.context,
            "cache_tokens": sizes.cache_tokens,
            "batch_max": sizes.sequences,
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


def _sizes(model: Model) -> FolderOptions:
    context = model.ctx_size or None
    cache_tokens = model.cache_tokens or (CONTEXTS_CACHED * context if context else None)
    return FolderOptions(context, model.concurrency or BATCH_DEFAULT, model.dtype, cache_tokens)
