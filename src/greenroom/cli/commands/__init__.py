"""The commands of `greenroom`, one file for each or for a few that belong together. A command module imports what is
heavy inside `run`, so that `greenroom --help` stays fast."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One word after `greenroom`. `run` returns the exit status if it is not OK, or raises CommandFailed or
    GreenroomError. It is None where another word must follow, whose parser has its own `run` among its defaults."""

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None] | None = None


SECONDS_MAX: Final = 365 * 86_400.0


def from_0(text: str) -> float:
    """A finite number of at least 0."""
    value = _finite(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 on")
    return value


def seconds(text: str) -> float:
    """From 0 to a year."""
    value = _finite(text)
    if value is None or not 0 <= value <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds from 0 on")
    return value


def seconds_above_0(text: str) -> float:
    value = _finite(text)
    if value is None or not 0 < value <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
