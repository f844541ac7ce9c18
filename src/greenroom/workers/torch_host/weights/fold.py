"""The folded format, and a small program that folds chunks of an arena in place.

The exponents of a model's bfloat16 numbers are close together, so four bits are enough for most of them; sign and
fraction keep their eight bits. The few numbers with another exponent, the odd ones, are kept whole as well. This saves
host memory, and less is copied to the device, where `upload.py` restores the numbers bit for bit. Owns the format
and the table of chunks. Never imports torch or anything of ours: the program runs in a process of its own, because its
many short steps would each wait for the worker's interpreter lock.

    python -I -S fold.py WORKER_PID NUMPY_FOLDER DESCRIPTOR BYTES

Reads chunk numbers from stdin, four bytes each, so that several processes may read from one pipe. Folds each chunk in
the file behind the descriptor, and writes one line to stdout: the chunk's number, and the two numbers of its `Fold` if
it was folded. Ends with its stdin, and at once with the worker: a later write would hit what the next worker fills.
Exit code 12: NumPy cannot be imported; then nothing was changed.

A folded chunk of n numbers: n bytes of sign and fraction; n / 2 bytes of codes, each with the code of a number in the
first half (low bits) and of the number as far into the second half; positions of the odd numbers (int32); their values.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import struct
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import numpy as np
    from numpy.typing import NDArray

# One copy to the device: large enough to keep the bus busy. Only whole chunks are folded.
CHUNK_BYTES: Final = 64 * 2**20
# The last chunks are never folded: until they arrive on the device, folded chunks land in their place there.
LANDING_CHUNKS: Final = 2
# Extra bytes per odd number, and the largest share of odd numbers for which folding pays.
ODD_BYTES: Final = 6
ODD_SHARE_MAX: Final = 1 / 192
FOLDED_BYTES_MAX: Final = CHUNK_BYTES // 4 * 3 + int(CHUNK_BYTES // 2 * ODD_SHARE_MAX) * ODD_BYTES
# Codes: 0 is the exponent 0, of zeros; 1 to 14 are the exponents above `base`; 15 is an odd number.
CODES: Final = 14
ODD_CODE: Final = 15
# Exponents are sampled from every 1021st number. A prime, so that samples are not always from the same column.
SAMPLED: Final = 1021
# Numbers per step: fits into the processor's cache, and keeps the interpreter's share small.
STEP: Final = 2**17
ORDER: Final = struct.Struct("<I")
NO_NUMPY: Final = 12
_PR_SET_PDEATHSIG: Final = 1
# The kernel kills this process first when memory runs out.
_FIRST_TO_GO: Final = "1000"
_SIGN, _FRACTION = 0x0080008000800080, 0x007F007F007F007F


class Fold(NamedTuple):
    """What unfolding needs: the exponent below the first one with a code, and the number of odd numbers."""

    base: int
    odd: int

    def size(self, numbers: int) -> int:
        return numbers // 2 * 3 + ODD_BYTES * self.odd


class Chunk(NamedTuple):
    """A part of an arena's data: where it starts, here and on the device, and the bytes that are stored of it here."""

    start: int
    size: int
    fold: Fold | None = None

    @property
    def number(self) -> int:
        return self.start // CHUNK_BYTES


