"""`greenroom sleep`: send a model that is ready to the green room."""

from __future__ import annotations

import argparse

from greenroom.cli import address, moves, screen
from greenroom.cli.failures import Exit

NAME = "sleep"
HELP = "Free a model's GPU memory but keep its weights in host memory, so that it can wake at once."


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="its id or an alias")
    parser.add_argument(
        "--grace-s", type=float, metavar="S", help="how long running answers may go on (default: the model's grace_s)"
    )
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def run(args: argparse.Namespace) -> int:
    from greenroom.cli.client import Client

    body = {} if args.grace_s is None else {"grace_s": args.grace_s}
    answer, took_s = moves.move(Client(address.address_of(args)), args.model, "sleep", body, "putting to sleep")
    if args.json:
        screen.say_json(answer)
        return Exit.OK
    screen.say(f"{answer['model']} is {answer['tier']} after {screen.seconds(took_s)}")
    if answer["tier"] == "cold":
        screen.hint(f"it was not ready; `greenroom prepare {answer['model']}` brings it into the green room")
    else:
        screen.hint("the next request wakes it; `greenroom ps` shows who is where")
    return Exit.OK
