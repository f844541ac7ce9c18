"""`greenroom unload`: end a model's engine and free its memory."""

from __future__ import annotations

import argparse

from greenroom.cli import address, moves, screen
from greenroom.cli.failures import Exit

NAME = "unload"
HELP = "End a model's engine, and wait until its memory is free."


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="its id or an alias")
    parser.add_argument(
        "--grace-s", type=float, metavar="S", help="how long running answers may go on (default: the model's grace_s)"
    )
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def run(args: argparse.Namespace) -> int:
    from greenroom.cli.client import Client

    body = {} if args.grace_s is None else {"grace_s": args.grace_s}
    answer, took_s = moves.move(Client(address.address_of(args)), args.model, "unload", body, "unloading")
    if args.json:
        screen.say_json(answer)
    else:
        screen.say(f"{answer['model']} is {answer['tier']} after {screen.seconds(took_s)}")
        screen.hint("the next request for it loads it again; see `greenroom ps`")
    return Exit.OK
