"""llama.cpp: the `llama-server` binary when there is one, otherwise the embedded build from PyPI. GGUF files.

Owns the argument list, which is the same for both. The embedded build runs in a child process as well: a model file is
hostile input, and its crash must stay its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from greenroom.config.schema import Model
from greenroom.core.model import Need
from greenroom.engines.base import Ability, Launch, Listens, Place, UsageSource, environment
from greenroom.engines.usage import Usage, from_timings, from_usage
from greenroom.errors import LoadFailed
from greenroom.process.spawn import Command

# Weights as they lie in the file, plus KV cache and compute buffers; a declared memory_mib is better.
FILE_SIZE_FACTOR = 1.1
WORKER = Path(__file__).parent.parent / "workers" / "llamacpp_server.py"
# Prompt caches in host memory beyond the slots' own would be memory nobody planned with.
CACHE_RAM_MIB = 0
# A batch for inputs that must fit one, when the model's own context length is used.
BATCH = 8192
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_MIB = 1024 * 1024


class LlamaCppEngine:
    name = "llamacpp"
    listens = Listens.SOCKET
    usage_source = UsageSource.TIMINGS
    sizes_itself = False
    can_split = True

    def need(self, model: Model) -> Need:
        mib = model.memory_mib if model.memory_mib is not None else _estimate_mib(model)
        if model.n_gpu_layers == 0:
            return Need(0, mib + model.host_memory_mib)
        return Need(mib, model.host_memory_mib)

    def concurrency(self, model: Model) -> int:
        return model.concurrency or model.parallel

    def launch(self, model_id: str, model: Model, place: Place) -> Launch:
        # Unlike the method of a path, this answers also where the file may not be looked at, or cannot be one.
        if not os.path.isfile(model.path or ""):
            raise LoadFailed(f"{model_id}: there is no file {model.path}. Correct `path` in the configuration.")
        argv = (*_program(model), *_arguments(model_id, model, place))
        return Launch(Command(argv, environment(model), model.cwd), "/health")

    def abilities(self, model: Model) -> frozenset[Ability] | None:
        if model.embedding:
            return frozenset({Ability.EMBEDDINGS})
        if model.reranking:
            return frozenset({Ability.RERANK})
        return frozenset({Ability.CHAT, Ability.COMPLETIONS})

    def usage(self, tail: bytes, *, stream: bool) -> Usage | None:
        # Embeddings and rerank answers have `usage` alone.
        return from_timings(tail) or from_usage(tail)


def _program(model: Model) -> tuple[str, ...]:
    """What to run: the operator's binary, the one on PATH, or the embedded build."""
    if model.program is not None:
        found = shutil.which(model.program)
        if found is None:
            raise LoadFailed(f"program {model.program} is not there or cannot be run.")
        return (found,)
    if model.python is None and (binary := shutil.which("llama-server")):
        return (binary,)
    if model.python is None and importlib.util.find_spec("xllamacpp") is None:
        raise LoadFailed("llama.cpp is not here. Put llama-server on PATH or `pip install 'greenroom[llamacpp]'`.")
    return (model.python or sys.executable, str(WORKER))


def _arguments(model_id: str, model: Model, place: Place) -> list[str]:
    argv = ["--model", str(model.path), "--alias", model_id, "--host", place.socket or "127.0.0.1"]
    argv += ["--port", str(place.port or 0)]
    argv += ["--ctx-size", str(model.ctx_size), "--parallel", str(model.parallel), "--kv-unified"]
    argv += ["--flash-attn", model.flash_attn, "--cache-ram", str(CACHE_RAM_MIB), "--no-webui"]
    if model.n_gpu_layers >= 0:
        argv += ["--n-gpu-layers", str(model.n_gpu_layers)]
    if model.threads is not None:
        argv += ["--threads", str(model.threads)]
    if model.embedding or model.reranking:
        # These take a whole input in one batch, so a batch must hold as much as the context.
        argv += ["--embedding" if model.embedding else "--reranking"]
        argv += ["--batch-size", str(model.ctx_size or BATCH), "--ubatch-size", str(model.ctx_size or BATCH)]
    return [*argv, *model.args]


def _estimate_mib(model: Model) -> int:
    """From the file's size, all parts of a split one together; nothing when it is not there."""
    total = sum(_size(part) for part in _parts(Path(model.path or "")))
    return int(total * FILE_SIZE_FACTOR / _MIB) + 1 if total else 0


def _size(path: Path) -> int:
    """A file that is missing or may not be looked at has none: its own load will say so."""
    try:
        return os.path.getsize(path) if os.path.isfile(path) else 0
    except OSError:
        return 0


def _parts(path: Path) -> list[Path]:
    match = _PART.search(path.name)
    if match is None:
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    return [path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, min(count, 1000) + 1)]
