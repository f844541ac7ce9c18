"""The `greenroom` command: how every one of its commands begins and ends.

Owns the exit statuses (0 done, 1 failed, 2 wrong usage, 3 no gateway answers, 130 interrupted). Which there are is in
`commands.py`. Imports next to nothing before it can be interrupted without a traceback.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

from greenroom.cli import failures

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status; argparse itself exits for wrong usage and --help."""
    with failures.end_at_once():
        # All that takes its time, now that an interrupt ends it without a word.
        from greenroom.cli import screen
        from greenroom.cli.failures import CommandFailed, Exit
        from greenroom.cli.parser import parser
        from greenroom.errors import GreenroomError

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
