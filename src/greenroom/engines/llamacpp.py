"""llama.cpp: the `llama-server` binary when there is one, otherwise the embedded build from PyPI. GGUF files.

Owns the argument list, which is the same for both. The embedded build runs in a child process too: a model file is
hostile input, and a crash must not reach the gateway.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from greenroom.config.model_section import TEMPLATE_ENDING
from greenroom.config.schema import Model
from greenroom.engines.base import (
    EngineFacts,
    Launch,
    LaunchPlace,
    Listens,
    ProcessEngine,
    Split,
    Usage,
    UsageSource,
    environment,
    from_timings,
    from_usage,
)
from greenroom.engines.estimates.estimate import Estimate
from greenroom.engines.estimates.gguf import estimate_gguf, files_of
from greenroom.engines.estimates.llama_model import abilities_of, of_model
from greenroom.engines.estimates.llama_options import LlamaOptions
from greenroom.engines.identity import embedded_identity, file_identity, program_identity
from greenroom.engines.installed import packages_missing
from greenroom.errors import LoadFailed
from greenroom.process.spawn import Command

WORKER = Path(__file__).parent.parent / "workers" / "llamacpp_server.py"
# No prompt cache in host memory: it is not part of the plan.
CACHE_RAM_MIB = 0


class LlamaCppEngine(ProcessEngine):
    name = "llamacpp"
    listens = Listens.SOCKET
    usage_source = UsageSource.TIMINGS

    def facts(self, model: Model) -> EngineFacts:
        return EngineFacts(abilities_of(model), can_split=Split.PROPORTIONAL)

    def estimate(self, model: Model, gpus: int) -> Estimate | None:
        # The embedded build keeps logits of sampled tokens only; a binary of unknown version may keep a whole batch.
        return estimate_gguf(of_model(model), gpus, logits_all=_binary(model) is not None)

    def identity(self, model: Model) -> tuple[str, str]:
        binary = _binary(model)
        program = embedded_identity(model.python) if binary is None else program_identity((binary,))
        return file_identity(files_of(of_model(model))), program

    def concurrency(self, model: Model) -> int:
        return model.concurrency or model.parallel

    def files(self, model: Model) -> list[Path]:
        return list(files_of(of_model(model)))

    def missing(self, model: Model) -> str | None:
        if _binary(model) is not None:
            return None
        if model.program is not None:
            return f"there is no program {model.program}; correct `program`"
        why = packages_missing(model, ("xllamacpp",), "llamacpp")
        return why if why is None or model.python is not None else f"{why}, or put llama-server on PATH"

    def launch(self, model_id: str, model: Model, place: LaunchPlace) -> Launch:
        options = of_model(model)
        _check_files(model_id, model, options)
        argv = (*_program(model), *_arguments(model_id, model, options, place))
        return Launch(Command(argv, environment(model, place), model.cwd), "/health")

    def usage(self, tail: bytes, *, stream: bool) -> Usage | None:
        # Embeddings and rerank answers have `usage` alone.
        return from_timings(tail) or from_usage(tail)


def _binary(model: Model) -> str | None:
    """The llama-server to run, the operator's or the one on PATH; None for the embedded build."""
    if model.program is not None:
        return shutil.which(model.program)
    return shutil.which("llama-server") if model.python is None else None


def _program(model: Model) -> tuple[str, ...]:
    """The program to run: the operator's binary, the one on PATH, or the embedded build."""
    if (binary := _binary(model)) is not None:
        return (binary,)
    return (model.python or sys.executable, str(WORKER))


def _check_files(model_id: str, model: Model, options: LlamaOptions) -> None:
    """Raises LoadFailed if a file is missing. Unlike Path.is_file, os.path.isfile never raises."""
    if os.path.isdir(options.model or ""):
        raise LoadFailed(f"{model_id}: {model.path} does not hold one GGUF model. Name the file in `path`.")
    files = {"path": options.model, "mmproj": next(iter(options.projectors), None), "draft_model": options.draft}
    for key, file in (*files.items(), *(("lora", file) for file in model.lora)):
        if (file is not None or key == "path") and not os.path.isfile(file or ""):
            raise LoadFailed(f"{model_id}: there is no file {file}. Correct `{key}` in the configuration.")


def _arguments(model_id: str, model: Model, options: LlamaOptions, place: LaunchPlace) -> list[str]:
    argv = ["--model", str(options.model), "--alias", model_id, "--host", place.socket or "127.0.0.1"]
    argv += ["--port", str(place.port or 0)]
    argv += ["--ctx-size", str(model.ctx_size), "--parallel", str(model.parallel), "--kv-unified"]
    argv += ["--flash-attn", model.flash_attn, "--cache-ram", str(CACHE_RAM_MIB), "--no-webui"]
    argv += ["--cache-type-k", model.cache_type_k, "--cache-type-v", model.cache_type_v]
    argv += _on_devices(model, options, place)
    if model.threads is not None:
        argv += ["--threads", str(model.threads)]
    if options.embedding or options.reranking:
        # These take a whole input in one batch, so a batch must be as large as the context.
        argv += ["--reranking" if options.reranking else "--embedding"]
        argv += ["--batch-size", str(options.batch), "--ubatch-size", str(options.ubatch)]
    return [*argv, *_beside(model, options), *_chat(model), *model.args]


def _beside(model: Model, options: LlamaOptions) -> list[str]:
    """The files beside the model: projector, adapters, draft model. Those in `args` follow by themselves."""
    argv: list[str] = []
    if "--mmproj" not in model.args and "-mm" not in model.args:
        argv += [word for file in options.projectors for word in ("--mmproj", file)]
    if model.lora:
        argv += ["--lora-scaled", ",".join(f"{file}:{scale:g}" for file, scale in model.lora.items())]
    if model.draft_model is not None:
        # Without a type, llama-server loads a draft model and leaves it unused.
        argv += ["--model-draft", model.draft_model, "--spec-type", "draft-simple"]
    return argv


def _chat(model: Model) -> list[str]:
    argv: list[str] = []
    if model.chat_template is not None:
        is_file = model.chat_template.endswith(TEMPLATE_ENDING)
        argv += ["--chat-template-file" if is_file else "--chat-template", model.chat_template]
    if model.reasoning != "auto":
        argv += ["--reasoning", model.reasoning]
    if model.reasoning_format != "auto":
        argv += ["--reasoning-format", model.reasoning_format]
    if model.reasoning_budget >= 0:
        argv += ["--reasoning-budget", str(model.reasoning_budget)]
    return argv


def _on_devices(model: Model, options: LlamaOptions, place: LaunchPlace) -> list[str]:
    """Which devices it uses, and how much of it lies on each."""
    if model.device == "cpu" or place.gpus == ():
        # Even without layers on it, llama.cpp would use a GPU for large batches.
        argv = ["--n-gpu-layers", "0", "--no-op-offload"]
        argv += ["--no-mmproj-offload"] if options.projectors else []
        return [*argv, "--n-gpu-layers-draft", "0"] if options.draft is not None else argv
    argv = ["--n-gpu-layers", str(model.n_gpu_layers)] if model.n_gpu_layers >= 0 else []
    # Without a claim llama.cpp splits the model itself, by free memory.
    if len(place.gpus or ()) > 1 and place.claim:
        argv += ["--split-mode", "layer", "--tensor-split", ",".join(map(str, place.shares))]
    return argv
