"""The `greenroom` command: which commands there are, and how every one of them ends.

Owns the parser and the exit statuses (0 done, 1 failed, 2 wrong usage, 3 no gateway answers). Each command is a module
with a name, a sentence, its options and `run`; what is heavy is imported in there, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from greenroom import __version__
from greenroom.cli import (
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
    screen,
    serve,
    simulate,
    sleep,
    unload,
)
from greenroom.cli.failures import CommandFailed, Exit
from greenroom.errors import GreenroomError


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status; argparse itself exits for wrong usage and --help."""
    _open_closed_streams()
    _make_streams_robust()
    try:
        args = parser().parse_args(argv)
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except CommandFailed as error:
        screen.fail(error)
        return error.exit
    except GreenroomError as error:
        screen.fail(CommandFailed(error.message, error.details))
        return Exit.FAILED
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (`| head`) has enough.
        screen.hush()
        return Exit.FAILED


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


def _open_closed_streams() -> None:
    """A service may start us without (`>&-`). The next file or socket would get such a number, and what is printed."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is given first, so it is this one.
            os.open(os.devnull, os.O_RDWR)
    # Python leaves nothing in these places then.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _make_streams_robust() -> None:
    """A terminal may know ASCII only, and a model may say half a character: neither may end the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
