"""`greenroom reload` applies a changed configuration; `greenroom key` makes an API key for it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Final

from greenroom.cli import address, screen
from greenroom.cli.address import KEY_NAME
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import ExitStatus

# The file may be on a slow disk, and the sizes of model files are looked up.
RELOAD_MAX_S: Final = 120.0
# The gateway's word for each kind of change, the mark before its line, and its meaning.
KINDS: Final = (
    ("added", "+", "new"),
    ("removed", "-", "finishes its answers and leaves"),
    ("changed", "~", "gets a new engine at its next request"),
    ("relabelled", "=", "keeps running, with new settings"),
    ("at_once", "*", "applied"),
)


def _add_reload_options(parser: argparse.ArgumentParser) -> None:
    address.add_options(parser, json_help="print what changed as JSON")


def _reload(args: argparse.Namespace) -> int:
    from greenroom.cli.client import Client

    began = time.monotonic()
    changes = Client(address.address_of(args)).post("/api/v1/reload", answer_max_s=RELOAD_MAX_S)
    if args.json:
        screen.say_json(changes)
        return ExitStatus.OK
    lines = told(changes)
    for line in lines:
        screen.say(line)
    changed = f"{len(lines)} change{'s' if len(lines) != 1 else ''}" if lines else "nothing changed"
    screen.say(f"reloaded in {screen.seconds(time.monotonic() - began)}: {changed}")
    if changes.get("added"):
        screen.hint(f"talk to the new one: greenroom chat {changes['added'][0]}")
    return ExitStatus.OK


RELOAD = Subcommand(
    "reload", "Have the gateway read its configuration again and apply what changed.", _add_reload_options, _reload
)


def told(changes: Mapping[str, Sequence[str]]) -> list[str]:
    """One line for each model or key that changed."""
    return [f"{mark} {name}: {meaning}" for kind, mark, meaning in KINDS for name in changes.get(kind, ())]


# --- keys -----------------------------------------------------------------------------------------------------------


def _add_key_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="laptop", help="the owner of the key (default: laptop)")
    parser.add_argument("--admin", action="store_true", help="may manage the gateway as well as use models")
    parser.add_argument("--leases", action="store_true", help="may take leases as well as use models")
    parser.add_argument("--json", action="store_true", help="print name, key and sha256 as JSON")


def _key(args: argparse.Namespace) -> int:
    from greenroom.tenancy.keys import new_key

    key, sha256 = new_key()
    rights = [word for word in ("admin", "leases") if getattr(args, word)]
    if args.json:
        screen.say_json({"name": args.name, "key": key, "sha256": sha256, **dict.fromkeys(rights, True)})
        return ExitStatus.OK
    screen.say(f"key: {key}")
    screen.say("\nFor the configuration, which never holds the key itself:\n")
    # A name may need quotes; JSON's are valid YAML.
    lines = [
        f"    - name: {json.dumps(args.name, ensure_ascii=False)}",
        f"sha256: {sha256}",
        *(f"{right}: true" for right in rights),
    ]
    screen.say("server:\n  api_keys:\n" + "\n      ".join(lines))
    screen.hint(f"\nkeep the key now, it cannot be shown again: export {KEY_NAME}=…; then `greenroom reload`")
    return ExitStatus.OK


KEY = Subcommand(
    "key",
    "Make a new API key and print it with the lines for the configuration. Nothing is stored.",
    _add_key_options,
    _key,
)
