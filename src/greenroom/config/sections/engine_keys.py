"""Which engine each key of a model belongs to. Keys in no set belong to every engine."""

from __future__ import annotations

from typing import Final

LLAMACPP_KEYS: Final = frozenset(
    (
        *("path", "program", "python", "args", "ctx_size", "parallel", "threads", "n_gpu_layers", "flash_attn"),
        *("cache_type_k", "cache_type_v", "embedding", "reranking", "mmproj", "lora", "draft_model"),
        *("chat_template", "reasoning", "reasoning_format", "reasoning_budget"),
    )
)
TRANSFORMERS_KEYS: Final = frozenset(
    (
        *("path", "python", "ctx_size", "threads", "embedding", "dtype", "cache_tokens"),
        *("isolate", "trust_remote_code", "allow_pickle", "skip_check"),
    )
)
DIFFUSERS_KEYS: Final = frozenset(
    ("path", "python", "threads", "dtype", "device_map", "isolate", "trust_remote_code", "allow_pickle")
)
# Servers that have their own process for each model and their own command line.
SERVER_KEYS: Final = frozenset(
    (
        *("path", "program", "python", "args", "ctx_size", "embedding", "dtype", "quantization", "cache_tokens"),
        *("chat_template", "trust_remote_code", "gpu_memory_utilization", "prefix_caching"),
    )
)
COMFYUI_KEYS: Final = frozenset({"path", "python", "args", "cmd", "workflow", "inputs", "checkpoints"})
WHISPER_KEYS: Final = frozenset({"path", "python", "threads", "compute_type", "beam_size"})
COMMAND_KEYS: Final = frozenset({"cmd", "cmd_stop", "check_endpoint", "listener", "sizes_itself"})
REMOTE_KEYS: Final = frozenset({"remote"})
KEYS_OF_ENGINES: Final = {
    "llamacpp": LLAMACPP_KEYS,
    "transformers": TRANSFORMERS_KEYS,
    "diffusers": DIFFUSERS_KEYS,
    "vllm": SERVER_KEYS,
    "sglang": SERVER_KEYS,
    "comfyui": COMFYUI_KEYS,
    "whisper": WHISPER_KEYS,
    "command": COMMAND_KEYS,
    "remote": REMOTE_KEYS,
}
# Keys of models that run on this machine, by a process of ours.
LOCAL_KEYS: Final = frozenset(
    (
        *("env", "cwd", "memory_mib", "host_memory_mib", "gpu_memory_budget_mib", "isolate_tenants", "device"),
        *("devices", "exclusive", "ttl_s", "pinned", "preload", "load_timeout_s", "stop_timeout_s", "versions"),
        "routes",
    )
)
# The engines that cannot do without `path`, and those that can be told to embed.
WITH_PATH: Final = ("llamacpp", "transformers", "diffusers", "vllm", "sglang", "whisper")
WITH_EMBEDDING: Final = ("llamacpp", "transformers", "vllm", "sglang")
