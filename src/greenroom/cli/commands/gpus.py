"""`greenroom gpus`: every GPU and its use by models, leases and foreign processes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, Final

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import NoGateway

TITLES: Final = ("gpu", "used MiB", "total MiB", "free MiB", "busy", "temp", "name", "who")

Seen = Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-w", "--watch", action="store_true", help=f"refresh every {screen.WATCH_EVERY_S:g} s")
    parser.add_argument("--local", action="store_true", help="look at this machine's GPUs directly, without a gateway")
    parser.add_argument("-c", "--config", metavar="FILE", help="with --local: the configuration whose probe is used")
    address.add_options(parser, json_help="print everything that is known as JSON (one line each with --watch)")


def run(args: argparse.Namespace) -> None:
    looks = _local(args.config) if args.local else _remote(args)
    if args.json:
        screen.show_json(looks, again=args.watch)
    elif args.watch:
        screen.watch(map(_frame, looks))
    else:
        screen.show(_frame(next(looks)))


COMMAND = Subcommand(
    "gpus",
    "Show every GPU: how much memory is used, by which models and leases, and by which other processes.",
    add_options,
    run,
)


def _frame(seen: Seen) -> screen.Frame:
    return screen.Frame(TITLES if seen["gpus"] else (), rows(seen), trouble(seen), summary(seen))


# --- where figures come from ----------------------------------------------------------------------------------------


def _remote(args: argparse.Namespace) -> Iterator[Seen]:
    from greenroom.cli.client import Client

    client = Client(address.address_of(args))
    while True:
        try:
            seen = client.get("/api/v1/gpus")
        except NoGateway as error:
            raise NoGateway(f"{error.message}; --local looks at this machine without one") from None
        yield seen


def _local(config_file: str | None) -> Iterator[Seen]:
    """This machine's GPUs in the shape of a gateway's answer, without what only a gateway knows."""
    from greenroom.config import loader
    from greenroom.config.schema import Config
    from greenroom.runtime.memory.probes import make_probe
    from greenroom.runtime.memory.readings import NoProbe

    config = Config() if config_file is None else loader.load(loader.find(config_file)).config
    probe = make_probe(config)
    why = probe.why if isinstance(probe, NoProbe) else None
    while True:
        yield _seen(probe.kind, probe.look(), why)


def _seen(kind: str, reading: Any, why: str | None) -> Seen:
    from dataclasses import asdict

    from greenroom.process.proc import name_of

    gpus = []
    for gpu in reading.gpus:
        figures = asdict(gpu)
        by_pid = sorted((figures.pop("processes") or {}).items(), key=lambda use: -use[1])
        figures["id"] = figures.pop("uuid")
        figures["free_mib"] = gpu.total_mib - gpu.used_mib
        figures["holders"] = []
        figures["strangers"] = [{"pid": pid, "name": name_of(pid), "used_mib": mib} for pid, mib in by_pid]
        gpus.append(figures)
    visible = all(gpu.processes is not None for gpu in reading.gpus)
    probe = {"kind": kind, "why": why, "looked_s_ago": 0.0, "failure": None, "pids_visible": visible}
    return {"probe": probe, "gpus": gpus, "host": asdict(reading.host)}


# --- how it is shown ------------------------------------------------------------------------------------------------


def rows(seen: Seen) -> list[tuple[str, ...]]:
    return [_row(gpu) for gpu in seen["gpus"]]


def _row(gpu: Seen) -> tuple[str, ...]:
    busy, temperature_c = gpu["utilisation"], gpu["temperature_c"]
    return (
        f"gpu{gpu['index']}",
        str(gpu["used_mib"]),
        str(gpu["total_mib"]),
        str(gpu["free_mib"]),
        "-" if busy is None else f"{busy}%",
        "-" if temperature_c is None else f"{temperature_c}C",
        str(gpu["name"]).replace(" ", "_"),
        "; ".join(_who(gpu)) or "-",
    )


def _who(gpu: Seen) -> list[str]:
    """Holders of memory: models and leases by name, foreign processes by pid."""
    holders = [
        f"{holder['model'] or 'lease ' + str(holder['lease'])} {max(holder['claim_mib'], holder['seen_mib'] or 0)}"
        for holder in gpu["holders"]
    ]
    strangers = [f"{who['name'] or '?'} (pid {who['pid']}) {who['used_mib']}" for who in gpu["strangers"]]
    return [*holders, *strangers]


def trouble(seen: Seen) -> list[str]:
    """Warnings without which the table would be misread, shown in a pipe too: no GPUs, or old figures."""
    probe = seen["probe"]
    # Only a local look says why there are none.
    why = f": {str(probe['why']).rstrip('.')}" if probe.get("why") else ""
    lines = [] if seen["gpus"] else [f"no GPUs are used here (probe: {probe['kind']}){why}"]
    if probe["failure"]:
        lines.append(f"these figures are {screen.seconds(probe['looked_s_ago'])} old: {probe['failure']}")
    return lines


def summary(seen: Seen) -> list[str]:
    host = seen["host"]
    lines = [f"host: {host['available_mib']:,} of {host['total_mib']:,} MiB available"]
    if not seen["probe"]["pids_visible"]:
        lines.append("processes cannot be seen here: use beyond all claims counts as foreign")
    return lines
