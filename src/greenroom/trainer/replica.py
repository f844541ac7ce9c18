"""One replica as a trainer sees it: its version, updates, rollbacks and answers, over HTTP.

Owns the calls and the translation of everything that can go wrong into `ReplicaError`. Each call has a connection of
its own, so that a replica that was restarted is found again. Never waits longer for an answer than it was told to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import quote, urlencode

from greenroom.base.json_client import NO_ANSWER, WHOLE_MAX, Call, Fields, json_of, origin_of, reason

_TASK_STATES: Final = frozenset({"updating", "completed", "failed"})
# What a replica answers while it starts or ends: ask again later.
_COMING_AND_GOING: Final = frozenset({"shutting_down", "starting"})


# What it, or a proxy before it, answers to a look when there is too much to do: look again later.
_LATER: Final = frozenset({429, 502, 503, 504})
# Makes the token of one operation on a model, for a call with these fields.
Sign = Callable[[str, str | None, Mapping[str, Any]], str]


class ReplicaError(Exception):
    """A replica refused or failed. `code` is the gateway's."""

    def __init__(self, code: str, message: str, task: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        # The update that runs already, for `update_in_progress`.
        self.task = task


class ReplicaAway(ReplicaError):
    """It does not answer, or not yet, or no longer: it may be back soon."""

    def __init__(self, message: str) -> None:
        super().__init__("unreachable", message)


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What a replica serves. `number` is None until it has a version; what is `desired` is of its running or its last,
    failed update."""

    model: str
    number: int | None
    repo_id: str | None
    commit: str | None
    is_updating: bool = False
    desired_number: int | None = None
    desired_repo_id: str | None = None
    error_code: str | None = None
    error: str | None = None

    @property
    def weights(self) -> tuple[str | None, str | None]:
        return self.repo_id, self.commit

    def is_coming_to(self, repo_id: str) -> bool:
        """True while an update to this repository runs, such as that to its first version."""
        return self.is_updating and self.desired_repo_id == repo_id


@dataclass(frozen=True, slots=True)
class WantedVersion:
    """What a replica shall serve. `number` is the least number that the version gets."""

    repo_id: str
    revision: str | None = None
    number: int | None = None
    allow_gap: bool = False


@dataclass(frozen=True, slots=True)
class UpdateTask:
    """One update as it is now. `is_running` is false when it has ended; then `code` says whether it failed."""

    id: str
    is_running: bool
    step: str
    code: str | None = None
    error: str | None = None


class Replica:
    def __init__(
        self, url: str, *, api_key: str | None, model: str | None, answer_max_s: float, sign: Sign | None = None
    ) -> None:
        """Raises ValueError for an invalid address. Connects to nothing yet."""
        whole = url if "://" in url else f"http://{url}"
        if (origin := origin_of(whole, api_key)) is None:
            raise ValueError(f"{url!r} is no address of a replica; write it like http://127.0.0.1:8001")
        self.url = whole.rstrip("/").removesuffix("/v1")
        self._origin = origin
        self._model = model
        self._answer_max_s = answer_max_s
        self._sign = sign

    def status(self) -> ReplicaStatus:
        """Raises ReplicaError, as all calls do."""
        said, _ = self._call("GET", "/status" + self._query())
        with _of_gateway():
            desired, error = said.inner_or_none("desired"), said.inner_or_none("error")
            return ReplicaStatus(
                model=said.name("model"),
                number=said.whole_or_none("model_version", 1),
                repo_id=said.name_or_none("model_repo_id"),
                commit=said.name_or_none("commit"),
                is_updating=said.flag("updating"),
                desired_number=None if desired is None else desired.whole_or_none("model_version", 1),
                desired_repo_id=None if desired is None else desired.text_or_none("model_repo_id"),
                error_code=None if error is None else error.text("code"),
                error=None if error is None else error.text("message"),
            )

    def look(self) -> ReplicaStatus | ReplicaError:
        """Its status, or why it does not tell."""
        try:
            return self.status()
        except ReplicaError as error:
            return error

    def update(self, wanted: WantedVersion) -> UpdateTask:
        body = {"model_repo_id": wanted.repo_id, "revision": wanted.revision, "model_version": wanted.number}
        said = {name: value for name, value in body.items() if value is not None} | {"allow_gap": wanted.allow_gap}
        return self._ordered("/update-model" + self._query(), self._model, said, {**said, **self._named})

    def roll_back(self, model: str, number: int) -> UpdateTask:
        """Serve the kept version of this number again."""
        body = {"version": number}
        return self._ordered(f"/api/v1/models/{quote(model, safe='')}/rollback", model, body, body)

    def task(self, id: str) -> UpdateTask:
        task = self._task("GET", f"/update-model/{quote(id, safe='')}")
        with _of_gateway():
            if task.id != id:
                raise ValueError("it tells of another update")
        return task

    def generate(self, prompt: str, max_tokens: int, answer_max_s: float) -> tuple[str, int | None, str | None]:
        """The text, and the number and repository of the version that wrote it."""
        body = {"prompt": prompt, "max_tokens": max_tokens}
        said, headers = self._call("POST", "/generate" + self._query(), body, answer_max_s)
        with _of_gateway():
            text = "".join(choice.text_or_none("text") or "" for choice in said.each("choices"))
        return text, _number(headers.get("x-model-version", "")), headers.get("x-model-repo-id")

    @property
    def _named(self) -> dict[str, str]:
        return {} if self._model is None else {"model": self._model}

    def _query(self) -> str:
        return f"?{urlencode(self._named)}" if self._named else ""

    def _ordered(self, path: str, model: str | None, body: object, fields: Mapping[str, Any]) -> UpdateTask:
        """An update or rollback. Its token, where operations are signed, is for these fields of body and query."""
        token = None if self._sign is None else self._sign("model-update", model, fields)
        return self._task("POST", path, body, token)

    def _task(self, method: str, path: str, body: object = None, token: str | None = None) -> UpdateTask:
        said, _ = self._call(method, path, body, token=token)
        with _of_gateway():
            state = said.text("status")
            if state not in _TASK_STATES:
                raise ValueError(f"an update is {state}")
            is_failed = state == "failed"
            return UpdateTask(
                said.name("taskId"),
                state == "updating",
                said.text("step"),
                said.text("errorCode") if is_failed else None,
                said.text("error") if is_failed else None,
            )

    def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        answer_max_s: float | None = None,
        token: str | None = None,
    ) -> tuple[Fields, Mapping[str, str]]:
        most_s = answer_max_s or self._answer_max_s
        try:
            status, headers, content = Call(self._origin, method, path, body, most_s, token).answer()
        except TimeoutError:
            raise ReplicaAway(f"it did not answer within {most_s:g} s") from None
        except NO_ANSWER as error:
            raise ReplicaAway(f"it cannot be reached ({reason(error)})") from None
        if method == "GET" and status in _LATER:
            raise ReplicaAway(f"it answers with status {status}")
        with _of_gateway(f" (status {status})"):
            said = Fields(json_of(content))
            if status < 300:
                return said, headers
            refusal = said.inner("error")
            code, message, task = refusal.text("code"), refusal.text("message"), refusal.text_or_none("taskId")
        raise ReplicaAway(message) if code in _COMING_AND_GOING else ReplicaError(code, message, task)


def _number(said: str) -> int | None:
    """The number of a version in a header; None if it is none."""
    is_one = said.isascii() and said.isdecimal() and len(said) <= len(str(WHOLE_MAX)) and 1 <= int(said) <= WHOLE_MAX
    return int(said) if is_one else None


@contextlib.contextmanager
def _of_gateway(beside: str = "") -> Iterator[None]:
    """Read an answer. Raises ReplicaError if it has another shape than a gateway's."""
    try:
        yield
    except ValueError as error:
        raise ReplicaError("not_a_gateway", f"what answers there is no gateway{beside}: {error}") from None


# --- what a trainer tells ---------------------------------------------------------------------------------------------


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
