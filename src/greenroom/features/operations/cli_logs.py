"""`greenroom logs`: the output of a model's engine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import ExitStatus

if TYPE_CHECKING:
    from greenroom.cli.client import Client

LINES: Final = 200


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="its id or an alias")
    parser.add_argument("-f", "--follow", action="store_true", help="follow new lines until interrupted")
    parser.add_argument("-n", "--lines", type=_count, default=LINES, metavar="N", help=f"last lines (default: {LINES})")
    address.add_options(parser, json_help="print JSON; with -f one string a line")


def run(args: argparse.Namespace) -> int:
    from greenroom.cli.client import Client, model_path

    client = Client(address.address_of(args))
    if args.follow:
        _follow(client, model_path(args.model, "logs/stream"), args)
        return ExitStatus.OK
    answer = client.get(model_path(args.model, "logs"), {"lines": args.lines})
    if args.json:
        screen.say_json(answer)
        return ExitStatus.OK
    for line in answer["lines"]:
        screen.say(line)
    if not answer["lines"]:
        screen.note(f"the engine of {answer['model']} has printed nothing; to see whether it runs: greenroom ps")
    return ExitStatus.OK


COMMAND = Subcommand(
    "logs",
    "Print the last lines of a model's engine, and with -f the next ones as they come.",
    add_options,
    run,
)


def _follow(client: Client, path: str, args: argparse.Namespace) -> None:
    with client.stream("GET", f"{path}?lines={args.lines}") as events:
        for event in events:
            if event.comment is None:
                _show(event.data, args.json)
    screen.note("the gateway ended the stream")


def _show(line: str, as_json: bool) -> None:
    if as_json:
        screen.say_json(line, on_one_line=True)
    else:
        screen.say(line)


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("a number of lines is not negative")
    return number
