"""`greenroom unload`: end a model's engine and free its memory."""

from __future__ import annotations

import argparse

from greenroom.cli.commands import moves

NAME = "unload"
HELP = "End a model's engine, and wait until its memory is free."

add_options = moves.add_leaving_options


def run(args: argparse.Namespace) -> int:
    hint = "the next request for it loads it again; see `greenroom ps`"
    return moves.send_away(args, "unload", "unloading", lambda answer: hint)
