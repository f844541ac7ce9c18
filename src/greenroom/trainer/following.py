"""The way of one replica to a version: asked for by its API, or taken from the file of the desired state. Owns how long
a replica may be silent or idle, and what a restart in the middle means. Depends on no other replica."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from greenroom.trainer.replica import Outcome, Replica, ReplicaAway, ReplicaError, ReplicaStatus, Result, UpdateTask

# An update is asked for again if its replica ends meanwhile, so often.
RESTARTS_MAX: Final = 3
_ENDED: Final = "restarted"

Serves = Callable[[ReplicaStatus], bool]


class Following(Protocol):
    @property
    def note(self) -> str | None:
        """What happened on the way, for the report."""

    def step(self) -> ReplicaStatus | None:
        """What the replica serves, once its update has ended. Raises ReplicaError if it has failed for good."""


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
_OTHER: Final = ReplicaError("differs", "its update is completed, and it serves something else than was asked for")


def followed(replica: Replica, following: Following, serves: Serves, patience: Patience) -> Result:
    """Take steps until its update has ended, has failed, or the replica is lost. Blocks. What it serves then is
    compared with what is wanted: that an update is said to be completed proves nothing."""
    began = heard = time.monotonic()
    while True:
        try:
            if (status := following.step()) is not None:
                if not serves(status):
                    return Result.of(replica.url, Outcome.DIFFERS, status, _OTHER)
                return replace(Result.of(replica.url, Outcome.SERVES, status), message=following.note)
            heard = time.monotonic()
        except ReplicaAway as away:
            if time.monotonic() - heard > patience.away_s:
                return Result.of(replica.url, Outcome.LOST, None, away)
        except ReplicaError as error:
            looked = look(replica)
            status = looked if isinstance(looked, ReplicaStatus) else None
            return Result.of(replica.url, Outcome.FAILED, status, error)
        if time.monotonic() - began > patience.update_s:
            late = ReplicaError("timeout", f"it has not ended within {patience.update_s:g} s")
            return Result.of(replica.url, Outcome.LOST, None, late)
        time.sleep(patience.poll_s)


def look(replica: Replica) -> ReplicaStatus | ReplicaError:
    try:
        return replica.status()
    except ReplicaError as error:
        return error


class OrderedUpdate:
    """An update that is asked for by the API, and again if the replica was restarted in the middle."""

    def __init__(self, replica: Replica, ask: Callable[[], UpdateTask], serves: Serves) -> None:
        self._replica = replica
        self._ask = ask
        self._serves = serves
        self._task: UpdateTask | None = None
        self._is_asked = False
        self._restarts = 0

    @property
    def note(self) -> str | None:
        return f"it ended during the update, and was asked again ({self._restarts})" if self._restarts else None

    def step(self) -> ReplicaStatus | None:
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
        if self._is_asked and self._serves(status := self._replica.status()):
            return status
        was_asked, self._is_asked = self._is_asked, True
        try:
            self._task = self._ask()
        except ReplicaError as error:
            if error.code != "update_in_progress":
                raise
            # This one, if the answer to it did not arrive; else another's, and what that brings is not what is wanted.
            self._is_asked = was_asked
        return None

    def _look_up(self, task: UpdateTask) -> UpdateTask:
        try:
            return self._replica.task(task.id)
        except ReplicaError as error:
            if error.code == "not_found":
                raise ReplicaError(_ENDED, "it ended during the update and does not know it any more") from None
            raise


class WatchedUpdate:
    """An update that the replica takes from the file by itself."""

    def __init__(self, replica: Replica, number: int, serves: Serves, begin_s: float) -> None:
        self._replica = replica
        self._number = number
        self._serves = serves
        self._begin_s = begin_s
        self._began = time.monotonic()
        self._was_seen = False

    @property
    def note(self) -> str | None:
        return None

    def step(self) -> ReplicaStatus | None:
        status = self._replica.status()
        if self._serves(status):
            return status
        if status.desired_number == self._number:
            self._was_seen = True
            if status.error_code is not None and not status.is_updating:
                raise ReplicaError(status.error_code, f"{status.error} It tries again by itself.")
        if not (self._was_seen or status.is_updating) and time.monotonic() - self._began > self._begin_s:
            raise ReplicaError(
                "not_followed", f"it has not begun within {self._begin_s:g} s: set SYNC_STATE_FILE there"
            )
        return None
