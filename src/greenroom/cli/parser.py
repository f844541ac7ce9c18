"""The list of commands, and the parser made of it. Heavy modules are loaded by a command's `run`, never here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final

from greenroom import __version__
from greenroom.cli import screen
from greenroom.cli.commands import Subcommand, chat, check, demo, engines, gpus, importing, key, ps, serve, usage
from greenroom.features.governance import cli as governance
from greenroom.features.jobs import cli as jobs
from greenroom.features.leases import cli as leases
from greenroom.features.library import cli_estimate as estimate
from greenroom.features.library import cli_models as models
from greenroom.features.library import cli_pull as pull
from greenroom.features.operations import cli as operations
from greenroom.features.planning import cli as planning
from greenroom.features.planning import cli_simulate as simulate
from greenroom.features.versions import cli_replicas as replicas
from greenroom.features.versions import cli_trainer as trainer

COMMANDS: Final[tuple[Subcommand, ...]] = (
    *(serve.COMMAND, replicas.COMMAND, demo.COMMAND, check.COMMAND, importing.COMMAND),
    *(ps.COMMAND, gpus.COMMAND, planning.DECISIONS),
    *(
        operations.LOAD,
        operations.UNLOAD,
        operations.SLEEP,
        operations.PREPARE,
        operations.FLUSH,
        operations.LOGS,
        chat.COMMAND,
        planning.EXPLAIN,
    ),
    *(engines.COMMAND, estimate.COMMAND, operations.RELOAD, key.COMMAND, simulate.COMMAND),
    *(models.MODELS, models.RM, pull.COMMAND, jobs.COMMAND, leases.LEASE, leases.LEASES),
    *(usage.COMMAND, governance.TOKEN, governance.AUDIT, trainer.COMMAND),
)

EPILOG: Final = """\
New here? `greenroom demo` serves two small models; then, in another terminal, `greenroom chat smollm2`.
Commands that talk to a gateway find it by --url or GREENROOM_URL and send the key in GREENROOM_API_KEY."""


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        """Raises what `screen.write` raises; argparse ignores it if --help or --version cannot be written."""
        if file is sys.stdout:
            screen.write(message)
        else:
            super()._print_message(message, file)


def parser(commands: Sequence[Subcommand] = COMMANDS) -> argparse.ArgumentParser:
    top = _Parser(
        prog="greenroom",
        description="One OpenAI-compatible address in front of every model you own.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"greenroom {__version__}")
    subparsers = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        sub = subparsers.add_parser(command.name, help=command.help, description=command.help, allow_abbrev=False)
        command.add_options(sub)
        sub.set_defaults(run=command.run)
    return top
