"""The `greenroom` program: how every command begins and ends. `parser.py` lists the commands.

Turns what a command raises into a line and an exit status (`failures.py`). Imports next to nothing before an interrupt
can end it without a traceback.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

from greenroom.cli import failures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from greenroom.cli.commands import Subcommand


def main(argv: Sequence[str] | None = None, commands: Sequence[Subcommand] | None = None) -> int:
    """Run one command. Returns its exit status; argparse itself exits for wrong usage and --help."""
    with failures.end_at_once():
        # These imports take time; an interrupt during them ends the program silently.
        from greenroom.cli import screen
        from greenroom.cli.failures import CommandFailed, ExitStatus
        from greenroom.cli.parser import COMMANDS, parser
        from greenroom.errors import GreenroomError

        _open_closed_streams()
        _make_streams_robust()
    try:
        args = parser(COMMANDS if commands is None else commands).parse_args(argv)
        status: int | None = args.run(args)
        return status or ExitStatus.OK
    except CommandFailed as error:
        screen.fail(error)
        return error.exit
    except GreenroomError as error:
        screen.fail(CommandFailed(error.message, error.details))
        return ExitStatus.FAILED
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (`| head`) has closed the pipe.
        screen.hush()
        return ExitStatus.FAILED


def _open_closed_streams() -> None:
    """Open streams 0 to 2 if the caller closed them (`>&-`): the next file or socket would get that descriptor, and
    with it whatever is printed."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free descriptor is used, which is this one.
            os.open(os.devnull, os.O_RDWR)
    # Python sets a stream that was closed at start to None.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _make_streams_robust() -> None:
    """Never fail to print: the terminal may be ASCII-only, and a model may send half a character."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
