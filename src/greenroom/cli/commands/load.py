"""`greenroom load`: make a model ready now."""

from __future__ import annotations

import argparse

from greenroom.cli.commands import moves

NAME = "load"
HELP = "Make a model ready now, and wait until it is."

add_options = moves.add_bringing_options


def run(args: argparse.Namespace) -> int:
    hint = "it answers at once now; `greenroom ps` shows who had to leave for it"
    return moves.bring(args, "load", "loading", lambda answer: hint)
