"""`greenroom usage`: what keys, tenants and models used, as a table or as CSV."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand

USAGE: Final = "/api/v1/usage"
# The column's title, and the figure in it.
COLUMNS: Final = {
    "requests": "requests",
    "refused": "refused",
    "failed": "failed",
    "aborted": "aborted",
    "prompt": "prompt_tokens",
    "cached": "cached_tokens",
    "completion": "completion_tokens",
    "gpu": "gpu_s",
    "answers": "answer_s",
    "audio": "audio_s",
    "pictures": "pictures",
}
# These are shown if any row has them.
RARE: Final = ("audio", "pictures")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--since", default="30d", metavar="TIME", help="7d, 24h, 2026-11-01 … (default: 30d)")
    parser.add_argument("--until", metavar="TIME", help="the same (default: now)")
    parser.add_argument(
        "--by", default="model", metavar="LIST", help="any of key, tenant, model, day, with commas (default: model)"
    )
    parser.add_argument("--csv", action="store_true", help="print CSV with every figure")
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def _run(args: argparse.Namespace) -> None:
    from greenroom.cli.client import Client, query_of

    client = Client(address.address_of(args))
    query = {"since": args.since, "by": args.by} | ({} if args.until is None else {"until": args.until})
    if args.csv:
        for piece in client.download(f"{USAGE}?{query_of(query | {'format': 'csv'})}"):
            screen.write(piece)
        return
    answer = client.get(USAGE, query)
    if args.json:
        screen.say_json(answer)
    else:
        show(answer)


COMMAND = Subcommand("usage", "Show what keys, tenants and models used: requests, tokens, time.", _add_options, _run)


def show(answer: Mapping[str, Any]) -> None:
    shown = {title: name for title, name in COLUMNS.items() if title not in RARE or answer["total"][name] is not None}
    lines = [(*(str(row[group] or "-") for group in answer["by"]), row) for row in answer["rows"]]
    if len(lines) > 1:
        lines.append(("total", *("" for _ in answer["by"][1:]), answer["total"]))
    table = [(*map(_one_word, names), *(_cell(name, row[name]) for name in shown.values())) for *names, row in lines]
    screen.say_table((*answer["by"], *shown), table)
    if answer["total"]["uncounted"]:
        screen.note(f"of {answer['total']['uncounted']:,} answers no tokens are known: their engines did not tell them")


def _one_word(name: str) -> str:
    return name.replace(" ", "_")


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return screen.seconds(value) if name.endswith("_s") else str(value)
