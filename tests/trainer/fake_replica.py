"""A replica as far as a trainer can tell: its version changes when it is asked, or it fails as it is told."""

from __future__ import annotations

import json
from typing import Any

from tests.cli.fake_gateway import Answer, Asked, FakeGateway


class FakeReplica(FakeGateway):
    """Serves version `number` of `repo_id` at `commit`. What it is told to do wrong is in the attributes."""

    def __init__(self, number: int = 1, repo_id: str = "org/old", commit: str | None = "c0") -> None:
        self.versions: list[tuple[int, str, str | None]] = [(number, repo_id, commit)]
        # The commit that it finds for every repository.
        self.finds = "c1"
        self.fails_with: tuple[str, str] | None = None
        # Of its last update, as its status tells it.
        self.error: dict[str, str] | None = None
        # It ends in the middle of so many updates, before or after the version is promised.
        self.restarts = 0
        self.promises_before_restart = False
        self.keeps_nothing = False
        self.never_ends = False
        # Its first version is being fetched from there, and it has none yet.
        self.fetching: str | None = None
        self.refuses_to_go_back = False
        # Fields of its answers, as JSON, instead of the right ones.
        self.said: dict[str, str] = {}
        self._tasks: dict[str, dict[str, Any]] = {}
        super().__init__()

    @property
    def calls(self) -> list[tuple[str, str, Any]]:
        return [(one.method, one.target, one.json if one.body else None) for one in self.asked]

    def found(self, asked: Asked) -> Answer:
        body = asked.json if asked.body else None
        status, said, headers = self.answer(asked.method, asked.target.partition("?")[0], body)
        return Answer(self._told(said), status, headers=tuple(headers.items()))

    @property
    def serves(self) -> tuple[int, str, str | None]:
        return self.versions[-1]

    def _told(self, answer: Any) -> bytes:
        wrong = {name: f"@{name}@" for name in self.said if name in answer}
        content = json.dumps({**answer, **wrong} if wrong else answer)
        for name, marker in wrong.items():
            content = content.replace(f'"{marker}"', self.said[name])
        return content.encode()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any, dict[str, str]]:
        number, repo_id, commit = self.serves
        if path == "/status" and self.fetching is not None:
            desired = {"model_repo_id": self.fetching, "revision": None, "model_version": None}
            none = {"model_version": None, "model_repo_id": None, "commit": None, "error": None}
            return 200, {"model": "m", **none, "updating": True, "desired": desired}, {}
        if path == "/status":
            known = {"model": "m", "model_version": number, "model_repo_id": repo_id, "commit": commit}
            return 200, {**known, "updating": False, "desired": None, "error": self.error}, {}
        if path == "/generate":
            headers = {"X-Model-Version": str(number), "X-Model-Repo-Id": repo_id}
            return 200, {"choices": [{"text": f"{body['prompt']}!"}]}, headers
        if method == "GET":
            return 200, self._tasks[path.rpartition("/")[2]], {}
        if path.endswith("/rollback"):
            if self.keeps_nothing:
                return 400, {"error": {"code": "invalid_request", "message": "none is kept"}}, {}
            if self.refuses_to_go_back:
                return 409, {"error": {"code": "would_interrupt", "message": "both do not fit"}}, {}
            back = next(one for one in self.versions if one[0] == body["version"])
            return 202, self._begun((number + 1, *back[1:])), {}
        wanted = max(number + 1, body.get("model_version") or 0)
        return 202, self._begun((wanted, body["model_repo_id"], body.get("revision") or self.finds)), {}

    def _begun(self, version: tuple[int, str, str | None]) -> dict[str, Any]:
        id, failure = f"t{len(self._tasks)}", self.fails_with
        if self.restarts:
            self.restarts -= 1
            failure = ("restarted", "The gateway ended while this ran.")
        if failure is None or (failure[0] == "restarted" and self.promises_before_restart):
            self.versions.append(version)
        code, message = failure or (None, None)
        status = "updating" if self.never_ends else "failed" if failure else "completed"
        ended = {"taskId": id, "status": status, "step": "loading"}
        self._tasks[id] = {**ended, "errorCode": code, "error": message}
        return {"taskId": id, "status": "updating", "step": "queued", "errorCode": None, "error": None}
