"""The two ways in which replicas learn what to serve: each is asked by its API, or all follow one file. Owns how an
update and the way back are asked for, how long a replica may be silent or idle, what a restart in the middle means, and
what became of each replica."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar

from greenroom.features.versions.desired import NUMBER_MAX, DesiredState, read_state, write_state
from greenroom.trainer.replica import (
    Outcome,
    Replica,
    ReplicaAway,
    ReplicaError,
    ReplicaStatus,
    Result,
    UpdateTask,
    WantedVersion,
)

Thing = TypeVar("Thing")
Made = TypeVar("Made")
Looked = ReplicaStatus | ReplicaError
# A replica with one of these serves what the update brought it.
TOOK_IT = (Outcome.SERVES, Outcome.DIFFERS)
# An update is asked for again if its replica ends meanwhile, so often.
RESTARTS_MAX: Final = 3
_ENDED: Final = "restarted"
_COMMIT: Final = re.compile("[0-9a-f]{40}")
_USED_UP: Final = ReplicaError("numbers_used_up", f"there is no number of a version after {NUMBER_MAX}")
_OTHER: Final = ReplicaError("differs", "its update is completed, and it serves something else than was asked for")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a trainer waits, in seconds."""

    # For the answer to one call that is answered at once.
    answer_s: float = 10.0
    # For a replica that has stopped answering during an update, or does not follow the file.
    away_s: float = 60.0
    # For a whole update, fetching included.
    update_s: float = 3_600.0
    # For the answer to a prompt.
    generate_s: float = 300.0
    poll_s: float = 0.5


PATIENCE: Final = Patience()


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
        return at_once(lambda replica: OrderedUpdate(replica, wanted, self._patience).followed(), replicas)

    def rolled_back(
        self, replicas: Sequence[Replica], before: Sequence[Looked], results: Sequence[Result]
    ) -> list[Result]:
        def back(one: tuple[Replica, Looked, Result]) -> Result:
            replica, status, result = one
            if result.outcome not in TOOK_IT:
                return result
            if isinstance(status, ReplicaError) or status.number is None or status.repo_id is None:
                return _stays(result)
            return _gone_back(OrderedUpdate(replica, status, self._patience).followed(), result)

        return at_once(back, list(zip(replicas, before, results, strict=True)))


class FileSync:
    """The desired state is written once, and each replica takes it from there."""

    def __init__(self, path: str, model: str | None, patience: Patience) -> None:
        self._path = path
        self._model = model
        self._patience = patience

    def updated(self, replicas: Sequence[Replica], wanted: WantedVersion, *, is_new: bool) -> list[Result]:
        """Raises OSError if the file cannot be written."""
        known = self._known()
        looked = at_once(Replica.look, replicas)
        last = max((one.number or 0 for one in looked if isinstance(one, ReplicaStatus)), default=0)
        # A replica that was changed by its API has a larger number than the state, which it would ignore.
        is_passed = known is not None and last > known.number
        if is_new or known is None or known.repo_id != wanted.repo_id or known.rollback or is_passed:
            number = max(wanted.number or 1, last + 1, known.number + 1 if known else 1)
            if number > NUMBER_MAX:
                return [Result.of(replica.url, Outcome.FAILED, None, _USED_UP) for replica in replicas]
            known = DesiredState(number, wanted.repo_id, wanted.revision, self._model, wanted.allow_gap)
            write_state(self._path, known)
        return self._watched(replicas, known.number, replace(wanted, number=known.number))

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
        back = {one.url: one for one in self._watched(took, number, old)}
        return [_gone_back(back[result.url], result) if result.url in back else result for result in results]

    def _known(self) -> DesiredState | None:
        try:
            return read_state(self._path)
        except ValueError:
            # Not a state; it is replaced.
            return None

    def _watched(self, replicas: Sequence[Replica], number: int, goal: WantedVersion | ReplicaStatus) -> list[Result]:
        return at_once(lambda replica: WatchedUpdate(replica, goal, self._patience, number).followed(), replicas)


# --- one replica ------------------------------------------------------------------------------------------------------


