"""The commands there are, and the parser that knows them.

Each command is a module with a name, a sentence, its options and `run`; what is heavy is imported in there, so that
`--help` is quick.
"""

from __future__ import annotations

import argparse
from typing import Final, Protocol

from greenroom import __version__
from greenroom.cli.commands import (
    chat,
    check,
    demo,
    engines,
    estimate,
    explain,
    gpus,
    key,
    lease,
    leases,
    load,
    logs,
    prepare,
    ps,
    reload,
    serve,
    simulate,
    sleep,
    unload,
)


class Command(Protocol):
    """What a command's module has."""

    NAME: str
    HELP: str

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


COMMANDS: Final[tuple[Command, ...]] = (
    *(serve, demo, check, ps, gpus, load, unload, sleep, prepare, logs, chat),
    *(explain, engines, estimate, reload, key, simulate, lease, leases),
)

EPILOG: Final = """\
New here? `greenroom demo` serves two small models; then, in another terminal, `greenroom chat smollm2`.
Commands that speak to a gateway find it by --url or GREENROOM_URL and show the key in GREENROOM_API_KEY."""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="greenroom",
        description="One OpenAI-compatible address in front of every model you own.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"greenroom {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP, allow_abbrev=False)
        command.add_options(sub)
        sub.set_defaults(run=command.run)
    return top
