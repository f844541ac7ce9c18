"""`greenroom reload` applies a changed configuration; `greenroom flush` empties the caches of prompts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Final

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import CommandFailed, ExitStatus

# The file may be on a slow disk, and the sizes of model files are looked up.
RELOAD_MAX_S: Final = 120.0
FLUSH_PATH: Final = "/v1/cache/flush"
FLUSH_MAX_S: Final = 120.0
# The gateway's word for each kind of change, the mark before its line, and its meaning.
KINDS: Final = (
    ("added", "+", "new"),
    ("removed", "-", "finishes its answers and leaves"),
    ("changed", "~", "gets a new engine at its next request"),
    ("relabelled", "=", "keeps running, with new settings"),
    ("at_once", "*", "applied"),
)


def _add_reload_options(parser: argparse.ArgumentParser) -> None:
    address.add_token_option(parser)
    address.add_options(parser, json_help="print what changed as JSON")


def _reload(args: argparse.Namespace) -> int:
    from greenroom.cli.client import Client

    began = time.monotonic()
    client, token = Client(address.address_of(args)), address.token_of(args)
    changes = client.post("/api/v1/reload", answer_max_s=RELOAD_MAX_S, token=token)
    if args.json:
        screen.say_json(changes)
        return ExitStatus.OK
    lines = told(changes)
    for line in lines:
        screen.say(line)
    changed = f"{len(lines)} change{'s' if len(lines) != 1 else ''}" if lines else "nothing changed"
    screen.say(f"reloaded in {screen.seconds(time.monotonic() - began)}: {changed}")
    if changes.get("added"):
        screen.hint(f"make the new one ready: greenroom load {changes['added'][0]}")
    return ExitStatus.OK


RELOAD = Subcommand(
    "reload", "Have the gateway read its configuration again and apply what changed.", _add_reload_options, _reload
)


def told(changes: Mapping[str, Sequence[str]]) -> list[str]:
    """One line for each model or key that changed."""
    return [f"{mark} {name}: {meaning}" for kind, mark, meaning in KINDS for name in changes.get(kind, ())]


def _add_flush_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="its id or an alias (default: all models)")
    parser.add_argument("--tenant", help="only what this tenant's requests left")
    parser.add_argument("--tag", help="only what requests with this X-Cache-Tag left")
    address.add_token_option(parser)
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def _flush(args: argparse.Namespace) -> int:
    from greenroom.cli.client import Client

    named = {"tag": args.tag, "tenant": args.tenant, "model": args.model}
    scope = next((scope for scope, value in named.items() if value is not None), "all")
    fields = {"scope": scope, "modelId": args.model, "tenantId": args.tenant, "tag": args.tag}
    # Only what is said: this is the body that a token is signed for.
    body = {key: value for key, value in fields.items() if value is not None}
    client = Client(address.address_of(args))
    answer = client.post(FLUSH_PATH, body, answer_max_s=FLUSH_MAX_S, token=address.token_of(args))
    if args.json:
        screen.say_json(answer)
    elif answer["flushed"]:
        removed = answer["entriesRemoved"]
        screen.say("flushed" if removed is None else f"flushed: {removed:,} entries removed")
    if not answer["flushed"]:
        raise CommandFailed(answer["reason"])
    return ExitStatus.OK


FLUSH = Subcommand(
    "flush", "Empty the caches of prompts: of a model, a tenant, a tag, or all.", _add_flush_options, _flush
)