class Update:
    """The way of one replica to a version, or back to what it served. Depends on no other replica."""

    def __init__(self, replica: Replica, goal: WantedVersion | ReplicaStatus, patience: Patience) -> None:
        self._replica = replica
        self._goal = goal
        self._patience = patience
        self._restarts = 0

    def followed(self) -> Result:
        """Take steps until the update has ended, has failed, or the replica is lost. Blocks. What it serves then is
        compared with what is wanted: that an update is said to be completed proves nothing."""
        url = self._replica.url
        began = heard = time.monotonic()
        while True:
            try:
                if (status := self._step()) is not None:
                    if not self._is_met_by(status):
                        return Result.of(url, Outcome.DIFFERS, status, _OTHER)
                    again = f"it ended during the update, and was asked again ({self._restarts})"
                    return replace(Result.of(url, Outcome.SERVES, status), message=again if self._restarts else None)
                heard = time.monotonic()
            except ReplicaAway as away:
                if time.monotonic() - heard > self._patience.away_s:
                    return Result.of(url, Outcome.LOST, None, away)
            except ReplicaError as error:
                looked = self._replica.look()
                return Result.of(url, Outcome.FAILED, looked if isinstance(looked, ReplicaStatus) else None, error)
            if time.monotonic() - began > self._patience.update_s:
                late = ReplicaError("timeout", f"it has not ended within {self._patience.update_s:g} s")
                return Result.of(url, Outcome.LOST, None, late)
            time.sleep(self._patience.poll_s)

    def _step(self) -> ReplicaStatus | None:
        """What the replica serves, once its update has ended. Raises ReplicaError if it has failed for good."""
        raise NotImplementedError

    def _is_met_by(self, status: ReplicaStatus) -> bool:
        """True if the replica serves what it is to serve."""
        goal = self._goal
        if isinstance(goal, ReplicaStatus):
            return status.weights == goal.weights
        # Of branches and tags only the replica knows the commit.
        commit = goal.revision if goal.revision and _COMMIT.fullmatch(goal.revision) else None
        is_new = (status.number or 0) >= (goal.number or 1)
        return is_new and status.repo_id == goal.repo_id and commit in (None, status.commit)


class OrderedUpdate(Update):
    """An update that is asked for by the API, and again if the replica was restarted in the middle."""

    _task: UpdateTask | None = None
    _is_asked = False

    def _step(self) -> ReplicaStatus | None:
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
            if error.code != _ENDED or self._restarts == RESTARTS_MAX:
                raise
            # It may have promised the version before it ended, so that is looked at first.
            self._restarts += 1
            self._task = None
            return None

    def _begin(self) -> ReplicaStatus | None:
        if self._is_asked and self._is_met_by(status := self._replica.status()):
            return status
        was_asked, self._is_asked = self._is_asked, True
        try:
            self._task = self._ordered()
        except ReplicaError as error:
            if error.code != "update_in_progress":
                raise
            # This one, if the answer to it did not arrive; else another's, and what that brings is not what is wanted.
            self._is_asked = was_asked
        return None

    def _ordered(self) -> UpdateTask:
        goal = self._goal
        if isinstance(goal, WantedVersion):
            return self._replica.update(goal)
        try:
            return self._replica.roll_back(goal.model, goal.number or 0)
        except ReplicaError as error:
            if error.code != "invalid_request":
                raise
            # It keeps no earlier version.
            return self._replica.update(WantedVersion(goal.repo_id or "", goal.commit))

    def _look_up(self, task: UpdateTask) -> UpdateTask:
        try:
            return self._replica.task(task.id)
        except ReplicaError as error:
            if error.code == "not_found":
                raise ReplicaError(_ENDED, "it ended during the update and does not know it any more") from None
            raise


class WatchedUpdate(Update):
    """An update that the replica takes from the file by itself. `number` is that of the desired state."""

    def __init__(self, replica: Replica, goal: WantedVersion | ReplicaStatus, patience: Patience, number: int) -> None:
        super().__init__(replica, goal, patience)
        self._number = number
        self._began = time.monotonic()
        self._was_seen = False

    def _step(self) -> ReplicaStatus | None:
        status = self._replica.status()
        if self._is_met_by(status):
            return status
        if status.desired_number == self._number:
            self._was_seen = True
            if status.error_code is not None and not status.is_updating:
                raise ReplicaError(status.error_code, f"{status.error} It tries again by itself.")
        begin_s = self._patience.away_s
        if not (self._was_seen or status.is_updating) and time.monotonic() - self._began > begin_s:
            raise ReplicaError("not_followed", f"it has not begun within {begin_s:g} s: set SYNC_STATE_FILE there")
        return None


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


def _stays(result: Result) -> Result:
    return replace(result, code="no_earlier_version", message="it had no version to go back to")


def _gone_back(back: Result, result: Result) -> Result:
    if back.outcome is Outcome.SERVES:
        return replace(back, outcome=Outcome.ROLLED_BACK, code=result.code, message=result.message)
    return replace(back, message=f"it did not go back: {back.message}")
