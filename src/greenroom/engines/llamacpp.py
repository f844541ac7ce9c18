"""llama.cpp: the `llama-server` binary when there is one, otherwise the embedded build from PyPI. GGUF files.

Owns the argument list, which is the same for both. The embedded build runs in a child process too: a model file is
hostile input, and a crash must not reach the gateway.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from greenroom.config.schema import Ability, Model
from greenroom.engines.base import (
    Facts,
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
from greenroom.engines.estimates.llama_options import of_model
from greenroom.engines.identity import embedded_identity, file_identity, program_identity
from greenroom.errors import LoadFailed
from greenroom.process.spawn import Command

WORKER = Path(__file__).parent.parent / "workers" / "llamacpp_server.py"
# No prompt cache in host memory: it is not part of the plan.
CACHE_RAM_MIB = 0
# Batch size for inputs that must fit one batch, if the context length is the model's own.
BATCH = 8192


class LlamaCppEngine(ProcessEngine):
    name = "llamacpp"
    listens = Listens.SOCKET
    usage_source = UsageSource.TIMINGS

    def facts(self, model: Model) -> Facts:
        return Facts(_abilities(model), can_split=Split.PROPORTIONAL)

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

    def launch(self, model_id: str, model: Model, place: LaunchPlace) -> Launch:
        # Unlike Path.is_file, this never raises.
        if not os.path.isfile(model.path or ""):
            raise LoadFailed(f"{model_id}: there is no file {model.path}. Correct `path` in the configuration.")
        argv = (*_program(model), *_arguments(model_id, model, place))
        return Launch(Command(argv, environment(model, place), model.cwd), "/health")

    def usage(self, tail: bytes, *, stream: bool) -> Usage | None:
        # Embeddings and rerank answers have `usage` alone.
        return from_timings(tail) or from_usage(tail)


def _abilities(model: Model) -> frozenset[Ability]:
    if model.embedding:
        return frozenset({Ability.EMBEDDINGS})
    if model.reranking:
        return frozenset({Ability.RERANK})
    return frozenset({Ability.CHAT, Ability.COMPLETIONS})


def _binary(model: Model) -> str | None:
    """The llama-server to run, the operator's or the one on PATH; None for the embedded build."""
    if model.program is not None:
        return shutil.which(model.program)
    return shutil.which("llama-server") if model.python is None else None


def _program(model: Model) -> tuple[str, ...]:
    """The program to run: the operator's binary, the one on PATH, or the embedded build. Raises LoadFailed."""
    if (binary := _binary(model)) is not None:
        return (binary,)
    if model.program is not None:
        raise LoadFailed(f"program {model.program} is not there or cannot be run.")
    if model.python is None and importlib.util.find_spec("xllamacpp") is None:
        raise LoadFailed("llama.cpp is not here. Put llama-server on PATH or `pip install 'greenroom[llamacpp]'`.")
    return (model.python or sys.executable, str(WORKER))


def _arguments(model_id: str, model: Model, place: LaunchPlace) -> list[str]:
    argv = ["--model", str(model.path), "--alias", model_id, "--host", place.socket or "127.0.0.1"]
    argv += ["--port", str(place.port or 0)]
    argv += ["--ctx-size", str(model.ctx_size), "--parallel", str(model.parallel), "--kv-unified"]
    argv += ["--flash-attn", model.flash_attn, "--cache-ram", str(CACHE_RAM_MIB), "--no-webui"]
    argv += ["--cache-type-k", model.cache_type_k, "--cache-type-v", model.cache_type_v]
    argv += _on_devices(model, place)
    if model.threads is not None:
        argv += ["--threads", str(model.threads)]
    if model.embedding or model.reranking:
        # These take a whole input in one batch, so a batch must be as large as the context.
        argv += ["--embedding" if model.embedding else "--reranking"]
        argv += ["--batch-size", str(model.ctx_size or BATCH), "--ubatch-size", str(model.ctx_size or BATCH)]
    return [*argv, *model.args]


def _on_devices(model: Model, place: LaunchPlace) -> list[str]:
    """Which devices it uses, and how much of it lies on each."""
    if model.device == "cpu" or place.gpus == ():
        # Even without layers on it, llama.cpp would use a GPU for large batches.
        return ["--n-gpu-layers", "0", "--no-op-offload"]
    argv = ["--n-gpu-layers", str(model.n_gpu_layers)] if model.n_gpu_layers >= 0 else []
    # Without a claim llama.cpp splits the model itself, by free memory.
    if len(place.gpus or ()) > 1 and place.claim:
        argv += ["--split-mode", "layer", "--tensor-split", ",".join(map(str, place.shares))]
    return argv
