"""What is true of a key besides its type: which engine it belongs to, and what a reload does with a change of it.

One place for both, beside the schema. A test holds every key of the schema to be in exactly one set of each kind.
"""

from __future__ import annotations

# --- which engine a key of a model belongs to; all others belong to every engine ------------------------------------

LLAMACPP_KEYS = frozenset(
    {
        "path",
        "program",
        "python",
        "ctx_size",
        "cache_type_k",
        "cache_type_v",
        "n_gpu_layers",
        "flash_attn",
        "parallel",
        "threads",
        "embedding",
        "reranking",
        "args",
    }
)
TRANSFORMERS_KEYS = frozenset(
    {
        "path",
        "python",
        "ctx_size",
        "threads",
        "embedding",
        "dtype",
        "cache_tokens",
        "isolate",
        "trust_remote_code",
        "allow_pickle",
        "skip_check",
    }
)
COMMAND_KEYS = frozenset({"cmd", "cmd_stop", "check_endpoint", "listener"})
KEYS_OF_ENGINES = {"llamacpp": LLAMACPP_KEYS, "transformers": TRANSFORMERS_KEYS, "command": COMMAND_KEYS}

# --- where the placeholders that only a start can fill may stand ----------------------------------------------------

PORT_KEYS = frozenset({"cmd", "cmd_stop", "env", "args"})
PID_KEYS = frozenset({"cmd_stop"})
# The GPUs a command gets, how many they are, and in what proportion it shall use them.
GPU_HOLES = ("GPUS", "GPU_COUNT", "TENSOR_SPLIT")
GPU_KEYS = frozenset({"cmd", "cmd_stop", "env"})

# --- what a reload does with a changed key of a model ---------------------------------------------------------------

# The process, its memory or its place would be another: the old slot drains and the next request gets a new one.
# `concurrency` is here because it belongs to the slot and is fixed when the slot becomes ready.
NEW_SLOT_KEYS = frozenset(
    {
        *LLAMACPP_KEYS,
        *TRANSFORMERS_KEYS,
        "engine",
        "cmd",
        "check_endpoint",
        "listener",
        "env",
        "cwd",
        "memory_mib",
        "host_memory_mib",
        "gpu_memory_budget_mib",
        "device",
        "devices",
        "concurrency",
    }
)

# The running engine keeps running; the new value counts from the next time it is looked at.
LABEL_KEYS = frozenset(
    {
        "cmd_stop",
        "aliases",
        "name",
        "description",
        "unlisted",
        "metadata",
        "use_model_name",
        "strip_params",
        "set_params",
        "routes",
        "priority",
        "category",
        "ttl_s",
        "pinned",
        "preload",
        "load_timeout_s",
        "stop_timeout_s",
        "grace_s",
    }
)

# --- what a reload does with a changed key elsewhere ----------------------------------------------------------------

# Read anew for each request or each decision.
AT_ONCE_KEYS = frozenset(
    {
        "server.api_keys",
        "server.allowed_hosts",
        "server.allowed_origins",
        "server.forward_headers",
        "server.body_max_mib",
        "server.upload_max_mib",
        "server.heartbeat",
        "server.heartbeat_after_s",
        "server.heartbeat_every_s",
        "server.wait_max_s",
        "server.stream_wait_max_s",
        "server.answer_idle_max_s",
        "server.drain_s",
        "scheduler.policy",
        "scheduler.swapper",
        "scheduler.queue_depth_max",
        "scheduler.overtakes_max",
        "scheduler.residency_swaps",
        "scheduler.batch_swaps",
        "scheduler.lift_s",
        "scheduler.deadline_high_s",
        "scheduler.deadline_normal_s",
        "scheduler.deadline_low_s",
        "scheduler.recency_s",
        "scheduler.tenant_weights",
        "scheduler.backoff_s",
        "scheduler.backoff_max_s",
        "scheduler.keep_alive_max_s",
        "scheduler.fit_memory",
        "scheduler.company",
        "stay_warm.llm_s",
        "stay_warm.vision_s",
        "stay_warm.diffusion_s",
        "log.level",
        "log.format",
        "model_roots",
    }
)

# Fixed when the server starts: its socket and what guards it, the devices, the ports, the lock.
RESTART_KEYS = frozenset(
    {
        "server.host",
        "server.port",
        "server.insecure",
        "server.header_timeout_s",
        "server.body_timeout_s",
        "server.body_rate_min_kib_s",
        "server.keepalive_s",
        "server.write_timeout_s",
        "server.connections_max",
        "server.connections_per_ip_max",
        "server.headers_max",
        "server.header_bytes_max",
        "server.request_line_max",
        "server.bodies_memory_mib",
        "server.bodies_spool_mib",
        "server.docs",
        "server.record_activity",
        "server.record_events",
        "gpus",
        "memory.probe",
        "memory.file",
        "memory.look_every_s",
        "memory.gpu_margin_mib",
        "memory.green_room_mib",
        "memory.spare_worker",
        "leases.store",
        "leases.host",
        "leases.ttl_s",
        "leases.wait_max_s",
        "host.memory_mib",
        "host.margin_mib",
        "ports.first",
        "ports.last",
        "state_dir",
    }
)

# `macros` have been put in place before anything is compared; `models` are compared one by one.
COMPARED_ELSEWHERE = frozenset({"macros", "models"})
