"""vLLM: a server for each model, over one GPU or several, which sleeps with its weights in host memory.

Owns its command line and its calls for sleep. The claim is the truth: what the core gave it on its GPUs becomes
`--gpu-memory-utilization`, and its KV cache fills the rest. Its control endpoints need no key, so it listens on a
socket in our private directory, and `/upstream` passes nothing else on than `upstream_paths`.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Final

import msgspec

from greenroom.config.schema import Model
from greenroom.config.sections.engine_keys import written
from greenroom.engines.base import VLLM_PATHS, CallEngine, Launch, LaunchPlace, Listens, asked, environment
from greenroom.engines.builtin.folder_server import (
    ANSWERING_PATHS,
    SERIES_MAX,
    FolderServer,
    chat_template,
    decoded,
    folder_of,
    on_gpus,
)
from greenroom.engines.builtin.transformers import embeds
from greenroom.engines.estimates.hf_folder import CONTEXT_MIB
from greenroom.engines.estimates.paged import cache_mib
from greenroom.errors import LoadFailed
from greenroom.process.spawn import Command

# Sleep is one of its development endpoints. It serves the files of the folder and fetches nothing, and tells no one.
# Media that callers name is fetched from there and not from where that leads: `--allowed-media-domains` must hold.
_OWN_ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
# Connectors that copy the KV cache hold its addresses on the GPU, which sleep takes back: vLLM dies of it after its
# first wake, and no release is known that does not.
_KEEPS_AWAKE: Final = dict.fromkeys(
    ("--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend", "--no-enable-sleep-mode"), True
)
# With this allocator vLLM does not start in sleep mode.
_ALLOCATORS: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE: Final = "expandable_segments:true"
# A name that no host has: an empty list would allow them all.
_NO_HOST: Final = "none.invalid"
# The CUDA context is there before vLLM looks at the GPU for the first time, so it is outside of its share.
_BESIDE_MIB: Final = CONTEXT_MIB


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class VllmEngine(FolderServer):
    name = "vllm"
    package = "vllm"
    module = "vllm.entrypoints.cli.main"
    listens = Listens.SOCKET
    figure_names = ("vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    upstream_paths = (*ANSWERING_PATHS, "/pooling")
    speaks = frozenset({*VLLM_PATHS, "/v1/messages/count_tokens"})
    peer_fields = frozenset({"kv_transfer_params", "ec_transfer_params"})

    def kept_awake_by(self, model: Model) -> str | None:
        arguments = (said for _, said, _, _ in written(self.name, model.args, _KEEPS_AWAKE))
        variables = (name for name in _ALLOCATORS if _EXPANDABLE in model.env.get(name, "").lower().replace(" ", ""))
        return next(itertools.chain(arguments, variables), None)

    def kv_tokens(self, metrics: bytes) -> int | None:
        # Labels of one series for each of its engines.
        infos = re.findall(rb"^vllm:cache_config_info\{([^\n]{0,4096})\} ", metrics, re.M)[:SERIES_MAX]
        sizes = [(_label(info, b"num_gpu_blocks"), _label(info, b"block_size")) for info in infos]
        return sum(blocks * tokens for blocks, tokens in sizes) or None

    def launch(self, model_id: str, model: Model, place: LaunchPlace) -> Launch:
        argv = (*self.program_for(model_id, model), *self._arguments(model_id, model, place))
        own = environment(model, place) | _OWN_ENVIRONMENT | model.env
        return Launch(Command(argv, own, model.cwd), "/health")

    def _arguments(self, model_id: str, model: Model, place: LaunchPlace) -> list[str]:
        argv = ["serve", str(model.path), "--uds", str(place.socket), "--disable-uvicorn-access-log"]
        argv += ["--served-model-name", model.use_model_name or model_id]
        argv += ["--max-num-seqs", str(self.concurrency(model)), "--dtype", model.dtype]
        argv += ["--max-model-len", str(model.ctx_size)] if model.ctx_size else []
        argv += ["--quantization", model.quantization] if model.quantization else []
        argv += ["--allowed-media-domains", *(model.media_hosts or (_NO_HOST,))]
        argv += ["--trust-remote-code"] if model.trust_remote_code else []
        if embeds(model):
            argv += ["--runner", "pooling"]
        else:
            # Answers tell how many tokens came from the cache only if they are asked to.
            argv += ["--enable-prefix-caching" if model.prefix_caching else "--no-enable-prefix-caching"]
            argv += ["--enable-prompt-tokens-details"]
        return [*argv, *chat_template(model), *self._on_devices(model, place), *model.args]

    def _on_devices(self, model: Model, place: LaunchPlace) -> list[str]:
        gpus = on_gpus(model, place)
        if not gpus:
            # On the host it would take a share of all memory for its KV cache.
            kept = cache_mib(folder_of(model), self.sizes(model))
            return [] if kept is None else ["--kv-cache-memory-bytes", f"{kept}M"]
        argv = ["--tensor-parallel-size", str(gpus)]
        argv += ["--enable-sleep-mode"] if self.kept_awake_by(model) is None else []
        share = utilization(place)
        return argv if share is None else [*argv, "--gpu-memory-utilization", f"{share:.4f}"]

    # --- sleep ------------------------------------------------------------------------------------------------------

    async def sleep(self, model: Model, call: CallEngine) -> None:
        await self.note_answer(model, call)
        await asked(call, "POST", "/sleep?level=1")
        if not await _is_sleeping(call):
            raise LoadFailed("it says that it is awake after it was put to sleep")

    async def wake(self, model: Model, call: CallEngine) -> None:
        await asked(call, "POST", "/wake_up")
        if await _is_sleeping(call):
            raise LoadFailed("it says that it is asleep after it was woken")
        await self.check_answer(model, call)


def _label(labels: bytes, name: bytes) -> int:
    """The number that this label has; 0 if it has none."""
    found = re.search(rb'(?:^|,)%b="([0-9]{1,12})"' % name, labels)
    return 0 if found is None else int(found[1])


async def _is_sleeping(call: CallEngine) -> bool:
    return decoded(await asked(call, "GET", "/is_sleeping"), _Sleeping).is_sleeping


def utilization(place: LaunchPlace) -> float | None:
    """The share of each GPU that the claim gives it; None where nothing was claimed. Never more than the claim."""
    shares = [place.claim.get(gpu, 0) for gpu in place.gpus or ()]
    if not shares or not all(shares) or len(place.total_mib) != len(shares):
        return None
    least = min((mib - _BESIDE_MIB) / total for mib, total in zip(shares, place.total_mib, strict=True))
    return max(0.01, math.floor(least * 10_000) / 10_000)
