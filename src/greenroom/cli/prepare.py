"""`greenroom prepare`: bring a cold model into the green room, beside everything that is served."""

from __future__ import annotations

import argparse

from greenroom.cli import address, moves, screen
from greenroom.cli.failures import Exit

NAME = "prepare"
HELP = "Read a model into host memory beside everything that is served, so that it can wake at once."


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="its id or an alias")
    parser.add_argument(
        "--evict", action="append", default=[], metavar="MODEL", help="unload this one for it; may be repeated"
    )
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def run(args: argparse.Namespace) -> int:
    from greenroom.cli.client import Client

    body = {"evict": args.evict} if args.evict else {}
    answer, took_s = moves.move(Client(address.address_of(args)), args.model, "prepare", body, "preparing")
    if args.json:
        screen.say_json(answer)
    else:
        screen.say(f"{answer['model']} is {answer['tier']} after {screen.seconds(took_s)}")
        screen.hint("its first request wakes it; `greenroom load` would do so now")
    return Exit.OK
