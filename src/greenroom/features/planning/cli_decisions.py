"""`greenroom decisions`: what the scheduler decided lately, and why. What the words mean: docs/operating.md."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any, Final

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import ExitStatus, GatewayRefused

SHOWN: Final = 20
SHOWN_MAX: Final = 1_000
TITLES: Final = ("at", "what", "model", "why")
# Facts that the other columns have, or that only programs need.
_ELSEWHERE: Final = frozenset(("seq", "at", "what", "model", "why", "slot", "move"))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="only of this model, and evictions for it (default: of all)")
    parser.add_argument(
        "-n", "--last", type=_count, default=SHOWN, metavar="N", help=f"so many, the newest last (default: {SHOWN})"
    )
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def run(args: argparse.Namespace) -> int:
    from greenroom.cli.client import Client, model_path

    client = Client(address.address_of(args))
    logs = None if args.model is None else model_path(args.model, "logs")
    asked = {"limit": args.last} if args.model is None else {"limit": args.last, "model": args.model}
    answer = client.get("/api/v1/decisions", asked)
    if logs is not None and not answer["decisions"]:
        try:
            # The gateway refuses this for a model that does not exist. One that was removed may still have decisions.
            client.get(logs, {"lines": 0})
        except GatewayRefused as refused:
            # A key may be allowed to see decisions and no logs.
            if refused.status != 403:
                raise
        screen.note(f"nothing was decided about {args.model} lately")
    if args.json:
        screen.say_json(answer)
        return ExitStatus.OK
    screen.say_table(TITLES, [row(one) for one in answer["decisions"]])
    screen.hint("what would happen to a request that came now: greenroom explain MODEL")
    return ExitStatus.OK


COMMAND = Subcommand(
    "decisions",
    "Show what was decided lately about models and requests, and why.",
    add_options,
    run,
)


def row(decision: Mapping[str, Any]) -> tuple[str, ...]:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(decision["at"]))
    facts = [f"{name}={value}" for name, value in decision.items() if name not in _ELSEWHERE]
    return at, decision["what"], decision.get("model") or "-", " ".join([decision["why"], *facts])


def _count(text: str) -> int:
    """Raises ArgumentTypeError, which argparse reports as wrong usage."""
    if not text.isdecimal() or not 1 <= int(text) <= SHOWN_MAX:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 to {SHOWN_MAX:,}")
    return int(text)
