"""Output of commands: tables, spinners and colours in a terminal, plain and stable lines in a pipe.

Results go to standard output, progress and hints to standard error. Text from elsewhere (engines, models, tenants) is
stripped of control characters. `rich` is loaded only where it draws.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from greenroom.cli.failures import CommandFailed, OutputLost

# Control characters except tab and line break, and marks that change the direction of text.
_UNSAFE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_STYLES: Final = {"ready": "green", "asleep": "cyan", "cold": "dim", "failed": "red"}

Row = Sequence[str]


def harmless(text: str) -> str:
    """The text without control characters that a terminal would act on."""
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text)


def write(result: str | bytes) -> None:
    """Write to standard output at once. Raises OutputLost if it takes no more, BrokenPipeError if its reader left."""
    try:
        if isinstance(result, bytes):
            sys.stdout.buffer.write(result)
        else:
            sys.stdout.write(result)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        hush()
        raise OutputLost(f"standard output cannot be written: {error.strerror}") from error


def say(text: str = "") -> None:
    """A line of the result."""
    write(f"{harmless(text)}\n")


def note(text: str) -> None:
    """A line for people, on standard error."""
    print(harmless(text), file=sys.stderr, flush=True)


def hint(text: str) -> None:
    """A hint what to type next; only at a terminal."""
    if sys.stderr.isatty():
        print(dim(text), file=sys.stderr, flush=True)


def program() -> str:
    """How to call this program: `greenroom` if it is on PATH, otherwise the path it was called by."""
    called = sys.argv[0]
    return called if called.endswith("/greenroom") and shutil.which("greenroom") is None else "greenroom"


def dim(text: str) -> str:
    return f"{_DIM}{harmless(text)}{_PLAIN}"


def say_json(value: Any, *, on_one_line: bool = False) -> None:
    """Valid JSON, whatever the locale. Half a surrogate pair is escaped by the stream (`main`), as JSON would."""
    is_ascii = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    text = json.dumps(_finite(value), indent=None if on_one_line else 2, ensure_ascii=is_ascii, allow_nan=False)
    write(f"{text}\n")


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def hush() -> None:
    """Send standard output to /dev/null: it cannot be written, and Python would complain again at exit."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


def fail(error: CommandFailed) -> None:
    note(f"greenroom: {error.message}")
    if error.details:
        note("\n".join(f"  | {line}" for line in error.details.splitlines()))


def seconds(value: float | None) -> str:
    """`0.4s`, `12s`, `3m`, `1h30m`, `5d`; `-` when not known."""
    if value is None:
        return "-"
    if value < 9.95:
        return f"{max(0.0, value):.1f}s"
    if value < 60:
        return f"{value:.0f}s"
    minutes, hours = round(value / 60), round(value / 3_600)
    if minutes < 60:
        return f"{minutes}m"
    if hours < 24:
        return _two(minutes, 60, "h", "m")
    return _two(hours, 24, "d", "h")


def _two(count: int, size: int, large: str, small: str) -> str:
    """`count` small units as large ones and the rest: `1h30m`."""
    whole, left = divmod(count, size)
    return f"{whole}{large}" + (f"{left}{small}" if left else "")


# --- tables ---------------------------------------------------------------------------------------------------------


def say_table(titles: Row, rows: Sequence[Row]) -> None:
    if not sys.stdout.isatty():
        write(f"{plain_table(titles, rows)}\n")
        return
    from rich.console import Console

    Console().print(drawn_table(titles, rows))


def plain_table(titles: Row, rows: Sequence[Row]) -> str:
    """Columns separated by two spaces, titles in capitals. Only the last cell of a row may hold a space."""
    shown = [tuple(title.upper().replace(" ", "_") for title in titles)]
    shown += [tuple(harmless(cell).replace("\n", " ") or "-" for cell in row) for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(titles))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in shown)


def drawn_table(titles: Row, rows: Sequence[Row]) -> Any:
    """The same as a rich table, to print or to show live."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(*titles, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(harmless(cell), style=_STYLES.get(cell, "")) for cell in row))
    return table


WATCH_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Frame:
    """What is shown of some figures: a table without titles is left out; the summary is for terminals."""

    titles: Row
    rows: Sequence[Row]
    notes: Sequence[str]
    summary: Sequence[str]


def show(frame: Frame) -> None:
    if frame.titles:
        say_table(frame.titles, frame.rows)
    for line in frame.notes:
        note(line)
    for line in frame.summary:
        hint(line)


def watch(frames: Iterator[Frame]) -> NoReturn:
    """Show one after the other until interrupted."""
    if sys.stdout.isatty():
        from rich.live import Live

        with Live(_drawn(next(frames)), auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_EVERY_S)
                live.update(_drawn(next(frames)), refresh=True)
    while True:
        frame = next(frames)
        say(plain_table(frame.titles, frame.rows) + "\n")
        for line in frame.notes:
            note(line)
        time.sleep(WATCH_EVERY_S)


def show_json(figures: Iterator[Any], *, again: bool) -> None:
    """The first as JSON, whatever is in it; with `again` each on a line, until interrupted."""
    if not again:
        say_json(next(figures))
        return
    for one in figures:
        say_json(one, on_one_line=True)
        time.sleep(WATCH_EVERY_S)


def _drawn(frame: Frame) -> Any:
    from rich.console import Group
    from rich.text import Text

    below = "\n".join([*frame.notes, *frame.summary])
    return Group(drawn_table(frame.titles, frame.rows), Text(harmless(below), style="dim"))


# --- waiting --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on standard error; the function it yields changes its text. In a pipe each new text is one line."""
    if not sys.stderr.isatty():
        note(text)
        yield note
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(harmless(text))) as status:
        yield lambda text: status.update(Text(harmless(text)))


@contextlib.contextmanager
def progress_bar(text: str) -> Iterator[Callable[[str, float | None], None]]:
    """A bar on standard error; the function it yields is told text and progress (None: not known). In a pipe each new
    text is one line."""
    if not sys.stderr.isatty():
        last = ""

        def tell(text: str, progress: float | None) -> None:
            nonlocal last
            said = text.partition(",")[0] + (f" {progress:.0%}" if progress else "")
            if said != last:
                note(said)
            last = said

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(harmless(text), total=None)
        yield lambda text, progress: bars.update(
            task, description=harmless(text), total=None if progress is None else 1.0, completed=progress or 0.0
        )
