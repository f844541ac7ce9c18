"""Updates all replicas of a model, compares what they serve, and sends them prompts.

Owns the order of an update over replicas: all are asked for their version first, all get the same number, and if one
of them fails the others go back. What one replica does is its own business: it serves its old version until the new
one has proved itself. Everything here blocks; replicas are called in threads, all at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from greenroom.trainer.replica import (
    Answer,
    Outcome,
    Replica,
    ReplicaError,
    ReplicaStatus,
    Report,
    Result,
    Sign,
    WantedVersion,
    same_weights,
)
from greenroom.trainer.sync import PATIENCE, TOOK_IT, ApiSync, FileSync, Looked, Patience, Sync, at_once

# A commit, or as much of it as is commonly written. What is shorter is a tag.
_COMMIT: Final = re.compile("[0-9a-f]{7,40}")


class Trainer:
    def __init__(
        self,
        replicas: Sequence[str] | Callable[[], Sequence[str]],
        *,
        api_key: str | None = None,
        model: str | None = None,
        state_file: str | None = None,
        patience: Patience = PATIENCE,
        sign: Sign | None = None,
    ) -> None:
        """`replicas` are addresses, or find them anew for each call. The key is an admin's.

        `model` is needed where several models are under version control. With `state_file` updates are written there,
        where the replicas find them, instead of asked for. `sign` is needed where the
        replicas' operations are signed: `greenroom.features.governance.signing.signer` makes one of a key file. Raises
        ValueError for an invalid address.
        """
        self._addresses = replicas if callable(replicas) else lambda: replicas
        self._api_key = api_key
        self._model = model
        self._sign = sign
        self._patience = patience
        self._sync: Sync = ApiSync(patience) if state_file is None else FileSync(state_file, model, patience)
        # What branches and tags meant when they were last updated to.
        self._commits: dict[tuple[str, str | None], str | None] = {}
        if not callable(replicas):
            self._replicas()

    def prompt(self, prompt: str, *, max_tokens: int = 64) -> list[Answer]:
        """Send a prompt to every replica. A replica that fails is told in its answer."""

        def ask(replica: Replica) -> Answer:
            try:
                return Answer(replica.url, *replica.generate(prompt, max_tokens, self._patience.generate_s))
            except ReplicaError as error:
                return Answer(replica.url, None, code=error.code, message=error.message)

        return at_once(ask, self._replicas())

    def verify(self) -> Report:
        """Whether all replicas serve the same weights: the same repository at the same commit."""
        replicas = self._replicas()
        looked = at_once(Replica.look, replicas)
        there = [one for one in looked if isinstance(one, ReplicaStatus)]
        results, newest = [], _newest(there)
        for replica, status in zip(replicas, looked, strict=True):
            if isinstance(status, ReplicaError):
                results.append(Result.of(replica.url, Outcome.FAILED, None, status))
                continue
            outcome = Outcome.SERVES if newest and status.weights == newest.weights else Outcome.DIFFERS
            told = ReplicaError(status.error_code, status.error or "") if status.error_code else None
            results.append(Result.of(replica.url, outcome, status, told))
        ok = len(there) == len(replicas) and same_weights(there) and newest is not None and newest.number is not None
        words = "All replicas serve the same weights." if ok else "The replicas do not all serve the same weights."
        return Report(ok, tuple(results), words)

    def update(
        self, repo_id: str, revision: str | None = None, *, allow_gap: bool = False, all_or_nothing: bool = True
    ) -> Report:
        """Let all replicas serve these weights, and compare what they serve then. With `all_or_nothing`, replicas that
        took them go back if one replica did not."""
        replicas = self._replicas()
        looked = at_once(Replica.look, replicas)
        if all_or_nothing and any(isinstance(one, ReplicaError) for one in looked):
            return _untouched(replicas, looked)
        wanted = WantedVersion(repo_id, revision, _next_number(looked), allow_gap)
        results = self._updated(replicas, wanted, is_new=True)
        ok = all(result.outcome is Outcome.SERVES for result in results)
        if ok:
            self._commits[repo_id, revision] = results[0].commit
            return Report(True, tuple(results), f"All replicas serve {repo_id} as version {_numbers(results)}.")
        failed = sum(result.outcome is not Outcome.SERVES for result in results)
        words = f"{failed} of {len(results)} replicas did not take {repo_id}"
        if not all_or_nothing:
            return Report(False, tuple(results), f"{words}.")
        after = self._sync.rolled_back(replicas, looked, results)
        took_it = [now for one, now in zip(results, after, strict=True) if one.outcome in TOOK_IT]
        stay = sum(now.outcome is not Outcome.ROLLED_BACK for now in took_it)
        back = f"; {stay} of the others did not go back" if stay else "; the others went back" if took_it else ""
        return Report(False, tuple(after), f"{words}{back}.")

    def reconcile(self, repo_id: str, revision: str | None = None) -> Report:
        """Update only replicas that do not serve these weights. Replicas that were away catch up by this. What the
        newest version of a replica serves decides which commit a branch means, until it is updated anew. One that is
        being updated to this repository already, as when it fetches its first version, is left to that."""
        replicas = self._replicas()
        looked = at_once(Replica.look, replicas)
        leader = _newest(one for one in looked if isinstance(one, ReplicaStatus) and self._is(one, repo_id, revision))
        coming = [isinstance(one, ReplicaStatus) and one.is_coming_to(repo_id) for one in looked]
        # Where none serves it yet but one is about to, that decides the commit.
        behind = [
            replica
            for replica, status, comes in zip(replicas, looked, coming, strict=True)
            if isinstance(status, ReplicaStatus)
            and not (comes or (any(coming) if leader is None else status.weights == leader.weights))
        ]
        wanted = WantedVersion(repo_id, revision, _next_number(looked))
        if leader is not None:
            wanted = WantedVersion(repo_id, leader.commit or revision, leader.number)
        updated = self._updated(behind, wanted, is_new=leader is None) if behind else []
        told = {result.url: result for result in updated}
        results = tuple(
            told.get(replica.url) or _unchanged(replica, status, leader, repo_id)
            for replica, status in zip(replicas, looked, strict=True)
        )
        if not all(result.outcome is Outcome.SERVES for result in results):
            return Report(False, results, f"Not all replicas serve {repo_id}.")
        if leader is None:
            self._commits[repo_id, revision] = results[0].commit
        caught_up = f"; {len(updated)} caught up" if leader is not None and updated else ""
        return Report(True, results, f"All replicas serve {repo_id} as version {_numbers(results)}{caught_up}.")

    # --- all of them ------------------------------------------------------------------------------------------------

    def _replicas(self) -> list[Replica]:
        made = [
            Replica(
                url, api_key=self._api_key, model=self._model, answer_max_s=self._patience.answer_s, sign=self._sign
            )
            for url in self._addresses()
        ]
        if not made:
            raise ValueError("there is no replica: name at least one")
        return made

    def _is(self, status: ReplicaStatus, repo_id: str, revision: str | None) -> bool:
        if status.repo_id != repo_id or status.number is None:
            return False
        if revision is None or (_COMMIT.fullmatch(revision) and (status.commit or "").startswith(revision)):
            return True
        return self._commits.get((repo_id, revision), "") == status.commit

    def _updated(self, replicas: Sequence[Replica], wanted: WantedVersion, *, is_new: bool) -> list[Result]:
        results = self._sync.updated(replicas, wanted, is_new=is_new)
        commits = [result.commit for result in results if result.outcome is Outcome.SERVES]
        # A branch may move between two replicas.
        return [
            replace(
                result,
                outcome=Outcome.DIFFERS,
                code="commits_differ",
                message=f"it found commit {result.commit} where another found {commits[0]}; name a commit",
            )
            if result.outcome is Outcome.SERVES and result.commit != commits[0]
            else result
            for result in results
        ]


def _newest(statuses: Iterable[ReplicaStatus]) -> ReplicaStatus | None:
    return max(statuses, key=lambda status: status.number or 0, default=None)


def _next_number(looked: Sequence[Looked]) -> int:
    return 1 + max((one.number or 0 for one in looked if isinstance(one, ReplicaStatus)), default=0)


def _numbers(results: Sequence[Result]) -> str:
    return " and ".join(str(number) for number in sorted({result.model_version or 0 for result in results}))


def _unchanged(replica: Replica, looked: Looked, leader: ReplicaStatus | None, repo_id: str) -> Result:
    if isinstance(looked, ReplicaError):
        return Result.of(replica.url, Outcome.FAILED, None, looked)
    if leader is not None and looked.weights == leader.weights:
        return Result.of(replica.url, Outcome.SERVES, looked)
    comes = looked.is_coming_to(repo_id)
    why = ReplicaError("update_in_progress", f"it is being updated to {repo_id}") if comes else None
    return Result.of(replica.url, Outcome.DIFFERS, looked, why)


def _untouched(replicas: Sequence[Replica], looked: Sequence[Looked]) -> Report:
    results = [
        Result.of(replica.url, Outcome.FAILED, None, status)
        if isinstance(status, ReplicaError)
        else Result.of(replica.url, Outcome.UNTOUCHED, status)
        for replica, status in zip(replicas, looked, strict=True)
    ]
    failed = sum(result.outcome is Outcome.FAILED for result in results)
    return Report(False, tuple(results), f"Nothing was changed: {failed} of {len(results)} replicas cannot be asked.")
