"""Callers of models are not told where our own files lie: no error holds a path of the state directory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from greenroom.app import App
from tests.harness import gateway
from tests.integration.faults import assert_ended_by, first_events, rest_of
from tests.integration.hosted_rig import Folder, nothing_left, worker_of
from tests.integration.raw import Answer, Raw, asking, chat

pytestmark = pytest.mark.usefixtures("nothing_left")
__all__ = ["nothing_left"]


def assert_no_path(app: App, answer: Answer) -> None:
    for folder in (app.state_dir.path, app.state_dir.run_dir):
        assert str(folder).encode() not in answer.body
    assert b".sock" not in answer.body


async def test_a_worker_lost_in_the_middle_is_told_by_its_model_and_what_comes_next(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "alpha", tokens=10_000, token_s=0.01)
    async with gateway(tmp_path, {"alpha": folder.model()}) as app:
        async with await Raw.open(app) as raw:
            raw.ask(asking("alpha", stream=True))
            await first_events(raw, 3)
            os.kill(worker_of(app, "alpha"), signal.SIGKILL)
            rest = await rest_of(raw)
        assert_ended_by(rest, "engine_lost", 502)
        assert_no_path(app, rest)
        message = rest.data[-1]["error"]["message"]
        assert "The engine of alpha" in message and "Ask again" in message


async def test_what_a_worker_says_of_its_sockets_when_it_cannot_start_is_not_passed_on(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "alpha")
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "asked for: $@" >&2\nexit 3\n')
    program.chmod(0o755)
    async with gateway(tmp_path, {"alpha": folder.model(python=str(program))}) as app:
        answer = await chat(app, "alpha")
        assert answer.status == 503
        # Its other words are: they say what is wrong.
        assert "asked for:" in answer.error["details"]
        for one in (app.state_dir.path, app.state_dir.run_dir):
            assert str(one) not in answer.body.decode()


async def test_what_an_engine_says_of_its_socket_in_a_failure_is_not_passed_on(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "alpha", at={"open": "fail path"})
    async with gateway(tmp_path, {"alpha": folder.model()}) as app:
        answer = await chat(app, "alpha")
        assert answer.status == 503 and "as told" in answer.error["message"]
        assert str(app.state_dir.run_dir) not in answer.body.decode()
