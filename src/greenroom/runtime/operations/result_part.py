"""A result that is being written, piece by piece, within what all results may take together.

Owns the file until it is complete or discarded. The table counts its bytes.
"""

from __future__ import annotations

from typing import BinaryIO, Final, Protocol

from greenroom.errors import OperationStoreFull
from greenroom.runtime.operations import files
from greenroom.runtime.operations.files import OperationFiles

RETRY_AFTER_S: Final = 10.0


class ResultBudget(Protocol):
    def grow(self, id: str, size: int) -> None:
        """Raises ResultTooLarge or OperationStoreFull if that cannot be kept."""
        ...

    def shrink(self, id: str) -> None: ...


class ResultPart:
    """A result that is being written. `OperationTable.end` completes it."""

    def __init__(self, budget: ResultBudget, stored: OperationFiles, id: str, file: BinaryIO) -> None:
        self._budget = budget
        self._files = stored
        self._id = id
        self._file = file
        self.size = 0

    def write(self, data: bytes) -> None:
        """Ends in the page cache. Raises ResultTooLarge or OperationStoreFull."""
        self._budget.grow(self._id, len(data))
        self.size += len(data)
        try:
            self._file.write(data)
        except OSError as error:
            raise disk_failed(error) from error

    def write_head(self, about: object) -> None:
        """The first line, which `read_result` reads. Raises as `write` does."""
        self.write(files.first_line(about))

    def complete(self) -> None:
        """Blocks. Raises OSError."""
        self._files.complete_result(self._id, self._file)

    def discard(self) -> None:
        """May be called again."""
        self._budget.shrink(self._id)
        files.close_unwritten(self._file)
        self._files.remove(self._id, files.PART)


def disk_failed(error: OSError) -> OperationStoreFull:
    return OperationStoreFull(
        f"The disk of the state directory does not take it: {error.strerror}.", retry_after_s=RETRY_AFTER_S
    )
