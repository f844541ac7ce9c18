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
    parser.add_argument("--json", action="store_true", help="print name, key and sha256 as JSON")


def run(args: argparse.Namespace) -> int:
    from greenroom.tenancy.keys import new_key

    key, sha256 = new_key()
    if args.json:
        screen.say_json({"name": args.name, "key": key, "sha256": sha256})
        return Exit.OK
    screen.say(f"key: {key}")
    screen.say("\nFor the configuration, which never holds the key itself:\n")
    # JSON's quoting is YAML's, and a name may need it.
    screen.say(f"server:\n  api_keys:\n    - name: {json.dumps(args.name)}\n      sha256: {sha256}")
    screen.hint(f"\nkeep the key now, it cannot be shown again: export {KEY_NAME}=…; then `greenroom reload`")
    return Exit.OK
