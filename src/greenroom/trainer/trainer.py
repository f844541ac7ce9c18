"""Updates all replicas of a model, compares what they serve, and sends them prompts.

Owns the order of an update over replicas: all are asked for their version first, all get the same number, and if one
of them fails the others go back. What one replica does is its own business: it serves its old version until the new
one has proved itself. Everything here blocks; replicas are called in threads, all at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from greenroom.trainer.replica import (
    Replica,
    ReplicaAway,
    ReplicaError,
    ReplicaStatus,
    UpdateTask,
    WantedVersion,
)
from greenroom.trainer.report import Answer, Outcome, Report, Result, same_weights

# An update is asked for again if its replica ends meanwhile, so often.
RESTARTS_MAX: Final = 3
_ENDED: Final = ReplicaError("restarted", "it ended during the update")

Thing = TypeVar("Thing")
Made = TypeVar("Made")
Looked = ReplicaStatus | ReplicaError


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a trainer waits, in seconds."""

    # For the answer to one call that is answered at once.
    answer_s: float = 10.0
    # For a replica that has stopped answering during an update.
    away_s: float = 60.0
    # For a whole update, fetching included.
    update_s: float = 3_600.0
    # For the answer to a prompt.
    generate_s: float = 300.0
    poll_s: float = 0.5


PATIENCE: Final = Patience()


class Trainer:
    def __init__(
        self,
        replicas: Sequence[str] | Callable[[], Sequence[str]],
        *,
        api_key: str | None = None,
        model: str | None = None,
        patience: Patience = PATIENCE,
    ) -> None:
        """`replicas` are addresses, or find them anew for each call. The key is an admin's.

        `model` is needed where several models are under version control. Raises ValueError for an invalid address.
        """
        self._addresses = replicas if callable(replicas) else lambda: replicas
        self._api_key = api_key
        self._model = model
        self._patience = patience
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

        return _at_once(ask, self._replicas())

    def verify(self) -> Report:
        """Whether all replicas serve the same weights: the same repository at the same commit."""
        replicas = self._replicas()
        looked = _at_once(_look, replicas)
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
        """Let all replicas serve these weights, and compare what they serve then.

        With `all_or_nothing`, replicas that took them go back if one replica did not.
        """
        replicas = self._replicas()
        looked = _at_once(_look, replicas)
        if all_or_nothing and any(isinstance(one, ReplicaError) for one in looked):
            return _untouched(replicas, looked)
        wanted = WantedVersion(repo_id, revision, _next_number(looked), allow_gap)
        results = self._updated(replicas, wanted)
        ok = all(result.outcome is Outcome.SERVES for result in results)
        if ok:
            self._commits[repo_id, revision] = results[0].commit
            return Report(True, tuple(results), f"All replicas serve {repo_id} as version {_numbers(results)}.")
        failed = sum(result.outcome is not Outcome.SERVES for result in results)
        words = f"{failed} of {len(results)} replicas did not take {repo_id}"
        if not all_or_nothing:
            return Report(False, tuple(results), f"{words}.")
        results = self._rolled_back(replicas, looked, results)
        return Report(False, tuple(results), f"{words}; the others went back.")

    def reconcile(self, repo_id: str, revision: str | None = None) -> Report:
        """Update only replicas that do not serve these weights. Replicas that were away catch up by this.

        What the newest version of a replica serves decides which commit a branch means, until it is updated anew.
        """
        replicas = self._replicas()
        looked = _at_once(_look, replicas)
        leader = _newest(one for one in looked if isinstance(one, ReplicaStatus) and self._is(one, repo_id, revision))
        if leader is None:
            return self.update(repo_id, revision, all_or_nothing=False)
        wanted = WantedVersion(repo_id, leader.commit or revision, leader.number)
        behind = [
            replica
            for replica, status in zip(replicas, looked, strict=True)
            if isinstance(status, ReplicaStatus) and status.weights != leader.weights
        ]
        told = {result.url: result for result in self._updated(behind, wanted)}
        results = tuple(
            told.get(replica.url) or _unchanged(replica, status)
            for replica, status in zip(replicas, looked, strict=True)
        )
        ok = all(result.outcome is Outcome.SERVES for result in results)
        caught_up = sum(result.outcome is Outcome.SERVES for result in told.values())
        words = f"All replicas serve {repo_id}" if ok else f"Not all replicas serve {repo_id}"
        return Report(ok, results, words + (f"; {caught_up} caught up." if caught_up else "."))

    # --- all of them ------------------------------------------------------------------------------------------------

    def _replicas(self) -> list[Replica]:
        key, model, answer_s = self._api_key, self._model, self._patience.answer_s
        made = [Replica(url, api_key=key, model=model, answer_max_s=answer_s) for url in self._addresses()]
        if not made:
            raise ValueError("there is no replica: name at least one")
        return made

    def _is(self, status: ReplicaStatus, repo_id: str, revision: str | None) -> bool:
        if status.repo_id != repo_id or status.number is None:
            return False
        if revision is None or (status.commit or "").startswith(revision):
            return True
        return self._commits.get((repo_id, revision), "") == status.commit

    def _updated(self, replicas: Sequence[Replica], wanted: WantedVersion) -> list[Result]:
        def serves(status: ReplicaStatus) -> bool:
            return status.repo_id == wanted.repo_id and (status.number or 0) >= (wanted.number or 1)

        results = _at_once(lambda replica: self._brought(replica, lambda: replica.update(wanted), serves), replicas)
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

    def _rolled_back(
        self, replicas: Sequence[Replica], before: Sequence[Looked], results: Sequence[Result]
    ) -> list[Result]:
        def back(one: tuple[Replica, Looked, Result]) -> Result:
            replica, status, result = one
            if result.outcome not in (Outcome.SERVES, Outcome.DIFFERS):
                return result
            return self._brought_back(replica, status, result)

        return _at_once(back, list(zip(replicas, before, results, strict=True)))

    # --- one of them ------------------------------------------------------------------------------------------------

    def _brought_back(self, replica: Replica, before: Looked, result: Result) -> Result:
        if isinstance(before, ReplicaError) or before.number is None or before.repo_id is None:
            return replace(result, code="no_earlier_version", message="it had no version to go back to")
        model, number, repo_id = before.model, before.number, before.repo_id

        def ask() -> UpdateTask:
            try:
                return replica.roll_back(model, number)
            except ReplicaError as error:
                if error.code != "invalid_request":
                    raise
                # It keeps no earlier version.
                return replica.update(WantedVersion(repo_id, before.commit))

        back = self._brought(replica, ask, lambda status: status.weights == before.weights)
        if back.outcome is Outcome.SERVES:
            return replace(back, outcome=Outcome.ROLLED_BACK, code=result.code, message=result.message)
        return replace(back, message=f"it did not go back: {back.message}")

    def _brought(
        self, replica: Replica, ask: Callable[[], UpdateTask], serves: Callable[[ReplicaStatus], bool]
    ) -> Result:
        """Ask for an update and follow it to its end, also over restarts of the replica."""
        following = _Following(replica, ask, serves)
        patience, began = self._patience, time.monotonic()
        heard = began
        while True:
            try:
                if (status := following.step()) is not None:
                    return Result.of(replica.url, Outcome.SERVES, status)
                heard = time.monotonic()
            except ReplicaAway as away:
                if time.monotonic() - heard > patience.away_s:
                    return Result.of(replica.url, Outcome.LOST, None, away)
            except ReplicaError as error:
                looked = _look(replica)
                status = looked if isinstance(looked, ReplicaStatus) else None
                return Result.of(replica.url, Outcome.FAILED, status, error)
            if time.monotonic() - began > patience.update_s:
                late = ReplicaError("timeout", f"it has not ended within {patience.update_s:g} s")
                return Result.of(replica.url, Outcome.LOST, None, late)
            time.sleep(patience.poll_s)


