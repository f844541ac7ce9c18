"""The commands of `greenroom`, one file for each or for a few that belong together.

A command module imports what is heavy inside `run`, so that `greenroom --help` stays fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One word after `greenroom`. `run` returns the exit status, or raises CommandFailed or GreenroomError."""

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
