"""Which tenants the operator has named, and which are only names that callers send."""

from __future__ import annotations

from greenroom.config.schema import Config


def is_named(config: Config, tenant: str) -> bool:
    """Whether a key's requests belong to this tenant, or it has a weight."""
    keys = config.server.api_keys
    return tenant in config.scheduler.tenant_weights or any((key.tenant or key.name) == tenant for key in keys)
