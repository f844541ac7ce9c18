"""What outlives a request: the table of operations, pictures, and what signs operations, with their files.

Nothing of governance is opened or imported while the configuration needs no tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from greenroom.config.schema import Config
from greenroom.errors import ConfigError
from greenroom.features.governance.audit import AuditLog
from greenroom.features.governance.gate import GovernanceGate
from greenroom.features.governance.nonces import NonceJournal, Nonces
from greenroom.features.pictures.store import PictureStore
from greenroom.process.state_dir import StateDir
from greenroom.runtime.operations.files import OperationFiles
from greenroom.runtime.operations.table import JobLimits, KeepLimits, OperationEvents, OperationTable
from greenroom.wiring.common import CommonParts

GOVERNANCE_FOLDER: Final = "governance"


def wire_governance(state_dir: StateDir, config: Config) -> GovernanceGate:
    folder = state_dir.path / GOVERNANCE_FOLDER
    section = config.governance

    def nonces() -> Nonces:
        store = section.store or config.leases.store
        if store is None:
            path, is_first = folder / "nonces", state_dir.is_new
            return NonceJournal(path, section.clock_skew_s, is_first=is_first)
        try:
            from greenroom.features.governance.shared_nonces import SharedNonces
        except ImportError:
            raise ConfigError("governance.store needs the client for Redis: pip install 'greenroom[redis]'") from None
        return SharedNonces(store, section.clock_skew_s)

    audit_path = folder / "audit.jsonl" if section.audit_path is None else Path(section.audit_path)
    return GovernanceGate(nonces, AuditLog(audit_path))


MIB: Final = 1024 * 1024


def wire_table(common: CommonParts) -> OperationTable:
    def limits() -> JobLimits:
        jobs = common.gateway.config.jobs
        return JobLimits(jobs.keep_s, jobs.count_max, jobs.store_mib * MIB, jobs.unfinished_max)

    return OperationTable(OperationFiles(common.state_dir.path / "jobs"), limits, OperationEvents(common.hub))


def wire_pictures(common: CommonParts) -> PictureStore:
    def limits() -> KeepLimits:
        images = common.gateway.config.images
        return KeepLimits(images.keep_s, images.count_max, images.store_mib * MIB)

    return PictureStore(OperationFiles(common.state_dir.path / "pictures"), limits, common.clock)