class ChunkTable:
    """How the data of one arena is cut into chunks, and which of them are folded."""

    def __init__(self, data_bytes: int, folds: Mapping[int, Fold] | None = None) -> None:
        self._data_bytes = data_bytes
        self.folds: Mapping[int, Fold] = folds or {}
        """By the index of the chunk. Written to the manifest as it is."""

    @classmethod
    def parse(cls, data_bytes: int, entries: Mapping[str, object]) -> ChunkTable:
        """The table of a manifest, from its `folds`. Raises ValueError, or AttributeError if they are no mapping."""
        folds = {int(index): _parse_fold(entry) for index, entry in entries.items()}
        foldable = range(data_bytes // CHUNK_BYTES - LANDING_CHUNKS)
        if any(index not in foldable for index in folds):
            raise ValueError("a chunk is folded that cannot be")
        return cls(data_bytes, folds)

    @property
    def chunks(self) -> list[Chunk]:
        """All of the data, in order."""
        found = []
        for index, start in enumerate(range(0, self._data_bytes, CHUNK_BYTES)):
            fold = self.folds.get(index)
            size = min(CHUNK_BYTES, self._data_bytes - start) if fold is None else fold.size(CHUNK_BYTES // 2)
            found.append(Chunk(start, size, fold))
        return found

    def with_landings(self, numbers: Collection[int]) -> list[int]:
        """These chunks, and those in whose place folded ones among them land, in order."""
        whole = self._data_bytes // CHUNK_BYTES
        landings = range(whole - LANDING_CHUNKS, whole) if any(number in self.folds for number in numbers) else ()
        return sorted({*numbers, *landings})


def _parse_fold(entry: object) -> Fold:
    if not (isinstance(entry, list) and len(entry) == 2 and all(type(number) is int for number in entry)):
        raise ValueError("not a fold")
    found = Fold(*entry)
    if not 0 <= found.base <= 255 or found.odd < 0 or found.size(CHUNK_BYTES // 2) > FOLDED_BYTES_MAX:
        raise ValueError("not a fold of a chunk")
    return found


def fold(numbers: NDArray[np.uint16], out: NDArray[np.uint8]) -> Fold | None:
    """Write these numbers folded to `out`; None if too many are odd. Their count is a multiple of 2 * STEP."""
    import numpy as np

    base = _base(numbers)
    if base is None:
        return None
    count, half, room = len(numbers), len(numbers) // 2, _Room()
    odd: list[NDArray[np.int64]] = []
    for start in range(0, half, STEP):
        codes = room.codes
        for first, code in ((start, codes[0]), (half + start, codes[1])):
            odd.append(room.take(numbers[first : first + STEP], out[first : first + STEP], code, base) + first)
        # Codes have four bits, so none is shifted into its neighbour.
        pairs = codes[1].view(np.uint64)
        np.left_shift(pairs, 4, out=pairs)
        np.bitwise_or(codes[0], codes[1], out=out[count + start : count + start + STEP])
    places = np.concatenate(odd)
    if len(places) > count * ODD_SHARE_MAX:
        return None
    end = count + half
    out[end : end + 4 * len(places)] = places.astype(np.int32).view(np.uint8)
    out[end + 4 * len(places) : end + ODD_BYTES * len(places)] = numbers[places].view(np.uint8)
    return Fold(base, len(places))


def _base(numbers: NDArray[np.uint16]) -> int | None:
    """The exponent below the CODES most frequent adjacent ones; None if a sample shows that they cover too few."""
    import numpy as np

    seen = np.bincount((numbers[::SAMPLED] >> 7) & 0xFF, minlength=256)
    zeros, seen[0] = int(seen[0]), 0
    together = np.convolve(seen, np.ones(CODES, dtype=seen.dtype), "valid")
    first = max(1, int(together.argmax()))
    outside = int(seen.sum() - together[first])
    return None if outside > ODD_SHARE_MAX * (zeros + int(seen.sum())) else first - 1


class _Room:
    """Scratch memory for the steps of one chunk."""

    def __init__(self) -> None:
        import numpy as np

        self.codes = np.empty((2, STEP), dtype=np.uint8)
        self._wide, self._other = np.empty((2, STEP), dtype=np.uint16)
        self._exponents, self._marks = np.empty((2, STEP), dtype=np.uint8)

    def take(
        self, numbers: NDArray[np.uint16], rest: NDArray[np.uint8], codes: NDArray[np.uint8], base: int
    ) -> NDArray[np.int64]:
        """Split numbers into codes and the rest; returns the indices of odd ones. Works on four numbers at a time."""
        import numpy as np

        fours, wide, other = (one.view(np.uint64) for one in (numbers, self._wide, self._other))
        np.right_shift(fours, 8, out=wide)
        np.bitwise_and(wide, np.uint64(_SIGN), out=wide)
        np.bitwise_and(fours, np.uint64(_FRACTION), out=other)
        np.bitwise_or(wide, other, out=wide)
        np.copyto(rest, self._wide, casting="unsafe")
        np.right_shift(fours, 7, out=wide)
        # The bits cut off here are the sign and the neighbour's.
        np.copyto(self._exponents, self._wide, casting="unsafe")
        np.subtract(self._exponents, np.uint8(base), out=codes)
        np.subtract(self._exponents, np.uint8(base + 1), out=self._marks)
        np.greater(self._marks, np.uint8(CODES - 1), out=self._marks.view(np.bool_))
        # Few are marked: look for marked groups of eight first.
        hits = np.flatnonzero(self._marks.view(np.uint64))
        outside = (hits[:, None] * 8 + np.arange(8)).ravel()
        outside = outside[self._marks[outside] != 0]
        zero = self._exponents[outside] == 0
        codes[outside] = np.where(zero, 0, ODD_CODE).astype(np.uint8)
        odd: NDArray[np.int64] = outside[~zero]
        return odd


# --- the program ----------------------------------------------------------------------------------------------------


def fold_in(whole: mmap.mmap, index: int, scratch: NDArray[np.uint8]) -> Fold | None:
    """Fold one chunk in place and punch a hole where memory is no longer needed."""
    import numpy as np

    chunk = np.frombuffer(whole, dtype=np.uint8, count=CHUNK_BYTES, offset=index * CHUNK_BYTES)
    found = fold(chunk.view(np.uint16), scratch)
    if found is not None:
        size = found.size(CHUNK_BYTES // 2)
        chunk[:size] = scratch[:size]
        kept = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        whole.madvise(mmap.MADV_REMOVE, index * CHUNK_BYTES + kept, CHUNK_BYTES - kept)
    return found


def main(worker: int, folder: str, descriptor: int, size: int) -> int:
    # Die with the thread that started this process; it waits for it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != worker:
        return 1
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(_FIRST_TO_GO)
    sys.path.append(folder)
    try:
        import numpy
    except Exception:
        # Any error: an installed NumPy may not run on this processor.
        return NO_NUMPY
    whole, scratch = mmap.mmap(descriptor, size), numpy.empty(FOLDED_BYTES_MAX, dtype=numpy.uint8)
    while order := os.read(0, ORDER.size):
        index: int = ORDER.unpack(order)[0]
        said = (index, *(fold_in(whole, index, scratch) or ()))
        os.write(1, " ".join(map(str, said)).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
