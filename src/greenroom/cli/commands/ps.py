"""`greenroom ps`: every model, its tier, its memory and its requests."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand

STATUS: Final = "/api/v1/status"
TITLES: Final = ("model", "tier", "place", "memory MiB", "in flight", "waiting", "idle", "pid", "note")
MOVING: Final = {
    "load": "loading",
    "wake": "waking",
    "sleep": "falling-asleep",
    "prepare": "preparing",
    "unload": "unloading",
}

# Where the weights of a model are that is not ready.
PLACES: Final = {"asleep": "green-room", "cold": "disk"}
# Each tier in the summary.
SAID: Final = {"ready": "ready", "asleep": "asleep in the green room", "cold": "cold"}
# Models named in a line of the summary; the table has them all.
NAMED_MAX: Final = 5
# Of an error message in the table; the whole is in the model's log.
CAUSE_CHARS_MAX: Final = 80

Status = Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-w", "--watch", action="store_true", help=f"refresh every {screen.WATCH_EVERY_S:g} s")
    address.add_options(parser, json_help="print the gateway's whole status as JSON (one line each with --watch)")


def run(args: argparse.Namespace) -> None:
    from greenroom.cli.client import Client

    client = Client(address.address_of(args))
    looks = (client.get(STATUS) for _ in itertools.count())
    if args.json:
        screen.show_json(looks, again=args.watch)
    elif args.watch:
        screen.watch(_frame(status, ()) for status in looks)
    else:
        status = next(looks)
        screen.show(_frame(status, [f"warning: {problem}" for problem in status.get("key_problems", ())]))


def _frame(status: Status, notes: Sequence[str]) -> screen.Frame:
    return screen.Frame(TITLES, rows(status), notes, summary(status))


COMMAND = Subcommand(
    "ps", "Show every model: where it is, its memory, and its running and waiting requests.", add_options, run
)


def rows(status: Status) -> list[tuple[str, ...]]:
    kinds = _kinds(status)
    return [_row(model, kinds) for model in status["models"]]


def tier(model: Status) -> str:
    """The tier, or the move in progress."""
    moving = model.get("moving")
    return MOVING.get(moving["kind"], str(moving["kind"])) if moving else str(model["tier"])


def _place(model: Status, kinds: Mapping[str, str]) -> str:
    if model["tier"] != "ready":
        return PLACES.get(model["tier"], "-")
    on = {kinds.get(device, "gpu") for device in model.get("memory") or {}}
    return "GPU" if "gpu" in on else "host" if on else "-"


def _kinds(status: Status) -> dict[str, str]:
    """The kind of each device: gpu or host."""
    return {device["id"]: device["kind"] for device in status.get("devices", ())}


def _row(model: Status, kinds: Mapping[str, str]) -> tuple[str, ...]:
    memory: Mapping[str, int] = model.get("memory") or {}
    busy = model["in_flight"] or model["waiting"]
    pid = model.get("pid")
    return (
        model["id"],
        tier(model),
        _place(model, kinds),
        str(sum(memory.values())) if memory else "-",
        str(model["in_flight"]),
        str(model["waiting"]),
        "-" if busy else screen.seconds(model.get("last_used_s_ago")),
        str(pid) if pid else "-",
        "; ".join(_notes(model)) or "-",
    )


def _notes(model: Status) -> list[str]:
    moving = model.get("moving") or {}
    notes = []
    if moving.get("eta_s") is not None:
        notes.append(f"about {screen.seconds(moving['eta_s'])} to go")
    if model.get("pinned"):
        notes.append("pinned")
    if model.get("unload_in_s") is not None:
        notes.append(f"leaves in {screen.seconds(model['unload_in_s'])}")
    if model.get("no_sleep"):
        notes.append(model["no_sleep"])
    if model.get("missing"):
        # All of it, since it says what to type; the error of a load would say the same.
        notes.append(f"cannot be loaded: {model['missing']}")
    elif model.get("last_error"):
        again = f", again in {screen.seconds(model['retry_in_s'])}" if model.get("retry_in_s") else ""
        what = "failed" if again or not _was_lost(model) else "lost"
        notes.append(f"{what}{again}: {_cause(model)}; greenroom logs {model['id']}")
    return notes


def _was_lost(model: Status) -> bool:
    """True if its process ended and it can be loaded again at once."""
    return str(model["last_error"]["message"]).startswith(f"{model['id']} was lost: ")


def _cause(model: Status) -> str:
    """The error, short enough for a table and without the model's name, which the row has."""
    message = " ".join(str(model["last_error"]["message"]).split())
    for before in ("could not be loaded: ", "was lost: "):
        message = message.removeprefix(f"{model['id']} {before}")
    message = message.rstrip(".")
    return message if len(message) <= CAUSE_CHARS_MAX else f"{message[: CAUSE_CHARS_MAX - 1]}…"


def summary(status: Status) -> list[str]:
    """A line for each tier with models, for each device, and for the queue."""
    lines = [place(status, tier) for tier in SAID if any(model["tier"] == tier for model in status["models"])]
    lines += [
        f"{device['id']}: {device['used_mib']:,} of {device['capacity_mib']:,} MiB used"
        for device in status.get("devices", ())
        if device["used_mib"] or device["kind"] != "host" or len(status["devices"]) == 1
    ]
    return [*lines, f"{status['queue']['depth']} waiting; up for {screen.seconds(status['uptime_s'])}"]


def place(status: Status, tier: str) -> str:
    """The models in one tier and their memory: `ready: qwen, llama (GPU 32,100 MiB, host 32,000 MiB)`."""
    there = [model for model in status["models"] if model["tier"] == tier]
    names = ", ".join(model["id"] for model in there[:NAMED_MAX])
    names += f" and {len(there) - NAMED_MAX} more" if len(there) > NAMED_MAX else ""
    held = _held(status, there)
    if tier == "asleep":
        size_mib = (status.get("green_room") or {}).get("size_mib")
        held += [] if size_mib is None else [f"its size {size_mib:,} MiB"]
    return f"{SAID[tier]}: {names}" + (f" ({', '.join(held)})" if held else "")


def _held(status: Status, models: Sequence[Status]) -> list[str]:
    kinds = _kinds(status)
    total = {"gpu": 0, "host": 0}
    for model in models:
        for device, mib in (model.get("memory") or {}).items():
            total[kinds.get(device, "gpu")] += mib
    said = {"gpu": "GPU", "host": "host"}
    return [f"{said[kind]} {mib:,} MiB" for kind, mib in total.items() if mib]
