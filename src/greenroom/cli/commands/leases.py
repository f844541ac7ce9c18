"""`greenroom leases`: who holds memory on GPUs, and who waits for it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from greenroom.cli import address, screen
from greenroom.cli.failures import Exit

NAME = "leases"
HELP = "Show who holds memory on GPUs: other programs by their leases, and models."
TITLES: Final = ("lease", "name", "kind", "state", "memory MiB", "priority", "pid", "expires", "note")


def add_options(parser: argparse.ArgumentParser) -> None:
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def run(args: argparse.Namespace) -> int:
    from greenroom.leases.client import store_url

    args.url = store_url(args.url)
    is_gateway = args.url.startswith(("http://", "https://"))
    answer = _at_gateway(args) if is_gateway else _in_redis(args.url)
    if args.json:
        screen.say_json(answer)
        return Exit.OK
    screen.say_table(TITLES, [row(lease) for lease in answer["leases"]])
    if not answer["leases"]:
        screen.hint("take one: greenroom lease --mib 8000 -- python train.py")
    return Exit.OK


def _at_gateway(args: argparse.Namespace) -> Mapping[str, Any]:
    from greenroom.cli.client import Client

    answer: Mapping[str, Any] = Client(address.address_of(args)).get("/api/v1/leases")
    return answer


def _in_redis(url: str) -> Mapping[str, Any]:
    """What Redis says, in the shape of a gateway's answer."""
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
