"""Signed operations: where used tokens and the audit log are kept, and by which names a model is known.

Owns how these are made and joined. Nothing is opened or imported while the configuration needs no tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from greenroom.config.schema import Config
from greenroom.errors import ConfigError
from greenroom.library.library import Library
from greenroom.process.state_dir import StateDir
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.detached import run_detached
from greenroom.tenancy.governance.audit import AuditLog
from greenroom.tenancy.governance.gate import GovernanceGate
from greenroom.tenancy.governance.nonces import NonceJournal, Nonces

FOLDER = "governance"


def wire_governance(
    state_dir: StateDir, config: Callable[[], Config], catalog: Catalog, library: Callable[[], Library]
) -> GovernanceGate:
    folder = state_dir.path / FOLDER
    section = config().governance

    def nonces() -> Nonces:
        store = section.store or config().leases.store
        if store is None:
            return NonceJournal(folder / "nonces", section.clock_skew_s, run_detached)
        try:
            from greenroom.tenancy.governance.shared_nonces import SharedNonces
        except ImportError:
            raise ConfigError("governance.store needs the client for Redis: pip install 'greenroom[redis]'") from None
        return SharedNonces(store, section.clock_skew_s)

    def known_as(name: str) -> frozenset[str]:
        """As it was asked for, by its id, and by its id on disk: a rule for one of them is a rule for all."""
        entry, record = catalog.find(name), library().find(name)
        bases = () if entry is None else (entry.base_id,)
        return frozenset({name, *bases, *(one.id for one in (entry, record) if one is not None)})

    audit_path = folder / "audit.jsonl" if section.audit_path is None else Path(section.audit_path)
    return GovernanceGate(nonces, AuditLog(audit_path, run_detached), known_as)
