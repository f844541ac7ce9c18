"""Run a command of the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from greenroom.cli.main import main

Cli = Callable[..., "Said"]


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
