"""The book of needs: what models were seen to take, kept across restarts.

Owns one small JSON file. A figure belongs to a file, an engine with its version, the arguments and a kind of GPU
together; change one of them and it is another figure. The book is a help, never a need: a file that cannot be read or
written costs a warning and nothing else. How a file is replaced and where warnings go is handed in.

What is remembered is the peak itself. The safety that a plan needs on top is each device's margin: added here as well
it would be counted twice, and a figure that was measured would no longer be one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from greenroom.core.model import Need

FILE_NAME: Final = "needs.json"
VERSION: Final = 1
# Also of models that are configured no more, for when they come back; the longest unseen are forgotten first.
FIGURES_MAX: Final = 10_000
# As much as so many figures can need; a larger file is not ours.
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
# Names of GPUs come from a driver and the rest are hashes; anything longer is not ours.
TEXT_MAX: Final = 512
# A petabyte. More than that was never measured.
MIB_MAX: Final = 2**30
# A load that once ran out of memory may have met a stranger; one that did so again needs more than it shows.
RAISES_FORGIVEN: Final = 1

_NOTHING: Final = Need()

Replace = Callable[[Path, str], None]
Warn = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class BookKey:
    """Whose figure it is. `file`, `engine` and `arguments` are identities, `gpu` a name, empty for the host."""

    file: str
    engine: str
    arguments: str
    gpu: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The most it was seen to take. Nothing (0, None) where it could not be seen.

    `raised` is the least to plan with since a load ran out of memory, and `raises` how often that happened.
    """

    gpu_mib: int = 0
    host_mib: int | None = None
    raised: Need = _NOTHING
    raises: int = 0

    @property
    def is_seen(self) -> bool:
        return bool(self.gpu_mib or self.host_mib)


class NeedBook:
    """`write` may block, `recall` and `note` never do. A book without a folder is forgotten at the end."""

    def __init__(self, folder: Path | None, replace_file: Replace, warn: Warn) -> None:
        self._path = None if folder is None else folder / FILE_NAME
        self._replace_file = replace_file
        self._warn = warn
        self._figures = {} if self._path is None else _read(self._path, warn)
        self._written = _text(self._figures)
        self._failed = False

    def recall(self, key: BookKey) -> Measured | None:
        return self._figures.get(key)

    def note(self, key: BookKey, measured: Measured) -> None:
        """It was loaded and seen to take this; the peak is kept."""
        old = self._figures.get(key, Measured())
        peak = replace(old, gpu_mib=max(old.gpu_mib, measured.gpu_mib), host_mib=_most(old.host_mib, measured.host_mib))
        self._keep(key, _forgiven(peak) if measured.is_seen else peak)

    def note_no_memory(self, key: BookKey, least: Need) -> None:
        """A load ran out of memory: plan with at least this from now on."""
        old = self._figures.get(key, Measured())
        raised = Need(max(old.raised.gpu_mib, least.gpu_mib), max(old.raised.host_mib, least.host_mib))
        self._keep(key, replace(old, raised=raised, raises=old.raises + 1))

    def _keep(self, key: BookKey, measured: Measured) -> None:
        # To the end, where the newest stand.
        self._figures.pop(key, None)
        self._figures[key] = measured
        for oldest in list(self._figures)[: max(0, len(self._figures) - FIGURES_MAX)]:
            del self._figures[oldest]

    def writing(self) -> Callable[[], None]:
        """What is to be done, perhaps in another thread, to have the file say what the book says now. Never raises."""
        figures = dict(self._figures)
        return lambda: self._write(figures)

    def _write(self, figures: Mapping[BookKey, Measured]) -> None:
        text = _text(figures)
        if self._path is None or text == self._written:
            return
        try:
            self._replace_file(self._path, text)
        except OSError as error:
            # Once, until it works again: a disk that is full stays full for a while.
            if not self._failed:
                self._warn(f"remembered needs cannot be written to {self._path}", error.strerror or str(error))
            self._failed = True
        else:
            self._written, self._failed = text, False


def _forgiven(measured: Measured) -> Measured:
    """A load that worked and was seen says what it really takes."""
    if not measured.raises or measured.raises > RAISES_FORGIVEN:
        return measured
    least = Need(min(measured.raised.gpu_mib, measured.gpu_mib), min(measured.raised.host_mib, measured.host_mib or 0))
    return replace(measured, raised=least)


def _most(one: int | None, other: int | None) -> int | None:
    return max(one or 0, other or 0) if one is not None or other is not None else None


# --- the file -------------------------------------------------------------------------------------------------------


def _text(figures: Mapping[BookKey, Measured]) -> str:
    lines = [_said(key, measured) for key, measured in figures.items()]
    return json.dumps({"version": VERSION, "needs": lines}, indent=1) + "\n"


def _said(key: BookKey, measured: Measured) -> dict[str, Any]:
    said = {"file": key.file, "engine": key.engine, "arguments": key.arguments, "gpu": key.gpu}
    raised = [measured.raised.gpu_mib, measured.raised.host_mib]
    return {**said, "gpu_mib": measured.gpu_mib, "host_mib": measured.host_mib, "raised": raised} | {
        "raises": measured.raises
    }


def _read(path: Path, warn: Warn) -> dict[BookKey, Measured]:
    """What an earlier run wrote; nothing, with a warning, if that cannot be understood."""
    try:
        with path.open(encoding="utf-8") as file:
            return _parsed(file.read(FILE_BYTES_MAX))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        warn(f"remembered needs in {path} are ignored and will be measured anew", str(error) or repr(error))
        return {}


def _parsed(text: str) -> dict[BookKey, Measured]:
    said = json.loads(text)
    if said["version"] != VERSION:
        raise ValueError(f"it has version {said['version']}, this gateway reads {VERSION}")
    return dict([_figure(one) for one in said["needs"]][-FIGURES_MAX:])


def _figure(said: Mapping[str, Any]) -> tuple[BookKey, Measured]:
    key = BookKey(*(_word(said[name]) for name in ("file", "engine", "arguments", "gpu")))
    host_mib = None if said["host_mib"] is None else _number(said["host_mib"])
    gpu, host = said["raised"]
    return key, Measured(_number(said["gpu_mib"]), host_mib, Need(_number(gpu), _number(host)), _number(said["raises"]))


def _word(said: object) -> str:
    if not isinstance(said, str) or len(said) > TEXT_MAX:
        raise ValueError("an identity is not a short text")
    return said


def _number(said: object) -> int:
    if isinstance(said, bool) or not isinstance(said, int) or not 0 <= said <= MIB_MAX:
        raise ValueError(f"{said!r} is not a number of MiB")
    return said
