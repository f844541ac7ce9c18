"""The two ways in which replicas learn what to serve: each is asked by its API, or all follow one file. Owns how an
update and the way back are asked for, and what became of each replica."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Final, Protocol, TypeVar

from greenroom.features.versions.desired import NUMBER_MAX, DesiredState, read_state, write_state
from greenroom.trainer.following import OrderedUpdate, Patience, Serves, WatchedUpdate, followed, look
from greenroom.trainer.replica import Outcome, Replica, ReplicaError, ReplicaStatus, Result, UpdateTask, WantedVersion

Thing = TypeVar("Thing")
Made = TypeVar("Made")
Looked = ReplicaStatus | ReplicaError
# A replica with one of these serves what the update brought it.
TOOK_IT = (Outcome.SERVES, Outcome.DIFFERS)
_COMMIT: Final = re.compile("[0-9a-f]{40}")
_USED_UP: Final = ReplicaError("numbers_used_up", f"there is no number of a version after {NUMBER_MAX}")


class Sync(Protocol):
    def updated(self, replicas: Sequence[Replica], wanted: WantedVersion, *, is_new: bool) -> list[Result]:
        """Let the replicas serve this. `is_new` is false if others serve it already."""

    def rolled_back(
        self, replicas: Sequence[Replica], before: Sequence[Looked], results: Sequence[Result]
    ) -> list[Result]:
        """Let replicas that took a version serve what they did before."""


class ApiSync:
    """Each replica is asked."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience

    def updated(self, replicas: Sequence[Replica], wanted: WantedVersion, *, is_new: bool) -> list[Result]:
        serves = _serving(wanted)
        return at_once(lambda replica: self._brought(replica, lambda: replica.update(wanted), serves), replicas)

    def rolled_back(
        self, replicas: Sequence[Replica], before: Sequence[Looked], results: Sequence[Result]
    ) -> list[Result]:
        def back(one: tuple[Replica, Looked, Result]) -> Result:
            replica, status, result = one
            return self._brought_back(replica, status, result) if result.outcome in TOOK_IT else result

        return at_once(back, list(zip(replicas, before, results, strict=True)))

    def _brought_back(self, replica: Replica, before: Looked, result: Result) -> Result:
        if isinstance(before, ReplicaError) or before.number is None or before.repo_id is None:
            return _stays(result)
        model, number, repo_id = before.model, before.number, before.repo_id

        def ask() -> UpdateTask:
            try:
                return replica.roll_back(model, number)
            except ReplicaError as error:
                if error.code != "invalid_request":
                    raise
                # It keeps no earlier version.
                return replica.update(WantedVersion(repo_id, before.commit))

        return _gone_back(self._brought(replica, ask, lambda status: status.weights == before.weights), result)

    def _brought(self, replica: Replica, ask: Callable[[], UpdateTask], serves: Serves) -> Result:
        return followed(replica, OrderedUpdate(replica, ask, serves), serves, self._patience)


class FileSync:
    """The desired state is written once, and each replica takes it from there."""

    def __init__(self, path: str, model: str | None, patience: Patience) -> None:
        self._path = path
        self._model = model
        self._patience = patience

    def updated(self, replicas: Sequence[Replica], wanted: WantedVersion, *, is_new: bool) -> list[Result]:
        """Raises OSError if the file cannot be written."""
        known = self._known()
        last = max((one.number or 0 for one in at_once(look, replicas) if isinstance(one, ReplicaStatus)), default=0)
        # A replica that was changed by its API has a larger number than the state, which it would ignore.
        is_passed = known is not None and last > known.number
        if is_new or known is None or known.repo_id != wanted.repo_id or known.rollback or is_passed:
            number = max(wanted.number or 1, last + 1, known.number + 1 if known else 1)
            if number > NUMBER_MAX:
                return [Result.of(replica.url, Outcome.FAILED, None, _USED_UP) for replica in replicas]
            known = DesiredState(number, wanted.repo_id, wanted.revision, self._model, wanted.allow_gap)
            write_state(self._path, known)
        return self._watched(replicas, known.number, _serving(replace(wanted, number=known.number)))

    def rolled_back(
        self, replicas: Sequence[Replica], before: Sequence[Looked], results: Sequence[Result]
    ) -> list[Result]:
        """All go back to what the newest of them served before, also those that are away now."""
        there = [one for one in before if isinstance(one, ReplicaStatus) and one.number is not None]
        old = max(there, key=lambda status: status.number or 0, default=None)
        if old is None or old.repo_id is None:
            return [_stays(result) if result.outcome in TOOK_IT else result for result in results]
        known = self._known()
        number = 1 + max(known.number if known else 0, *(result.model_version or 0 for result in results))
        if number > NUMBER_MAX:
            return list(results)
        write_state(self._path, DesiredState(number, old.repo_id, old.commit, self._model, rollback=True))
        took = [replica for replica, result in zip(replicas, results, strict=True) if result.outcome in TOOK_IT]
        back = {one.url: one for one in self._watched(took, number, lambda now: now.weights == old.weights)}
        return [_gone_back(back[result.url], result) if result.url in back else result for result in results]

    def _known(self) -> DesiredState | None:
        try:
            return read_state(self._path)
        except ValueError:
            # Not a state; it is replaced.
            return None

    def _watched(self, replicas: Sequence[Replica], number: int, serves: Serves) -> list[Result]:
        patience = self._patience

        def watch(replica: Replica) -> Result:
            return followed(replica, WatchedUpdate(replica, number, serves, patience.away_s), serves, patience)

        return at_once(watch, replicas)


def at_once(work: Callable[[Thing], Made], things: Sequence[Thing]) -> list[Made]:
    """The work on each, in threads. An interrupt leaves them behind: they end with the process."""
    futures: list[Future[Made]] = [Future() for _ in things]

    def run(thing: Thing, future: Future[Made]) -> None:
        try:
            future.set_result(work(thing))
        except BaseException as error:
            future.set_exception(error)

    for pair in zip(things, futures, strict=True):
        threading.Thread(target=run, args=pair, name="greenroom trainer", daemon=True).start()
    return [future.result() for future in futures]


def _serving(wanted: WantedVersion) -> Serves:
    # Of branches and tags only the replica knows the commit.
    commit = wanted.revision if wanted.revision and _COMMIT.fullmatch(wanted.revision) else None

    def serves(status: ReplicaStatus) -> bool:
        is_new = (status.number or 0) >= (wanted.number or 1)
        return is_new and status.repo_id == wanted.repo_id and commit in (None, status.commit)

    return serves


def _stays(result: Result) -> Result:
    return replace(result, code="no_earlier_version", message="it had no version to go back to")


def _gone_back(back: Result, result: Result) -> Result:
    if back.outcome is Outcome.SERVES:
        return replace(back, outcome=Outcome.ROLLED_BACK, code=result.code, message=result.message)
    return replace(back, message=f"it did not go back: {back.message}")
