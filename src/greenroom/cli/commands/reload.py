"""`greenroom reload`: have the gateway read its configuration again, and see what that changed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Final

from greenroom.cli import address, screen
from greenroom.cli.failures import Exit

NAME = "reload"
HELP = "Have the gateway read its configuration again and apply what changed."
# A file may lie on a slow disk, and sizes of model files are looked up.
RELOAD_MAX_S: Final = 120.0
# What the gateway calls each kind of change, the mark before its line, and what it means.
KINDS: Final = (
    ("added", "+", "new"),
    ("removed", "-", "finishes its answers and goes"),
    ("changed", "~", "gets a new engine at its next request"),
    ("relabelled", "=", "keeps running, with new settings"),
    ("at_once", "*", "applied"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    address.add_options(parser, json_help="print what changed as JSON")


def run(args: argparse.Namespace) -> int:
    from greenroom.cli.client import Client

    began = time.monotonic()
    changes = Client(address.address_of(args)).post("/api/v1/reload", answer_max_s=RELOAD_MAX_S)
    if args.json:
        screen.say_json(changes)
        return Exit.OK
    lines = told(changes)
    for line in lines:
        screen.say(line)
    changed = f"{len(lines)} change{'s' if len(lines) != 1 else ''}" if lines else "nothing changed"
    screen.say(f"reloaded in {screen.seconds(time.monotonic() - began)}: {changed}")
    if changes.get("added"):
        screen.hint(f"talk to the new one: greenroom chat {changes['added'][0]}")
    return Exit.OK


def told(changes: Mapping[str, Sequence[str]]) -> list[str]:
    """One line for each model or key that changed."""
    return [f"{mark} {name}: {meaning}" for kind, mark, meaning in KINDS for name in changes.get(kind, ())]
