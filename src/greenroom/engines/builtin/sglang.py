"""SGLang: a server for each model, over one GPU or several, which sleeps with its weights in host memory.

Owns its command line and its calls for sleep. It keeps a copy of its weights on the host from its start on: without it,
it would wake with random weights. It cannot listen on a socket, so it gets a port of this machine; `/upstream` passes
nothing else on than `upstream_paths`.
"""

from __future__ import annotations

import math
from typing import Final

from greenroom.config.schema import Model
from greenroom.engines.base import CallEngine, Launch, LaunchPlace, asked, environment
from greenroom.engines.builtin.folder_server import (
    ANSWERING_PATHS,
    FolderServer,
    chat_template,
    folder_of,
    metric_sum,
    on_gpus,
)
from greenroom.engines.builtin.transformers import embeds
from greenroom.engines.estimates.hf_folder import CONTEXT_MIB
from greenroom.engines.estimates.paged import GRAPHS_MIB, estimate_paged
from greenroom.process.spawn import Command

# It serves the files of the folder and fetches nothing. Its /health would generate a token each time, for a second.
_OWN_ENVIRONMENT: Final = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
# Parts of a claim that are outside of `--mem-fraction-static`, which holds weights and KV cache.
_NOT_STATIC: Final = ("compute buffers", "graphs", "context", "NCCL")
_LEAST_SHARE: Final = 0.01


class SglangEngine(FolderServer):
    name = "sglang"
    package = "sglang"
    module = "sglang.launch_server"
    host_copy = True
    figure_names = ("sglang:token_usage", "sglang:prompt_tokens_total", "sglang:cached_tokens_total")
    upstream_paths = (*ANSWERING_PATHS, "/get_model_info", "/generate", "/encode")
    peer_fields = frozenset({"bootstrap_host", "bootstrap_port", "bootstrap_room"})

    def kv_tokens(self, metrics: bytes) -> int | None:
        tokens = metric_sum(metrics, "sglang:max_total_num_tokens")
        return None if tokens is None else int(tokens) or None

    def launch(self, model_id: str, model: Model, place: LaunchPlace) -> Launch:
        program = self.program_for(model_id, model)
        # Its own program has subcommands, its module has none.
        words = (*program, *(("serve",) if len(program) == 1 else ()), *self._arguments(model_id, model, place))
        own = environment(model, place) | _OWN_ENVIRONMENT | model.env
        return Launch(Command(words, own, model.cwd), "/health")

    def _arguments(self, model_id: str, model: Model, place: LaunchPlace) -> list[str]:
        argv = ["--model-path", str(model.path), "--host", "127.0.0.1", "--port", str(place.port)]
        argv += ["--served-model-name", model.use_model_name or model_id]
        argv += ["--max-running-requests", str(self.concurrency(model)), "--dtype", model.dtype]
        argv += ["--context-length", str(model.ctx_size)] if model.ctx_size else []
        argv += ["--quantization", model.quantization] if model.quantization else []
        argv += ["--trust-remote-code"] if model.trust_remote_code else []
        # Figures of its cache, and answers that tell how many tokens came from it.
        argv += ["--is-embedding"] if embeds(model) else ["--enable-cache-report"]
        argv += [] if model.prefix_caching else ["--disable-radix-cache"]
        argv += ["--enable-metrics"]
        return [*argv, *chat_template(model), *self._on_devices(model, place), *model.args]

    def _on_devices(self, model: Model, place: LaunchPlace) -> list[str]:
        gpus = on_gpus(model, place)
        if not gpus:
            return ["--device", "cpu"]
        argv = ["--enable-memory-saver", "--enable-weights-cpu-backup", "--tp-size", str(gpus)]
        share = self.static_share(model, place)
        return argv if share is None else [*argv, "--mem-fraction-static", f"{share:.4f}"]

    def static_share(self, model: Model, place: LaunchPlace) -> float | None:
        """Weights and KV cache as a share of what is free when it starts, which is how SGLang counts. None where
        nothing was claimed. Never more than the claim."""
        claimed = [place.claim.get(gpu, 0) for gpu in place.gpus or ()]
        if not claimed or not all(claimed) or not place.free_mib or not all(place.free_mib):
            return None
        beside = self._beside_mib(model, len(claimed))
        least = min((mib - beside) / free for mib, free in zip(claimed, place.free_mib, strict=True))
        return min(1.0, max(_LEAST_SHARE, math.floor(least * 10_000) / 10_000))

    def _beside_mib(self, model: Model, gpus: int) -> int:
        """MiB on each GPU for what is neither weights nor KV cache."""
        estimate = estimate_paged(folder_of(model), self.sizes(model), gpus)
        if estimate is None:
            return CONTEXT_MIB + GRAPHS_MIB
        return sum(part.gpu_mib for part in estimate.parts if part.what in _NOT_STATIC) // gpus

    # --- sleep ------------------------------------------------------------------------------------------------------

    async def sleep(self, model: Model, call: CallEngine) -> None:
        await self.note_answer(model, call)
        await asked(call, "POST", "/release_memory_occupation", b"{}")

    async def wake(self, model: Model, call: CallEngine) -> None:
        await asked(call, "POST", "/resume_memory_occupation", b"{}")
        await self.check_answer(model, call)
