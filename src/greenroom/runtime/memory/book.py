"""The book of needs: how much memory models were seen to take, kept across restarts.

Owns one small JSON file. A figure is keyed by the model's file, the engine with its version, the arguments and the kind
of GPU. A file that cannot be read costs a warning and nothing else. How a file is replaced and where warnings go is
passed in.

The book keeps the measured peak itself. The safety margin of a plan belongs to each device: added here as well, it
would count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from greenroom.base.plain_file import replace_file
from greenroom.core.model import Need

FILE_NAME: Final = "needs.json"
# Includes models that are no longer configured, in case they return; the oldest are forgotten first.
FIGURES_MAX: Final = 10_000
# More than so many figures need; a larger file is not ours.
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
# Names of GPUs come from a driver, and the rest are hashes; longer text is not ours.
TEXT_MAX: Final = 512
# A petabyte: more than any measurement.
MIB_MAX: Final = 2**30
# A load that ran out of memory once may have met a stranger. One that did so again needs more than is measured.
RAISES_FORGIVEN: Final = 1

_NOTHING: Final = Need()

Warn = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class BookKey:
    """The key of a figure. `file`, `engine` and `arguments` are identities; `gpu` is a name, empty for the host."""

    file: str
    engine: str
    arguments: str
    gpu: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The most that a model was seen to take; 0 or None where that could not be seen. `raised` is the least to plan
    with after loads ran out of memory, and `raises` counts them."""

    gpu_mib: int = 0
    host_mib: int | None = None
    raised: Need = _NOTHING
    raises: int = 0

    @property
    def is_seen(self) -> bool:
        return bool(self.gpu_mib or self.host_mib)


class MemoryNeedsStore:
    """`recall` and `note` never block; what `writing` returns may. A book without a folder is kept in memory only."""

    def __init__(self, folder: Path | None, warn: Warn, figures_max: int = FIGURES_MAX) -> None:
        self._path = None if folder is None else folder / FILE_NAME
        self._figures_max = figures_max
        self._figures = {} if self._path is None else _read(self._path, warn)
        self._written = _text(self._figures)

    def recall(self, key: BookKey) -> Measured | None:
        return self._figures.get(key)

    def note(self, key: BookKey, measured: Measured) -> None:
        """A loaded model was seen to take this much. The peak is kept."""
        old = self._figures.get(key, Measured())
        peak = replace(old, gpu_mib=max(old.gpu_mib, measured.gpu_mib), host_mib=_most(old.host_mib, measured.host_mib))
        self._keep(key, _forgiven(peak) if measured.is_seen else peak)

    def note_no_memory(self, key: BookKey, least: Need) -> None:
        """A load ran out of memory: plan with at least this from now on."""
        old = self._figures.get(key, Measured())
        raised = Need(max(old.raised.gpu_mib, least.gpu_mib), max(old.raised.host_mib, least.host_mib))
        self._keep(key, replace(old, raised=raised, raises=old.raises + 1))

    def _keep(self, key: BookKey, measured: Measured) -> None:
        # Moved to the end: the newest are last.
        self._figures.pop(key, None)
        self._figures[key] = measured
        for oldest in list(self._figures)[: max(0, len(self._figures) - self._figures_max)]:
            del self._figures[oldest]

    def writing(self) -> Callable[[], None]:
        """A function that writes the current figures to the file. It may run in a thread. Raises OSError."""
        figures = dict(self._figures)
        return lambda: self._write(figures)

    def _write(self, figures: Mapping[BookKey, Measured]) -> None:
        text = _text(figures)
        if self._path is None or text == self._written:
            return
        replace_file(self._path, text)
        self._written = text


def _forgiven(measured: Measured) -> Measured:
    """A load that succeeded and was measured lowers a need that was raised only once."""
    if not measured.raises or measured.raises > RAISES_FORGIVEN:
        return measured
    least = Need(min(measured.raised.gpu_mib, measured.gpu_mib), min(measured.raised.host_mib, measured.host_mib or 0))
    return replace(measured, raised=least)


def _most(one: int | None, other: int | None) -> int | None:
    return max(one or 0, other or 0) if one is not None or other is not None else None


# --- the file -------------------------------------------------------------------------------------------------------

Word = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
Number = Annotated[int, msgspec.Meta(ge=0, le=MIB_MAX)]


class _Figure(msgspec.Struct):
    file: Word
    engine: Word
    arguments: Word
    gpu: Word
    gpu_mib: Number
    host_mib: Number | None
    raised: tuple[Number, Number]
    raises: Number


class _File(msgspec.Struct):
    version: Literal[1]
    needs: list[_Figure]


def _text(figures: Mapping[BookKey, Measured]) -> str:
    needs = [
        _Figure(
            key.file,
            key.engine,
            key.arguments,
            key.gpu,
            seen.gpu_mib,
            seen.host_mib,
            (seen.raised.gpu_mib, seen.raised.host_mib),
            seen.raises,
        )
        for key, seen in figures.items()
    ]
    return msgspec.json.format(msgspec.json.encode(_File(1, needs)), indent=1).decode() + "\n"


def _read(path: Path, warn: Warn) -> dict[BookKey, Measured]:
    """The figures of an earlier run; none, with a warning, if they cannot be read."""
    try:
        with path.open("rb") as file:
            needs = msgspec.json.decode(file.read(FILE_BYTES_MAX), type=_File).needs[-FIGURES_MAX:]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        warn(f"remembered needs in {path} are ignored and will be measured anew", str(error) or repr(error))
        return {}
    return {
        BookKey(one.file, one.engine, one.arguments, one.gpu): Measured(
            one.gpu_mib, one.host_mib, Need(*one.raised), one.raises
        )
        for one in needs
    }
