"""One replica as a trainer sees it: its version, updates, rollbacks and answers, over HTTP.

Owns the calls and the translation of everything that can go wrong into `ReplicaError`. Each call has a connection of
its own, so that a replica that was restarted is found again. Never waits longer for an answer than it was told to.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

CONNECT_MAX_S: Final = 5.0
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
_PIECE_BYTES: Final = 64 * 1024
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
    """What a replica serves. `number` is None until it has a version; `desired_number` is of its last failed update."""

    model: str
    number: int | None
    repo_id: str | None
    commit: str | None
    is_updating: bool = False
    desired_number: int | None = None
    error_code: str | None = None
    error: str | None = None

    @property
    def weights(self) -> tuple[str | None, str | None]:
        return self.repo_id, self.commit


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
        parts = urlsplit(whole)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ValueError(f"{url!r} is no address of a replica; write it like http://127.0.0.1:8001")
        self.url = whole.rstrip("/").removesuffix("/v1")
        self._is_tls, self._host = parts.scheme == "https", parts.hostname
        self._port = parts.port or (443 if self._is_tls else 80)
        self._prefix = urlsplit(self.url).path
        self._key = api_key
        self._model = model
        self._answer_max_s = answer_max_s
        self._sign = sign

    def status(self) -> ReplicaStatus:
        """Raises ReplicaError, as all calls do."""
        said, _ = self._call("GET", "/status" + self._query())
        with _of_gateway():
            desired, error, number = said.get("desired") or {}, said.get("error") or {}, said["model_version"]
            return ReplicaStatus(
                model=str(said["model"]),
                number=None if number is None else int(number),
                repo_id=said["model_repo_id"],
                commit=said.get("commit"),
                is_updating=bool(said["updating"]),
                desired_number=desired.get("model_version"),
                error_code=error.get("code"),
                error=error.get("message"),
            )

    def update(self, wanted: WantedVersion) -> UpdateTask:
        body = {"model_repo_id": wanted.repo_id, "revision": wanted.revision, "model_version": wanted.number}
        said = {name: value for name, value in body.items() if value is not None} | {"allow_gap": wanted.allow_gap}
        return self._ordered("/update-model" + self._query(), self._model, said, {**said, **self._named})

    def roll_back(self, model: str, number: int) -> UpdateTask:
        """Serve the kept version of this number again."""
        body = {"version": number}
        return self._ordered(f"/api/v1/models/{quote(model, safe='')}/rollback", model, body, body)

    def task(self, id: str) -> UpdateTask:
        return self._task("GET", f"/update-model/{quote(id, safe='')}")

    def generate(self, prompt: str, max_tokens: int, answer_max_s: float) -> tuple[str, int | None, str | None]:
        """The text, and the number and repository of the version that wrote it."""
        body = {"prompt": prompt, "max_tokens": max_tokens}
        said, headers = self._call("POST", "/generate" + self._query(), body, answer_max_s)
        number = headers.get("x-model-version", "")
        with _of_gateway():
            text = "".join(str(choice.get("text", "")) for choice in said["choices"])
        return text, int(number) if number.isdigit() else None, headers.get("x-model-repo-id")

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
            is_failed = said["status"] == "failed"
            return UpdateTask(
                str(said["taskId"]),
                said["status"] == "updating",
                str(said["step"]),
                str(said["errorCode"]) if is_failed else None,
                str(said["error"]) if is_failed else None,
            )

    def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        answer_max_s: float | None = None,
        token: str | None = None,
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        try:
            status, headers, content = self._answer(method, path, body, answer_max_s or self._answer_max_s, token)
        except TimeoutError:
            raise ReplicaAway(f"it did not answer within {answer_max_s or self._answer_max_s:g} s") from None
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            raise ReplicaAway(f"it cannot be reached ({why})") from None
        if method == "GET" and status in _LATER:
            raise ReplicaAway(f"it answers with status {status}")
        with _of_gateway(f" (status {status})"):
            said = json.loads(content)
            if status < 300:
                return dict(said), headers
            refusal = said["error"]
            code, message, task = str(refusal["code"]), str(refusal["message"]), refusal.get("taskId")
        raise ReplicaAway(message) if code in _COMING_AND_GOING else ReplicaError(code, message, task)

    def _answer(
        self, method: str, path: str, body: object, answer_max_s: float, token: str | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        make = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        headers = {"Accept": "application/json", "Connection": "close", "Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        if token is not None:
            headers["X-Verified-Op-Token"] = token
        content = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + answer_max_s
        with contextlib.closing(make(self._host, self._port, timeout=min(CONNECT_MAX_S, answer_max_s))) as connection:
            connection.connect()
            connection.sock.settimeout(answer_max_s)
            connection.request(method, self._prefix + path, content, headers)
            response = connection.getresponse()
            told = {name.lower(): value for name, value in response.headers.items()}
            return response.status, told, _read_by(deadline, response)


def _read_by(deadline: float, response: http.client.HTTPResponse) -> bytes:
    """Raises TimeoutError for an answer that is still coming then: one that comes bit by bit never stops the clock."""
    content = bytearray()
    while len(content) < ANSWER_BYTES_MAX and (piece := response.read1(_PIECE_BYTES)):
        content += piece
        if time.monotonic() > deadline:
            raise TimeoutError
    return bytes(content)


@contextlib.contextmanager
def _of_gateway(beside: str = "") -> Iterator[None]:
    """Read an answer. Raises ReplicaError if it has another shape than a gateway's."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ReplicaError("not_a_gateway", f"what answers there is no gateway{beside}") from None
