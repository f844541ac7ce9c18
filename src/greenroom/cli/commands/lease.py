"""`greenroom lease`: run a program with memory on GPUs that is its own while it runs.

Owns what is asked for. The lease is this process's, so that the memory comes back at once however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time

from greenroom.cli import screen
from greenroom.cli.failures import NoGateway, WrongUsage
from greenroom.errors import BadRequest, StoreDown

NAME = "lease"
HELP = "Run a program with memory on GPUs of its own; idle models leave for it."


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=_above_0, required=True, metavar="N", help="memory on each GPU")
    parser.add_argument(
        "--gpus", type=_above_0, default=1, metavar="K", help="on so many GPUs, all or nothing (default: 1)"
    )
    parser.add_argument("--device", action="append", default=[], metavar="GPU", help="only this one; may be repeated")
    parser.add_argument("--name", help="what it is for (default: the program's name)")
    parser.add_argument("--priority", default="normal", help="high, normal, low or a number (default: normal)")
    parser.add_argument("--preemptible", action="store_true", help="it may be asked to leave for the more urgent")
    parser.add_argument("--grace-s", type=float, default=30.0, metavar="S", help="how long it may stay then")
    parser.add_argument("--ttl-s", type=float, default=30.0, metavar="S", help="lost when not heard of for so long")
    parser.add_argument("--wait", type=float, default=60.0, metavar="S", help="how long to wait for it (default: 60)")
    parser.add_argument("--url", help="the gateway's address, or a redis:// one (default: $GREENROOM_LEASES, …_URL)")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    parser.add_argument("command", nargs="+", help="after `--`: the program and its arguments")


def run(args: argparse.Namespace) -> int:
    from greenroom.cli.program import Program
    from greenroom.leases.client import lease

    try:
        wanted = lease(
            args.mib,
            args.gpus,
            args.name or os.path.basename(args.command[0]),
            args.priority,
            preemptible=args.preemptible,
            wait_s=args.wait,
            devices=args.device,
            grace_s=args.grace_s,
            ttl_s=args.ttl_s,
            url=args.url,
            api_key=_key(args.api_key_env),
        )
    except BadRequest as wrong:
        raise WrongUsage(wrong.message) from None
    began = time.monotonic()
    # Where there is no GPU a lease is for the host's memory.
    screen.note(f"waiting for {args.mib:,} MiB" + (f" on each of {args.gpus} GPUs" if args.gpus > 1 else ""))
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(wanted)
        except StoreDown as down:
            raise NoGateway(down.message) from None
        waited = screen.seconds(time.monotonic() - began)
        screen.note(f"holds {', '.join(held.devices)} after {waited}; see `greenroom leases`")
        return Program(args.command, held).run()


def _above_0(said: str) -> int:
    """Raises ArgumentTypeError, which argparse tells as wrong usage."""
    if not said.strip().isdecimal() or int(said) < 1:
        raise argparse.ArgumentTypeError(f"{said} is no whole number above 0")
    return int(said)


def _key(name: str | None) -> str | None:
    if name is not None and not os.environ.get(name):
        raise WrongUsage(f"the environment variable {name} is not set")
    return None if name is None else os.environ[name].strip()
