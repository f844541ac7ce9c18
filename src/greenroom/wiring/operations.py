"""Operations: updates of models under version control, and what signs them.

Owns how these are made and joined, where used tokens and the audit log are kept, and by which names a rule finds a
model. Nothing of governance is opened or imported while the configuration needs no tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from greenroom.config.schema import Config
from greenroom.errors import ConfigError
from greenroom.library.library import Library
from greenroom.library.versions import VersionStore
from greenroom.process.state_dir import StateDir
from greenroom.runtime.detached import run_detached
from greenroom.runtime.known_models import KnownModels
from greenroom.runtime.loop import Tickets
from greenroom.runtime.operations.moves import OperatorMoves
from greenroom.runtime.operations.updates import Updates
from greenroom.runtime.operations.version_changes import UpdateServices
from greenroom.runtime.operations.warm_up import WarmUp
from greenroom.runtime.operations.weights import VersionWeights
from greenroom.tenancy.governance.audit import AuditLog
from greenroom.tenancy.governance.gate import GovernanceGate
from greenroom.tenancy.governance.nonces import NonceJournal, Nonces
from greenroom.wiring.common import CommonParts
from greenroom.wiring.front import FrontParts

GOVERNANCE_FOLDER: Final = "governance"


@dataclass(frozen=True, slots=True)
class Updating:
    """What only updates need. `unchanging` is held while the configuration must not change."""

    library: Library
    store: VersionStore
    tickets: Tickets
    unchanging: asyncio.Lock
    models: KnownModels


def wire_updates(common: CommonParts, front: FrontParts, moves: OperatorMoves, updating: Updating) -> Updates:
    services = UpdateServices(
        gateway=common.gateway,
        catalog=common.catalog,
        store=updating.store,
        weights=VersionWeights(updating.library, front.downloads),
        moves=moves,
        warm_up=WarmUp(updating.tickets, common.loop),
        slots=common.slots,
        hosted_slots=common.hosted_slots,
        loop=common.loop,
        models=updating.models,
        unchanging=updating.unchanging,
    )
    return Updates(front.operations, services)


def wire_governance(state_dir: StateDir, config: Config) -> GovernanceGate:
    folder = state_dir.path / GOVERNANCE_FOLDER
    section = config.governance

    def nonces() -> Nonces:
        store = section.store or config.leases.store
        if store is None:
            path, is_first = folder / "nonces", state_dir.is_new
            return NonceJournal(path, section.clock_skew_s, run_detached, is_first=is_first)
        try:
            from greenroom.tenancy.governance.shared_nonces import SharedNonces
        except ImportError:
            raise ConfigError("governance.store needs the client for Redis: pip install 'greenroom[redis]'") from None
        return SharedNonces(store, section.clock_skew_s)

    audit_path = folder / "audit.jsonl" if section.audit_path is None else Path(section.audit_path)
    return GovernanceGate(nonces, AuditLog(audit_path, run_detached))
