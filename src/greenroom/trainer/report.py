"""What a trainer tells: for each replica what became of an update, what it serves, and why it failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from greenroom.trainer.replica import ReplicaError, ReplicaStatus


class Outcome(StrEnum):
    # It serves what was asked for, and did so before the call or since.
    SERVES = "serves"
    # It serves something else than the others.
    DIFFERS = "differs"
    # It said why it did not take the version, or never answered.
    FAILED = "failed"
    # It was asked for the version and no longer answers: it may take it when it is back.
    LOST = "lost"
    # It had taken the version and serves its earlier one again, because another replica failed.
    ROLLED_BACK = "rolled_back"
    # It was asked for nothing, because another replica failed first.
    UNTOUCHED = "untouched"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one replica. Version, repository and commit are what it serves, as far as is known."""

    url: str
    outcome: Outcome
    model_version: int | None = None
    model_repo_id: str | None = None
    commit: str | None = None
    code: str | None = None
    message: str | None = None

    @classmethod
    def of(cls, url: str, outcome: Outcome, status: ReplicaStatus | None, error: ReplicaError | None = None) -> Result:
        return cls(
            url,
            outcome,
            None if status is None else status.number,
            None if status is None else status.repo_id,
            None if status is None else status.commit,
            None if error is None else error.code,
            None if error is None else error.message,
        )

    def __str__(self) -> str:
        version = "no version" if self.model_version is None else f"version {self.model_version}"
        commit = "" if self.commit is None else f" ({self.commit[:12]})"
        serves = f"serves {version} of {self.model_repo_id}{commit}" if self.model_repo_id else f"serves {version}"
        if self.outcome is Outcome.SERVES:
            why = "" if self.message is None else f"; its last update failed: {self.message}"
            return f"{self.url} {serves}{why}"
        is_known = self.model_version is not None or self.model_repo_id is not None
        why = "" if self.message is None else f": {self.message}"
        return f"{self.url} {self.outcome.value.replace('_', ' ')}{why}{f'; it {serves}' if is_known else ''}"


@dataclass(frozen=True, slots=True)
class Report:
    """All replicas. `ok` is true if all of them serve the same weights, and what was asked for."""

    ok: bool
    results: tuple[Result, ...]
    summary: str

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "summary": self.summary, "replicas": [asdict(result) for result in self.results]}

    def __str__(self) -> str:
        return "\n".join((self.summary, *(f"  {result}" for result in self.results)))


@dataclass(frozen=True, slots=True)
class Answer:
    """What one replica answered to a prompt; `text` is None if it failed, and `message` says why."""

    url: str
    text: str | None
    model_version: int | None = None
    model_repo_id: str | None = None
    code: str | None = None
    message: str | None = None


def same_weights(statuses: Sequence[ReplicaStatus]) -> bool:
    return len({status.weights for status in statuses}) <= 1
