"""`greenroom lease` runs a program with GPU memory of its own; `greenroom leases` lists what is leased. The lease
belongs to this process, so that the memory comes back at once however it ends. `cli_program.py` runs the program."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any, Final

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import NoGateway, WrongUsage
from greenroom.errors import BadRequest, StoreDown


def _add_lease_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=_above_0, required=True, metavar="N", help="memory on each GPU")
    parser.add_argument(
        "--gpus", type=_above_0, default=1, metavar="K", help="on this many GPUs, all or nothing (default: 1)"
    )
    parser.add_argument("--device", action="append", default=[], metavar="GPU", help="only this GPU; may be repeated")
    parser.add_argument("--name", help="what it is for (default: the program's name)")
    parser.add_argument("--priority", default="normal", help="high, normal, low or a number (default: normal)")
    parser.add_argument("--preemptible", action="store_true", help="may be recalled for a program of higher priority")
    parser.add_argument(
        "--grace-s", type=float, default=30.0, metavar="S", help="seconds to leave after a recall (default: 30)"
    )
    parser.add_argument(
        "--ttl-s", type=float, default=30.0, metavar="S", help="seconds without renewal until it is lost (default: 30)"
    )
    parser.add_argument(
        "--wait", type=float, default=60.0, metavar="S", help="seconds to wait for the memory (default: 60)"
    )
    parser.add_argument("--url", help="the gateway's address, or a redis:// one (default: $GREENROOM_LEASES, …_URL)")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    address.add_token_option(parser)
    parser.add_argument("command", nargs="+", help="after `--`: the program and its arguments")


def _lease(args: argparse.Namespace) -> int:
    from greenroom.features.leases.cli_program import LeasedProgram
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
            api_key=_api_key(args.api_key_env),
            op_token=address.token_of(args),
        )
    except BadRequest as wrong:
        raise WrongUsage(wrong.message) from None
    began = time.monotonic()
    # Without a GPU a lease is for host memory.
    screen.note(f"waiting for {args.mib:,} MiB" + (f" on each of {args.gpus} GPUs" if args.gpus > 1 else ""))
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(wanted)
        except StoreDown as down:
            raise NoGateway(down.message) from None
        waited = screen.seconds(time.monotonic() - began)
        screen.note(f"holds {', '.join(held.devices)} after {waited}; see `greenroom leases`")
        return LeasedProgram(args.command, held).run()


LEASE = Subcommand(
    "lease", "Run a program with GPU memory of its own; idle models leave for it.", _add_lease_options, _lease
)


def _above_0(said: str) -> int:
    """Raises ArgumentTypeError, which argparse reports as wrong usage."""
    if not said.strip().isdecimal() or int(said) < 1:
        raise argparse.ArgumentTypeError(f"{said} is no whole number above 0")
    return int(said)


def _api_key(name: str | None) -> str | None:
    if name is not None and not os.environ.get(name):
        raise WrongUsage(f"the environment variable {name} is not set")
    return None if name is None else os.environ[name].strip()


# --- the list --------------------------------------------------------------------------------------------------------


TITLES: Final = ("lease", "name", "kind", "state", "memory MiB", "priority", "pid", "expires", "note")


def _add_leases_options(parser: argparse.ArgumentParser) -> None:
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def _leases(args: argparse.Namespace) -> None:
    from greenroom.leases.client import store_url

    args.url = store_url(args.url)
    is_gateway = args.url.startswith(("http://", "https://"))
    answer = _at_gateway(args) if is_gateway else _in_redis(args.url)
    if args.json:
        screen.say_json(answer)
        return
    screen.say_table(TITLES, [row(lease) for lease in answer["leases"]])
    if not answer["leases"]:
        screen.hint("take one: greenroom lease --mib 8000 -- python train.py")


LEASES = Subcommand(
    "leases", "Show what holds GPU memory: programs with leases, and models.", _add_leases_options, _leases
)


def _at_gateway(args: argparse.Namespace) -> Mapping[str, Any]:
    from greenroom.cli.client import Client

    answer: Mapping[str, Any] = Client(address.address_of(args)).get("/api/v1/leases")
    return answer


def _in_redis(url: str) -> Mapping[str, Any]:
    """The leases in Redis, in the shape of a gateway's answer."""
    import asyncio
    from dataclasses import asdict

    from greenroom.leases.client import open_store

    async def listed() -> list[dict[str, Any]]:
        store = open_store(url)
        try:
            return [asdict(lease) for lease in await store.leases()]
        finally:
            await store.close()

    leases = asyncio.run(listed())
    return {
        "leases": [{**one, "overdue": one["recall_in_s"] is not None and one["recall_in_s"] <= 0} for one in leases]
    }


def row(lease: Mapping[str, Any]) -> tuple[str, ...]:
    is_program = lease["kind"] == "program"
    return (
        lease["id"],
        lease["name"].replace(" ", "_"),
        "model" if lease["kind"] == "slot" else lease["kind"],
        lease["state"],
        ",".join(f"{device}={mib:,}" for device, mib in lease["claim"].items()),
        str(lease["priority"]),
        str(lease["holder"]["pid"]) if lease["holder"] else "-",
        screen.seconds(lease["expires_in_s"]) if is_program and lease["state"] == "held" else "-",
        note(lease),
    )


def note(lease: Mapping[str, Any]) -> str:
    if lease["overdue"]:
        return f"overdue: was to leave {screen.seconds(-lease['recall_in_s'])} ago"
    if lease["recall_in_s"] is not None:
        return f"recalled: leaves within {screen.seconds(lease['recall_in_s'])}"
    return "preemptible" if lease["preemptible"] and lease["kind"] == "program" else ""
