"""What a reload changes: two configurations compared, key by key.

Owns the comparison, and the tables below that say what a changed key means. Never applies anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from greenroom.config.kinds import Section
from greenroom.config.schema import Config
from greenroom.config.sections.engine_keys import COMMAND_KEYS, KEYS_OF_ENGINES
from greenroom.config.sections.model import Model
from greenroom.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Changes:
    """Model ids and dotted keys, sorted. A model is in at most one of the first four."""

    added: tuple[str, ...]
    # These need a new slot: the old one drains.
    changed: tuple[str, ...]
    # Only labels changed: the running engine keeps running.
    relabelled: tuple[str, ...]
    removed: tuple[str, ...]
    # Keys outside models that are applied while running, and those that are not.
    at_once: tuple[str, ...]
    needs_restart: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        models = self.added or self.changed or self.relabelled or self.removed
        return not (models or self.at_once or self.needs_restart)


def diff(old: Config, new: Config) -> Changes:
    both = sorted(old.models.keys() & new.models.keys())
    pairs = {name: (old.models[name], new.models[name]) for name in both}
    changed = tuple(name for name in both if _differs(*pairs[name], NEW_SLOT_KEYS) or _moved(old, new, name))
    relabelled = tuple(name for name in both if name not in changed and _differs(*pairs[name], LABEL_KEYS))
    keys = sorted(_changed_keys(old, new))
    return Changes(
        added=tuple(sorted(new.models.keys() - old.models.keys())),
        changed=changed,
        relabelled=relabelled,
        removed=tuple(sorted(old.models.keys() - new.models.keys())),
        at_once=tuple(key for key in keys if key in AT_ONCE_KEYS),
        needs_restart=tuple(key for key in keys if key in RESTART_KEYS),
    )


def refuse_restart(changes: Changes) -> None:
    """Raise ConfigError if a changed key needs a restart. A reload applies everything or nothing."""
    if changes.needs_restart:
        keys = ", ".join(changes.needs_restart)
        raise ConfigError(f"only a restart can change {keys}. Nothing was changed: restart, or put the old values back")


def _differs(old: Model, new: Model, keys: frozenset[str]) -> bool:
    return any(not _same(getattr(old, key), getattr(new, key)) for key in keys)


def _moved(old: Config, new: Config, name: str) -> bool:
    """True for a remote model whose provider has another address, key, time limit or cost now, or that has another name
    there: a slot counts by the cost of one name.
    """
    before, after = old.models[name], new.models[name]
    if after.remote is None:
        return False
    return old.remotes.get(after.remote) != new.remotes[after.remote] or before.use_model_name != after.use_model_name


def _same(old: object, new: object) -> bool:
    """Equal as JSON too: Python treats 1, 1.0 and True as equal, an engine does not. Most are the same default."""
    if old is new:
        return True
    return old == new and json.dumps(old, sort_keys=True, default=repr) == json.dumps(new, sort_keys=True, default=repr)


def _changed_keys(old: Config, new: Config) -> Iterator[str]:
    for name in Config.model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if name in COMPARED_ELSEWHERE:
            continue
        if isinstance(before, Section):
            for key in type(before).model_fields:
                if not _same_in_order(getattr(before, key), getattr(after, key)):
                    yield f"{name}.{key}"
        elif not _same_in_order(before, after):
            yield name


def _same_in_order(old: object, new: object) -> bool:
    """Equal in the order of keys too: of two sets in scheduler.company with equal cost, the first wins."""
    return old == new and repr(old) == repr(new)


# --- what a reload does with a changed key of a model ---------------------------------------------------------------

# These change the process, its memory or its devices: the old slot drains and the next request gets a new one.
# `concurrency` is here because it belongs to the slot and is fixed when the slot becomes ready.
NEW_SLOT_KEYS = frozenset(
    {
        *frozenset().union(*KEYS_OF_ENGINES.values()) - COMMAND_KEYS,
        "engine",
        "options",
        "cmd",
        "check_endpoint",
        "listener",
        "env",
        "cwd",
        "memory_mib",
        "host_memory_mib",
        "gpu_memory_budget_mib",
        "isolate_tenants",
        "device",
        "devices",
        "concurrency",
        "media_hosts",
    }
)

# The running engine keeps running; the new value counts the next time it is read.
LABEL_KEYS = frozenset(
    {
        "cmd_stop",
        "sizes_itself",
        "aliases",
        "exclusive",
        "name",
        "description",
        "unlisted",
        "metadata",
        "use_model_name",
        "strip_params",
        "set_params",
        "strict_json",
        "routes",
        "limits",
        "priority",
        "abilities",
        "category",
        "ttl_s",
        "pinned",
        "preload",
        "versions",
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
        "server.key_file",
        "server.allowed_hosts",
        "server.allowed_origins",
        "server.public_url",
        "server.default_model",
        "server.forward_headers",
        "server.body_max_mib",
        "server.json_values_max",
        "server.upload_max_mib",
        "server.heartbeat",
        "server.heartbeat_after_s",
        "server.heartbeat_every_s",
        "server.wait_max_s",
        "server.stream_wait_max_s",
        "server.answer_idle_max_s",
        "server.drain_s",
        "server.ui",
        "scheduler.policy",
        "scheduler.swapper",
        "scheduler.queue_depth_max",
        "scheduler.away_share",
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
        "jobs.keep_s",
        "jobs.count_max",
        "jobs.store_mib",
        "jobs.unfinished_per_key_max",
        "images.keep_s",
        "images.count_max",
        "images.store_mib",
        "governance.enabled",
        "governance.key_path",
        "governance.signers",
        "governance.signer_groups",
        "governance.rules",
        "governance.window_s",
        "governance.require_body_hash",
        "stay_warm.llm_s",
        "stay_warm.vision_s",
        "stay_warm.embedding_s",
        "stay_warm.diffusion_s",
        "stay_warm.transcription_s",
        "stay_warm.speech_s",
        "log.level",
        "log.format",
        "library.roots",
        "library.download",
        "library.hosts",
        "library.downloads_max",
        "library.bandwidth_mib_s",
        "library.adhoc_models_max",
        "library.exclusive",
        "versions.default",
        "versions.state_file",
        "runner.id",
        "runner.type",
        "server.multi_tenant",
        "vllm.ctx_size",
        "vllm.gpu_memory_utilization",
        "vllm.prefix_caching",
        "model_roots",
        "remotes",
        "tenants",
        "profiles",
        "clients.errors_max",
        "clients.window_s",
        "clients.cooldown_s",
        "clients.cooldown_max_s",
        "tasks",
    }
)

# Fixed when the server starts: its socket and what guards it, the scheduler, the devices, the ports, the lock.
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
        "server.metrics",
        "server.metrics_port",
        "server.metrics_aliases",
        "server.usage_days",
        "server.docs",
        "server.record_activity",
        "server.record_events",
        "scheduler.implementation",
        "gpus",
        "memory.probe",
        "memory.file",
        "memory.look_every_s",
        "memory.gpu_margin_mib",
        "memory.green_room_mib",
        "memory.spare_worker",
        "limits.store",
        "leases.store",
        "leases.host",
        "leases.ttl_s",
        "leases.wait_max_s",
        "governance.clock_skew_s",
        "governance.store",
        "governance.audit_path",
        "host.memory_mib",
        "host.margin_mib",
        "ports.first",
        "ports.last",
        "state_dir",
    }
)

# `macros` are expanded before anything is compared; `models` are compared one by one.
COMPARED_ELSEWHERE = frozenset({"macros", "models"})
