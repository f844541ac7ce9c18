"""A gateway that is killed at any step of an update comes back with the old version or the new one, and no half."""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.harness import GatewayProcess, write_config
from tests.integration.versions.test_versions import models, options, weights
from tests.waiting import PATIENCE_S, until_now

PROGRAM = Path(__file__).parent / "dies_at_write.py"
# An update writes less often than this.
POINTS_MAX = 60


def call(gate: GatewayProcess, method: str, path: str, body: Any = None) -> tuple[int, Any, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(gate.url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read())


def says(gate: GatewayProcess) -> tuple[int, str]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    status, headers, answer = call(gate, "POST", "/v1/chat/completions", body)
    assert status == 200, answer
    return int(headers["x-model-version"]), answer["choices"][0]["message"]["content"].split()[0]


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_killed_at_every_write_of_an_update(tmp_path: Path) -> None:
    config = write_config(tmp_path, models(tmp_path), **options(tmp_path))
    trigger, last, names = tmp_path / "armed", 1, {1: "alpha"}
    died_with, survived = set[int](), False
    for point in range(1, POINTS_MAX):
        trigger.unlink(missing_ok=True)
        gate = GatewayProcess(tmp_path, config, inside=(sys.executable, str(PROGRAM), str(point), str(trigger)))
        try:
            # What the death before has left.
            number, said = says(gate)
            assert number in (last, last + 1), "a version that was not asked for, or one that was promised is gone"
            assert names[number] == said, "weights of another version"
            _, _, told = call(gate, "GET", "/status")
            assert (told["model_version"], told["updating"]) == (number, False)
            died_with.add(number - last)
            last = number
            if survived:
                break
            names = {last: said, last + 1: "bravo" if said == "alpha" else "alpha"}
            trigger.touch()
            try:
                body = {"model_repo_id": weights(tmp_path, names[last + 1])}
                survived = call(gate, "POST", "/update-model?wait=true", body)[0] == 200
            except (OSError, http.client.HTTPException):
                until_now(lambda gate=gate: gate.process.poll() is not None, "it is dead")
        finally:
            gate.kill()
            assert gate.nothing_left()
    assert survived, "an update never came to its end"
    assert died_with == {0, 1}, "no death was before the promise, or none after it"
