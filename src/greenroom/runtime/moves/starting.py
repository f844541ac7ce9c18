"""How far an engine is that starts: by what it prints, and by what its processes have read of the model's files.

Owns the reading of these figures. Pages of a mapped file count as read once they are in the process, whether they came
from the disk or were in the page cache. The little that a program reads of itself counts too.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import Final

from greenroom.base.detached import run_detached
from greenroom.process.proc import bytes_read
from greenroom.process.spawn import Child
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.moves.admission import files_of

# Words of vLLM and SGLang while they read the files of a model; llama.cpp prints a dot for each percent.
_SHARDS: Final = re.compile(r"checkpoint shards:\s+(\d{1,3})% Completed")
_DOTS: Final = re.compile(r"\.{1,100}")
_LINES_READ: Final = 20


class Starting:
    """One start of an engine."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._size_bytes = 0
        # The largest share that callers were told: sources change, and files are unmapped again.
        self.furthest = 0.0

    async def measure(self, entry: Entry) -> None:
        """Learn how large the files are. The disk may hang: nothing waits for this."""
        with contextlib.suppress(OSError):
            self._size_bytes = await run_detached(lambda: _size_of(entry), f"size of {entry.id}")

    def told(self) -> float | None:
        """The share that the engine says it has done, by the last of its words."""
        for line in reversed(self._child.log.tail(_LINES_READ)):
            if found := _SHARDS.search(line):
                return int(found[1]) / 100
            if _DOTS.fullmatch(line.strip()):
                return len(line.strip()) / 100
        return None

    def read(self) -> float | None:
        """The share of the files that its processes have read; None while their size is not known."""
        return sum(map(bytes_read, self._child.tree())) / self._size_bytes if self._size_bytes else None


def _size_of(entry: Entry) -> int:
    size_bytes = 0
    for file in set(files_of(entry)):
        with contextlib.suppress(OSError):
            size_bytes += os.path.getsize(file) if os.path.isfile(file) else 0
    return size_bytes
