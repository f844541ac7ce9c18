"""How a command in the file becomes words. Split like a shell would, never run by one.

One place, so that what was checked when the file was read is what is started later.
"""

from __future__ import annotations

import shlex


def words(command: str | tuple[str, ...]) -> tuple[str, ...]:
    """The program and its arguments. Raises ValueError if a quote is left open.

    A list is taken as it is. In a text, lines that begin with # are comments and a line ending in \\ goes on in the
    next, so that a long command can be written over several lines. Placeholders are to be filled after this, not
    before: then no value can add words.
    """
    if not isinstance(command, str):
        return command
    lines = [line for line in command.splitlines() if not line.lstrip().startswith("#")]
    return tuple(shlex.split("\n".join(lines).replace("\\\n", " ")))
