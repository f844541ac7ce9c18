"""`greenroom key`: a new API key, and the lines that let it in."""

from __future__ import annotations

import argparse
import json

from greenroom.cli import screen
from greenroom.cli.address import KEY_NAME
from greenroom.cli.failures import Exit

NAME = "key"
HELP = "Make a new API key and print it with the lines for the configuration. Nothing is stored."


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="laptop", help="who will hold it (default: laptop)")
    parser.add_argument("--admin", action="store_true", help="it may manage the gateway, besides asking models")
    parser.add_argument("--leases", action="store_true", help="it may take leases, besides asking models")
    parser.add_argument("--json", action="store_true", help="print name, key and sha256 as JSON")


def run(args: argparse.Namespace) -> int:
    from greenroom.tenancy.keys import new_key

    key, sha256 = new_key()
    rights = [word for word in ("admin", "leases") if getattr(args, word)]
    if args.json:
        screen.say_json({"name": args.name, "key": key, "sha256": sha256, **dict.fromkeys(rights, True)})
        return Exit.OK
    screen.say(f"key: {key}")
    screen.say("\nFor the configuration, which never holds the key itself:\n")
    # JSON's quoting is YAML's, and a name may need it.
    lines = [
        f"    - name: {json.dumps(args.name, ensure_ascii=False)}",
        f"sha256: {sha256}",
        *(f"{right}: true" for right in rights),
    ]
    screen.say("server:\n  api_keys:\n" + "\n      ".join(lines))
    screen.hint(f"\nkeep the key now, it cannot be shown again: export {KEY_NAME}=…; then `greenroom reload`")
    return Exit.OK
