"""`greenroom audit verify`: whether the audit log of signed operations is as it was written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from greenroom.cli import screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import CommandFailed, ExitStatus


def _add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    about = "Check the chain of hashes, and name the first bad line."
    verify = commands.add_parser("verify", help=about, description=about, allow_abbrev=False)
    verify.add_argument("file", nargs="?", metavar="FILE", help="the log (default: that of the configuration)")
    verify.add_argument("-c", "--config", metavar="FILE", help="the configuration (default: as for serve)")
    verify.add_argument(
        "--head", metavar="HASH", help="a last line's hash that was kept elsewhere; must be in the chain"
    )
    verify.add_argument("--json", action="store_true", help="print the result as JSON")


def _run(args: argparse.Namespace) -> int:
    from greenroom.base.plain_file import why
    from greenroom.features.governance.audit import verify

    path = Path(args.file) if args.file else _configured(args.config)
    try:
        found = verify(path, args.head)
    except (OSError, ValueError) as error:
        raise CommandFailed(f"{path} cannot be read: {why(error)}") from None
    if args.json:
        told: dict[str, Any] = {"ok": found.problem is None, "lines": found.lines, "head": found.head}
        screen.say_json({**told, "cut": list(found.cut), "bad_line": found.bad_line, "problem": found.problem})
        return ExitStatus.OK if found.problem is None else ExitStatus.FAILED
    if found.problem is not None:
        raise CommandFailed(f"{path}: line {found.bad_line}: {found.problem}")
    screen.say(f"{path}: {found.lines} lines, none changed; head {found.head}")
    for line in found.cut:
        screen.note(f"line {line} was cut by a crash; the line after it says so")
    screen.hint("keep the head elsewhere: `greenroom audit verify --head HASH` then finds lines taken from the end")
    return ExitStatus.OK


def _configured(file: str | None) -> Path:
    from greenroom.config import loader

    config = loader.load(loader.find(file)).config
    return Path(config.governance.audit_path or Path(config.state_dir) / "governance" / "audit.jsonl")


COMMAND = Subcommand("audit", "Verify the audit log of signed operations.", _add_options, _run)