class _Following:
    """One update of one replica, asked for again if the replica was restarted in the middle."""

    def __init__(
        self, replica: Replica, ask: Callable[[], UpdateTask], serves: Callable[[ReplicaStatus], bool]
    ) -> None:
        self._replica = replica
        self._ask = ask
        self._serves = serves
        self._task: UpdateTask | None = None
        self._is_asked = False
        self._restarts = 0

    def step(self) -> ReplicaStatus | None:
        """What it serves, once that is what was wanted. Raises ReplicaError if it has failed for good."""
        if self._task is None:
            return self._begin()
        try:
            self._task = self._look_up(self._task)
            if self._task.is_running:
                return None
            if self._task.code is not None:
                raise ReplicaError(self._task.code, self._task.error or "it did not say why")
            return self._replica.status()
        except ReplicaError as error:
            if error.code != _ENDED.code or self._restarts == RESTARTS_MAX:
                raise
            # It may have promised the version before it ended, so that is looked at first.
            self._restarts += 1
            self._task = None
            return None

    def _begin(self) -> ReplicaStatus | None:
        if self._is_asked and self._serves(status := self._replica.status()):
            return status
        self._is_asked = True
        try:
            self._task = self._ask()
        except ReplicaError as error:
            # Another update, or this one, whose answer did not arrive.
            if error.code != "update_in_progress":
                raise
        return None

    def _look_up(self, task: UpdateTask) -> UpdateTask:
        try:
            return self._replica.task(task.id)
        except ReplicaError as error:
            if error.code == "not_found":
                raise _ENDED from None
            raise


def _at_once(work: Callable[[Thing], Made], things: Sequence[Thing]) -> list[Made]:
    if not things:
        return []
    with ThreadPoolExecutor(len(things)) as pool:
        return list(pool.map(work, things))


def _look(replica: Replica) -> Looked:
    try:
        return replica.status()
    except ReplicaError as error:
        return error


def _newest(statuses: Iterable[ReplicaStatus]) -> ReplicaStatus | None:
    return max(statuses, key=lambda status: status.number or 0, default=None)


def _next_number(looked: Sequence[Looked]) -> int:
    return 1 + max((one.number or 0 for one in looked if isinstance(one, ReplicaStatus)), default=0)


def _numbers(results: Sequence[Result]) -> str:
    return " and ".join(str(number) for number in sorted({result.model_version or 0 for result in results}))


def _unchanged(replica: Replica, looked: Looked) -> Result:
    if isinstance(looked, ReplicaError):
        return Result.of(replica.url, Outcome.FAILED, None, looked)
    return Result.of(replica.url, Outcome.SERVES, looked)


def _untouched(replicas: Sequence[Replica], looked: Sequence[Looked]) -> Report:
    results = [
        Result.of(replica.url, Outcome.FAILED, None, status)
        if isinstance(status, ReplicaError)
        else Result.of(replica.url, Outcome.UNTOUCHED, status)
        for replica, status in zip(replicas, looked, strict=True)
    ]
    failed = sum(result.outcome is Outcome.FAILED for result in results)
    return Report(False, tuple(results), f"Nothing was changed: {failed} of {len(results)} replicas cannot be asked.")
