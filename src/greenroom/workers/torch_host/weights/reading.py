"""Reads weights from files into the host arena, as fast as the disk or the page cache allows.

Owns the reading threads, their buffers, and the conversion of dtypes on the way. Files are read in long pieces from
beginning to end, however small their tensors are. `weight_file` reads a file in the fastest way. Never parses files
and never decides what goes where: it is given `TensorRead`s. Read `read_all` first.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from ..failures import BadModel, Failure, WorkCancelled
from .arena import HostArena, TensorPlace
from .folding import FOLDING, Folding, FoldSettings
from .safetensors_files import StoredTensor
from .weight_file import WeightFile, bounce_for

# Large enough to keep a disk busy for the quarter of a second in which another thread may hold the interpreter lock (to
# parse a tokenizer), small enough that threads finish together.
PIECE_BYTES: Final = 32 * 2**20
# Tensors per piece: the kernel accepts a limited number of buffers per read.
PARTS_MAX: Final = 512
# Tensors are cut at multiples of this: a multiple of every item size.
CUT_BYTES: Final = 16
# Disks serve parallel reads faster than sequential ones; more threads than this did not help. Two threads keep a
# processor busy: one copies while the other waits.
THREADS_MAX: Final = 16
THREADS_MIN: Final = 4
THREADS_PER_PROCESSOR: Final = 2
# Progress is reported at most this often: every hundredth.
PROGRESS_STEPS: Final = 100
# Dtypes in files that torch has too. Others can be neither read nor converted.
TORCH_DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
# Dtypes that are converted into each other. Others may be codes of a quantisation rather than values.
CONVERTED: Final = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class TensorRead:
    """One tensor in a file and its place in the arena."""

    source: StoredTensor
    place: TensorPlace

    @property
    def converts(self) -> bool:
        return TORCH_DTYPES[self.source.dtype] != self.place.dtype

    @property
    def stored(self) -> torch.dtype:
        kind: torch.dtype = getattr(torch, TORCH_DTYPES[self.source.dtype])
        return kind

    @property
    def wanted(self) -> torch.dtype:
        kind: torch.dtype = getattr(torch, self.place.dtype)
        return kind


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A range of a tensor's bytes, counted from the tensor's start."""

    transfer: TensorRead
    start: int
    size: int

    @property
    def filled(self) -> tuple[int, int]:
        """Its offset and size in the arena."""
        if not self.transfer.converts:
            return self.transfer.place.offset + self.start, self.size
        stored, wanted = self.transfer.stored.itemsize, self.transfer.wanted.itemsize
        return self.transfer.place.offset + self.start // stored * wanted, self.size // stored * wanted


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Consecutive bytes of one file, and the parts of tensors they hold."""

    file: Path
    offset: int
    size: int
    parts: tuple[TensorPart, ...]


@dataclass
class LoadContext:
    """Limits and cancellation of one load, and whether it may be folded. Subclasses are told of its steps by methods
    that must return at once."""

    arena_max_bytes: int | None = None
    host_free_bytes: int | None = None
    folds: bool = False
    folding: FoldSettings = FOLDING
    cancelled: threading.Event = field(default_factory=threading.Event)

    def on_progress(self, share: float) -> None:
        """This share of the bytes is read. It never decreases."""

    def on_thread(self) -> None:
        """Called in each thread that reads, before its first read. May raise."""

    def on_built(self, module: torch.nn.Module, arena: HostArena) -> None:
        """This module will be bound to this arena, which may not be filled yet. Called at most once."""

    def on_reading(self) -> None:
        """All threads read: work that starts now does not keep the disk waiting. May be called again."""

    def raise_if_cancelled(self) -> None:
        """Raises WorkCancelled if the load was cancelled. Called between steps that cannot be interrupted."""
        if self.cancelled.is_set():
            raise WorkCancelled("loading was stopped: no request waits for the model any more.")


def read_all(
    transfers: Sequence[TensorRead],
    arena: HostArena,
    context: LoadContext,
    folding: Folding,
    piece_bytes: int = PIECE_BYTES,
) -> int:
    """Fill the arena and return the bytes read. Raises BadModel, WorkCancelled or Failure; then no thread is left.
    `folding` is told of every part of the arena that is filled, by the thread that filled it."""
    pieces = list(pieces_of(transfers, piece_bytes))
    job = _ReadJob(pieces, arena, context, folding)
    begun = [threading.Event() for _ in range(min(_threads_max(), len(pieces)))]
    threads = [
        threading.Thread(target=job.run, args=(event,), name=f"read-{number}") for number, event in enumerate(begun)
    ]
    for thread in threads:
        thread.start()
    try:
        for event in begun:
            event.wait()
        context.on_reading()
    finally:
        for thread in threads:
            thread.join()
    return job.finish()


class _ReadJob:
    """The pieces that are left to read, shared by the threads."""

    def __init__(self, pieces: Sequence[FilePiece], arena: HostArena, context: LoadContext, folding: Folding) -> None:
        self._pieces = iter(pieces)
        counts = Counter(piece.file for piece in pieces)
        self._files = {path: WeightFile(path, count) for path, count in counts.items()}
        self._arena, self._buffer = arena.tensor, arena.buffer
        self._context, self._folding = context, folding
        self._total = sum(piece.size for piece in pieces)
        self._done = 0
        self._steps = 0
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def run(self, begun: threading.Event) -> None:
        """Read pieces until none is left, a thread has failed, or reading is cancelled."""
        try:
            self._context.on_thread()
            buffers = _Buffers()
            while (piece := self._next()) is not None:
                begun.set()
                self._read(piece, buffers)
                self._files[piece.file].piece_done()
                self._count(piece.size)
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
        finally:
            begun.set()

    def finish(self) -> int:
        for file in self._files.values():
            file.close()
        error, self._error = self._error, None
        try:
            if isinstance(error, OSError):
                raise Failure(f"reading {error.filename or 'weights'} failed: {error.strerror}.") from error
            if error is not None:
                raise error
        finally:
            # A traceback holds this frame, and with it the arena; a local reference to the error would make a cycle.
            del error
        if self._done < self._total:
            raise WorkCancelled("reading was stopped: no request waits for the model any more.")
        return self._done

    def _next(self) -> FilePiece | None:
        with self._lock:
            if self._error is not None or self._context.cancelled.is_set():
                return None
            return next(self._pieces, None)

    def _count(self, size: int) -> None:
        with self._lock:
            self._done += size
            step = self._done * PROGRESS_STEPS // self._total
            if step > self._steps:
                self._steps = step
                # Under the lock, so that reported progress never decreases.
                self._context.on_progress(step / PROGRESS_STEPS)

    def _read(self, piece: FilePiece, buffers: _Buffers) -> None:
        raws = buffers.raws_for(piece.parts)
        targets = [self._target(part, raw) for part, raw in zip(piece.parts, raws, strict=True)]
        got = self._files[piece.file].fill(targets, piece.offset, buffers.bounce)
        if got < piece.size:
            name = _name_at(piece, got)
            raise BadModel(f"{piece.file} ends inside tensor {name} while it is read. Download it again.")
        for part, raw in zip(piece.parts, raws, strict=True):
            if raw is not None:
                self._convert(part, raw)
            self._folding.filled(*part.filled)

    def _target(self, part: TensorPart, raw: torch.Tensor | None) -> memoryview:
        if raw is not None:
            return memoryview(raw.numpy())
        start, size = part.filled
        return self._buffer[start : start + size]

    def _convert(self, part: TensorPart, raw: torch.Tensor) -> None:
        numbers = raw.view(part.transfer.stored)
        start, size = part.filled
        self._arena[start : start + size].view(part.transfer.wanted).copy_(numbers)


class _Buffers:
    """The buffers of one reading thread. Allocated once: fresh memory costs more than the copy through it."""

    def __init__(self) -> None:
        self.bounce: mmap.mmap = bounce_for(PIECE_BYTES)
        self._raw: torch.Tensor | None = None

    def raws_for(self, parts: Sequence[TensorPart]) -> list[torch.Tensor | None]:
        """A buffer for each part that is converted, None for the others. Valid until the next call."""
        found: list[torch.Tensor | None] = []
        end = 0
        for part in parts:
            converts = part.transfer.converts
            found.append(self._room()[end : end + part.size] if converts else None)
            end += -(-part.size // CUT_BYTES) * CUT_BYTES if converts else 0
        return found

    def _room(self) -> torch.Tensor:
        if self._raw is None:
            self._raw = torch.empty(PIECE_BYTES + PARTS_MAX * CUT_BYTES, dtype=torch.uint8)
        return self._raw


def _threads_max() -> int:
    return max(THREADS_MIN, min(THREADS_MAX, THREADS_PER_PROCESSOR * len(os.sched_getaffinity(0))))


def _name_at(piece: FilePiece, place: int) -> str:
    """The name of the tensor at this offset of the piece."""
    for part in piece.parts:
        if place < part.size:
            break
        place -= part.size
    return part.transfer.source.name


def pieces_of(
    transfers: Sequence[TensorRead], piece_bytes: int = PIECE_BYTES, parts_max: int = PARTS_MAX
) -> Iterator[FilePiece]:
    """The files from beginning to end, cut into pieces that may span several tensors."""
    parts: list[TensorPart] = []
    size = 0
    for transfer in _in_file_order(transfers):
        start, end = 0, transfer.source.size
        while start < end:
            fits = min(end - start, (piece_bytes - size) // CUT_BYTES * CUT_BYTES)
            if parts and (fits == 0 or len(parts) == parts_max or not _goes_on(parts[-1], transfer, start)):
                yield _piece(parts, size)
                parts, size = [], 0
                continue
            parts.append(TensorPart(transfer, start, fits))
            start, size = start + fits, size + fits
    if parts:
        yield _piece(parts, size)


def _goes_on(last: TensorPart, transfer: TensorRead, start: int) -> bool:
    """True if this tensor, from `start` on, directly follows the last part in the file."""
    before, source = last.transfer.source, transfer.source
    return before.file == source.file and before.offset + last.start + last.size == source.offset + start


def _piece(parts: Sequence[TensorPart], size: int) -> FilePiece:
    source = parts[0].transfer.source
    return FilePiece(source.file, source.offset + parts[0].start, size, tuple(parts))


def _in_file_order(transfers: Sequence[TensorRead]) -> list[TensorRead]:
    return sorted(transfers, key=lambda transfer: (str(transfer.source.file), transfer.source.offset))
