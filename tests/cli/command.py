"""Run a command of the command line, in this process or in a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from greenroom.cli.main import main

Cli = Callable[..., "Said"]
PROGRAM = ("-m", "greenroom.cli.main")


class Said(NamedTuple):
    """What a command printed."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def command_line(capsys: pytest.CaptureFixture[str]) -> Cli:
    """A function that runs a command by its words, and fails unless it ends with `status`."""

    def run(*words: object, status: int = 0) -> Said:
        try:
            ended: object = main([str(word) for word in words])
        except SystemExit as left:
            ended = left.code
        said = Said(*capsys.readouterr())
        assert ended == status, f"it ended with {ended}: {said.err}{said.out}"
        return said

    return run


def in_terminal(argv: list[str], *, typed: str = "", exits: int = 0, program: tuple[str, ...] = PROGRAM) -> str:
    """What a command shows in a terminal of 120 columns, where this is typed."""
    ours, theirs = pty.openpty()
    os.write(ours, typed.encode())
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, *program, *argv]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as running:
        os.close(theirs)
        shown = b""
        # A terminal whose last user has gone says so by an error.
        try:
            while piece := os.read(ours, 65536):
                shown += piece
        except OSError:
            pass
        assert running.wait(60) == exits
    os.close(ours)
    return shown.decode()
