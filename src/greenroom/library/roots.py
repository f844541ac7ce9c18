"""The folders below which models may lie, and whether a name leads to something below them.

Owns the one rule for paths that callers name: a path counts by where it really leads, so neither `..` nor a symbolic
link leads out. Everything here looks at the disk and blocks as long as the disk does; callers use a thread.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from typing import Final

# The longest path that Linux takes.
PATH_CHARS_MAX: Final = 4_096
LINKS_MAX: Final = 40
# The number of a part of a split model, and the kind of a file.
_ENDING: Final = re.compile(r"(-\d{5}-of-(\d{5}))?(\.[^./]+)?$")


class Roots:
    """`folders` are absolute, as the operator wrote them. They need not exist: disks come and go."""

    def __init__(self, folders: Iterable[str]) -> None:
        self.folders: Final = tuple(dict.fromkeys(os.path.normpath(folder) for folder in folders))

    def __bool__(self) -> bool:
        return bool(self.folders)

    def real(self) -> tuple[str, ...]:
        """The folders with links resolved, each once, in their order. Blocks."""
        return tuple(dict.fromkeys(os.path.realpath(folder) for folder in self.folders))

    def holds(self, real: str) -> bool:
        """True if this path, whose links are resolved, is a root or lies below one. Blocks."""
        return any(is_below(real, root) for root in self.real())

    def locate(self, name: str) -> str | None:
        """The file or folder of this name below a root: absolute, or relative to a root (the first that has it).

        None for everything else: what is an address, is missing, leads out of all roots, or is neither a plain file nor
        a folder. The folders of the answer are real; a file keeps its own name, even if it is a link, because the files
        of a split model and of the hub's cache are told by their names. Never raises. Blocks.
        """
        if not name or len(name) > PATH_CHARS_MAX or "\0" in name or "://" in name:
            return None
        candidates = (name,) if os.path.isabs(name) else (os.path.join(folder, name) for folder in self.folders)
        return next((found for path in candidates if (found := self._located(path)) is not None), None)

    def _located(self, path: str) -> str | None:
        try:
            real = os.path.realpath(path, strict=True)
            mode = os.stat(real).st_mode
            if not self.holds(real):
                return None
            if stat.S_ISDIR(mode):
                return real
            folder, name = os.path.split(os.path.normpath(path))
            # `a/link/../b` is not `a/b`: where the shortcut of normpath lied, only the real path is left.
            named = os.path.join(os.path.realpath(folder), name)
            is_same = os.path.realpath(named) == real and self.holds(named)
            return (named if is_same else real) if stat.S_ISREG(mode) else None
        except (OSError, ValueError):
            return None


def is_below(path: str, root: str) -> bool:
    """True if `path` is `root` or lies below it, by their names alone. Both are absolute and normal."""
    return path == root or path.startswith(root.rstrip("/") + "/")


def link_steps(path: str) -> list[str]:
    """Where this path lies, then where its links lead, one after another. Blocks."""
    steps: list[str] = []
    while len(steps) < LINKS_MAX:
        folder, name = os.path.split(path)
        steps.append(os.path.join(os.path.realpath(folder), name))
        try:
            path = os.path.join(os.path.dirname(steps[-1]), os.readlink(steps[-1]))
        except OSError:
            break
    return steps


def pinned(path: str) -> str:
    """What this path means now, wherever its links lead later. Blocks. Files are told by their names, so a link to a
    file of another name stays: links of the hub's cache lead to blobs. So does a link to a part of a split model that
    has not the same neighbours there."""
    if os.path.isdir(path):
        return os.path.realpath(path)
    steps = link_steps(path)
    return next(step for step in reversed(steps) if _ending(step) == _ending(steps[0]) and _same_parts(step, steps[0]))


def _ending(path: str) -> str:
    match = _ENDING.search(path)
    return "" if match is None else match[0]


def _same_parts(one: str, other: str) -> bool:
    """True if all parts of these two are the same files, or if they are not split. Blocks."""
    pairs = zip(_parts(one), _parts(other), strict=False)
    return one == other or all(os.path.realpath(mine) == os.path.realpath(theirs) for mine, theirs in pairs)


def _parts(path: str) -> Iterator[str]:
    """The paths of all parts of a split model, from that of one."""
    if (match := _ENDING.search(path)) is not None and match[2] is not None:
        kind = match[3] or ""
        for part in range(1, int(match[2]) + 1):
            yield f"{path[: match.start()]}-{part:05}-of-{match[2]}{kind}"
