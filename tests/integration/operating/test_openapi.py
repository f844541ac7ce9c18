"""Every route of the OpenAPI document, asked for what the document allows and for what it does not.

Answers are compared with what the document says of them. No request may break the gateway: what it cannot do it says in
its own words, and with a status that the document names.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from greenroom.config.schema import Ability
from greenroom.serving.routes import MODEL_ROUTES
from tests.harness import GatewayProcess, fake, gateway_process
from tests.later import Later
from tests.models import tiny as tiny_model

schemathesis, failures = Later("schemathesis"), Later("schemathesis.core.failures")
checks = Later("schemathesis.specs.openapi.checks")

ADMIN = {"authorization": "Bearer an-admin"}
KEYS = [{"name": "root", "key": "an-admin", "admin": True}]
# These never end, or take as long as they are told to.
STREAMS = ("/api/v1/events", "/api/v1/models/{model_id}/logs/stream", "/api/v1/simulate")
# Engines of tests do not sleep, and keep no pictures. A lease is renewed by its token only, and soon over. No model
# here has versions. Files of loaded models are not deleted: one that is not is deleted at the end.
MAY_FAIL = {
    "DELETE /v1/models/inventory/{model_id}",
    "POST /api/v1/models/{model_id}/sleep",
    "POST /api/v1/models/{model_id}/prepare",
    "GET /v1/images/img-{picture}",
    "DELETE /api/v1/requests/{request_id}",
    "POST /api/v1/leases/{lease_id}/renew",
    "GET /api/v1/leases/{lease_id}",
    "DELETE /api/v1/leases/{lease_id}",
    "GET /status",
    "GET /api/v1/models/{model_id}/versions",
    "GET /update-model/{task_id}",
    "POST /update-model",
    "POST /generate",
    "POST /api/v1/models/{model_id}/update",
    "POST /api/v1/models/{model_id}/rollback",
}
EXAMPLES = 8
ANSWER_MAX_S = 100.0
# Too much at once, an engine's fault, out of time, no room: each is in the errors' table. Never a plain 500.
DECLARED = (502, 503, 504, 507)
OUR_ERROR = {"message", "type", "code", "param", "details"}
NAMES = ("alpha", "beta", "usual", "one.gguf", "two.gguf")
HELLO = [{"role": "user", "content": "hi"}]
LIKELY: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "alpha", "messages": HELLO},
    "/v1/completions": {"model": "alpha", "prompt": "hi"},
    "/v1/embeddings": {"model": "alpha", "input": "hi"},
    "/v1/rerank": {"model": "alpha", "query": "hi", "documents": ["a", "b"]},
    "/v1/messages": {"model": "alpha", "messages": HELLO, "max_tokens": 9},
    "/v1/messages/count_tokens": {"model": "alpha", "messages": HELLO},
    "/v1/responses": {"model": "alpha", "input": "hi"},
    "/v1/jobs": {"route": "/v1/embeddings", "body": {"model": "alpha", "input": "hi"}},
    "/v1/models/download": {"model": "org/name"},
    "/v1/models/load": {"modelId": "one.gguf"},
    "/v1/models/unload": {"modelId": "one.gguf"},
}
CONFORMS = (
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayProcess]:
    # No hub is there: downloads fail by themselves.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    root = tmp_path / "models"
    root.mkdir()
    for name in ("one", "two", "spare"):
        shutil.copy(tiny_model("alpha"), root / f"{name}.gguf")
    models = {"alpha": fake("alpha", aliases=["usual"], abilities=[one.value for one in Ability]), "beta": fake("beta")}
    server = {"api_keys": KEYS, "wait_max_s": 3}
    with gateway_process(tmp_path, models, library={"roots": [str(root)]}, server=server) as gate:
        yield gate
        assert gate.process.poll() is None, "it did not survive"
        assert gate.stop() == 0
        broken = [line for line in gate.lines() if "Traceback" in line]
        assert not broken, broken[:3]


class Asker:
    """Sends cases and notes what is wrong with the answers, by route and kind, one of each."""

    def __init__(self, url: str, document: dict[str, Any]) -> None:
        self._url = url
        self._document = document
        self._session = requests.Session()
        self._random = random.Random(16)
        # Ids that were answered with, by the path below which they are, so that later requests find them.
        self._ids: dict[str, list[str]] = {}
        self.wrong: dict[tuple[str, str], str] = {}
        self.statuses: dict[str, set[int]] = {}

    def ask(self, case: schemathesis.Case) -> None:
        self._make_likely(case)
        label = case.operation.label
        began = time.monotonic()
        try:
            answer = case.call(self._url, session=self._session, headers=ADMIN, timeout=ANSWER_MAX_S)
        except requests.RequestException as error:
            self._note(case, type(error).__name__, str(error))
            return
        if (took_s := time.monotonic() - began) > ANSWER_MAX_S / 2:
            self._note(case, "slow", f"{took_s:.1f} s")
        self.statuses.setdefault(label, set()).add(answer.status_code)
        self._remember(case.operation.path, answer)
        if answer.status_code >= 400:
            self._check_error(case, answer)
        try:
            case.validate_response(answer, checks=[getattr(checks, name) for name in CONFORMS])
        except failures.FailureGroup as group:
            for failure in group.exceptions:
                self._note(case, failure.title, f"{answer.status_code} {failure.message}")

    def _make_likely(self, case: schemathesis.Case) -> None:
        """Have it name, more often than not, what there is, and every other time leave out what need not be said."""
        if self._random.random() < 0.3:
            return
        if isinstance(case.body, dict):
            if self._random.random() < 0.5:
                case.body = {name: case.body[name] for name in self._required(case) if name in case.body}
                case.body.update(LIKELY.get(case.operation.path, {}))
                case.headers.clear()
            for name in {"model", "modelId"} & set(case.body) - set(LIKELY.get(case.operation.path, {})):
                case.body[name] = self._random.choice(NAMES)
        known = self._ids.get(case.operation.path.partition("/{")[0], ("none",))
        for name in case.path_parameters or ():
            case.path_parameters[name] = self._random.choice(NAMES if name == "model_id" else known)

    def _required(self, case: schemathesis.Case) -> list[str]:
        [content] = self._document["paths"][case.operation.path][case.method.lower()]["requestBody"]["content"].values()
        refs = [one["$ref"] for one in (content["schema"], *content["schema"].get("anyOf", ())) if "$ref" in one]
        shapes = [content["schema"], *(self._document["components"]["schemas"][ref.rpartition("/")[2]] for ref in refs)]
        return [name for shape in shapes for name in shape.get("required", ())]

    def _remember(self, path: str, answer: Any) -> None:
        if answer.status_code < 300 and answer.content[:1] == b"{":
            said = answer.json()
            found = [said[key] for key in ("id", "taskId", "job_id") if isinstance(said.get(key), str)]
            self._ids.setdefault(path, []).extend(found)
            if path.encode() in MODEL_ROUTES:
                self._ids.setdefault("/api/v1/requests", []).extend(answer.headers["x-request-id"])

    def _check_error(self, case: schemathesis.Case, answer: Any) -> None:
        if answer.status_code >= 500 and answer.status_code not in DECLARED:
            self._note(case, "broke", f"{answer.status_code} {answer.content!r}")
        error = answer.json().get("error") if answer.content[:1] == b"{" else None
        if not isinstance(error, dict) or not isinstance(error.get("message"), str):
            self._note(case, "no error", f"{answer.status_code} {answer.content!r}")
        elif OUR_ERROR - set(error) and not self._is_of_engine(case, answer.status_code):
            self._note(case, "no error of ours", f"{answer.status_code} {answer.content!r}")

    @staticmethod
    def _is_of_engine(case: schemathesis.Case, status: int) -> bool:
        """An engine's own words for a request that it does not take are passed on."""
        return case.operation.path.encode() in MODEL_ROUTES and status == 400

    def _note(self, case: schemathesis.Case, kind: str, what: str) -> None:
        sent = f"{case.method} {case.formatted_path} query={case.query} headers={case.headers} body={case.body!r}"
        self.wrong.setdefault((case.operation.label, kind), f"{what[:600]}\n    sent: {sent[:600]}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_route_answers_as_the_document_says(gate: GatewayProcess) -> None:
    document = requests.get(f"{gate.url}/api/v1/openapi.json", headers=ADMIN, timeout=ANSWER_MAX_S).json()
    asker = Asker(gate.url, document)
    operations = [found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()]
    # What is made is looked at, and then deleted.
    for operation in sorted(operations, key=lambda one: ("post", "put", "get", "delete").index(one.method)):
        if operation.path in STREAMS:
            continue
        fuzz(asker, operation, schemathesis.GenerationMode.POSITIVE)
        # Where there is nothing to get wrong.
        with contextlib.suppress(Unsatisfiable):
            fuzz(asker, operation, schemathesis.GenerationMode.NEGATIVE)
    assert not asker.wrong, "\n".join(f"{label} {kind}: {what}" for (label, kind), what in asker.wrong.items())
    good = {label for label, statuses in asker.statuses.items() if min(statuses) < 300}
    assert {operation.label for operation in operations if operation.path not in STREAMS} - good <= MAY_FAIL
    spare = requests.delete(f"{gate.url}/v1/models/inventory/spare.gguf", headers=ADMIN, timeout=ANSWER_MAX_S)
    assert spare.status_code == 200, spare.content


def fuzz(asker: Asker, operation: Any, mode: schemathesis.GenerationMode) -> None:
    """The same requests in every run. None is made smaller: each changes the gateway."""
    strategy = operation.as_strategy(generation_mode=mode)
    check = given(case=strategy)(lambda case: asker.ask(case))
    settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )(check)()
