"""`greenroom prepare`: bring a cold model into the green room, beside everything that is served."""

from __future__ import annotations

import argparse

from greenroom.cli.commands import moves

NAME = "prepare"
HELP = "Read a model into host memory beside everything that is served, so that it can wake at once."

add_options = moves.add_bringing_options


def run(args: argparse.Namespace) -> int:
    hint = "its first request wakes it; `greenroom load` would do so now"
    return moves.bring(args, "prepare", "preparing", lambda answer: hint)
