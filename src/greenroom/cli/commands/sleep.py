"""`greenroom sleep`: send a model that is ready to the green room."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from greenroom.cli.commands import moves

NAME = "sleep"
HELP = "Free a model's GPU memory but keep its weights in host memory, so that it can wake at once."

add_options = moves.add_leaving_options


def run(args: argparse.Namespace) -> int:
    return moves.send_away(args, "sleep", "putting to sleep", _hint)


def _hint(answer: Mapping[str, Any]) -> str:
    if answer["tier"] == "cold":
        return f"it was not ready; `greenroom prepare {answer['model']}` brings it into the green room"
    return "the next request wakes it; `greenroom ps` shows who is where"
