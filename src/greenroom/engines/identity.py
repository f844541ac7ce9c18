"""The identity of a process: the files, the program and the arguments that a measured figure belongs to. And whether
the packages of an engine are installed at all.

Owns three short texts, all of them hashes, so that no secret of an argument or environment leaks. Starts and imports
nothing: a program is identified by its file, which an upgrade replaces. A file that cannot be read counts as missing;
its own load will report it. `greenroom engines` asks an interpreter itself, which takes longer and tells versions too.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import shutil
import stat
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from greenroom.base.plain_file import open_plain, read_plain
from greenroom.config.diff import NEW_SLOT_KEYS
from greenroom.config.schema import Model

# Enough bytes to tell two headers of files with the same size and time apart.
HEAD_BYTES: Final = 64 * 1024
# Bounds on files of a folder and words of a command. The largest models have some hundred files.
FILES_MAX: Final = 2_000
WORDS_MAX: Final = 256
# Every model that uses a file asks for it, and again at every reload.
CACHE_MAX: Final = 1_024
# Keys that do not change the memory it takes.
_BESIDE: Final = frozenset(
    (
        *("path", "memory_mib", "host_memory_mib", "gpu_memory_budget_mib", "devices", "concurrency"),
        *("check_endpoint", "listener", "cmd_stop", "program", "python", "isolate", "device_map", "media_hosts"),
    )
)
_PROGRAM_ENDINGS: Final = (".py", ".pyz", ".sh", ".so", ".js", ".jar")
_EMBEDDED: Final = "xllamacpp"
_PACKAGES: Final = Path(sysconfig.get_path("platlib"))


def file_identity(paths: Iterable[Path]) -> str:
    """A hash of sizes, times and first bytes, independent of the path. Empty if no file exists."""
    seen = [part for path in paths for part in _looked_at(path)]
    return _hash(seen) if seen else ""


def program_identity(words: Sequence[str]) -> str:
    """A hash of the program and of the scripts and libraries among its words. An upgrade changes the files."""
    found = [shutil.which(word) or word for word in words[:1]]
    named = (word for word in words[1:WORDS_MAX] if _is_program(word))
    return _hash([_stamp(Path(word)) for word in (*found, *named) if os.path.isfile(word)])


def _is_program(word: str) -> bool:
    """False for other files among the words: logs change all the time and say nothing about memory."""
    return word.endswith(_PROGRAM_ENDINGS) or os.access(word, os.X_OK)


def embedded_identity(python: str | None) -> str:
    """The embedded llama.cpp of an interpreter."""
    return packages_identity(python, (_EMBEDDED,))


def packages_identity(python: str | None, names: Sequence[str]) -> str:
    """Packages of an interpreter, by the names of their dist-info folders, which contain the versions."""
    if python is None:
        homes = [_PACKAGES]
    else:
        homes = list(Path(shutil.which(python) or python).parent.parent.glob("lib/python*/site-packages"))
    found = (one.name for home in homes for name in names for one in home.glob(f"{name}-*.dist-info"))
    return _hash([*names, *sorted(found)])


def arguments_identity(model: Model) -> str:
    """The same for configurations whose process takes the same memory."""
    said = {key: getattr(model, key) for key in sorted(NEW_SLOT_KEYS - _BESIDE)}
    return _hash([json.dumps(said, sort_keys=True, default=str)])


def _looked_at(path: Path) -> list[str]:
    """Stamps of a file, or of the files in a folder."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return [_stamp(path), _head(str(path), path.stat().st_mtime_ns)]
        inside = sorted(one for one in path.iterdir() if one.is_file())[:FILES_MAX]
        return [f"{one.name} {_stamp(one)}" for one in inside]
    except (OSError, ValueError):
        return []


def _stamp(path: Path) -> str:
    try:
        seen = path.stat()
    except (OSError, ValueError):
        return ""
    return f"{seen.st_size} {seen.st_mtime_ns}"


@functools.lru_cache(maxsize=CACHE_MAX)
def _head(path: str, changed_ns: int) -> str:
    """A hash of the first bytes. Raises OSError or ValueError."""
    with open_plain(path) as file:
        return _hash([file.read(HEAD_BYTES).hex()])


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


# --- what is installed ----------------------------------------------------------------------------------------------

# What packages are imported as, where that is not their name.
_MODULES: Final = {"pillow": "PIL"}
# The files of an environment that are read have a few lines.
SMALL_BYTES_MAX: Final = 1024 * 1024
# Each line names a folder that is searched as well, or is code that Python runs at its start.
PTH_FILES: Final = "lib/python*/site-packages/*.pth"


def packages_missing(model: Model, packages: Sequence[str], extra: str) -> str | None:
    """What the model's Python lacks and what to type; None if nothing is known to be missing. Never raises. `extra` is
    the name of our own extra that brings them."""
    if model.python is None:
        lacks = [name for name in packages if importlib.util.find_spec(_MODULES.get(name, name)) is None]
        return _said(lacks, sys.executable, f"'greenroom[{extra}]'") if lacks else None
    found = shutil.which(model.python, path=model.env.get("PATH"))
    if found is None:
        return f"there is no Python {model.python}; correct `python`"
    home = Path(found).parent.parent
    if "PYTHONPATH" in model.env or not _is_closed(home):
        # Packages may lie elsewhere: only a start can tell.
        return None
    there = {one.name.partition("-")[0].lower() for one in home.glob("lib/python*/site-packages/*.dist-info")}
    lacks = [name for name in packages if name not in there]
    return _said(lacks, model.python, " ".join(lacks)) if lacks else None


def _is_closed(home: Path) -> bool:
    """True for a virtual environment that does not look beyond its own folder."""
    try:
        text = read_plain(home / "pyvenv.cfg", SMALL_BYTES_MAX).decode(errors="replace")
    except (OSError, ValueError):
        return False
    says_so = any(line.replace(" ", "").lower() == "include-system-site-packages=false" for line in text.splitlines())
    return says_so and os.path.isdir(home / "lib") and not any(map(_adds_folders, home.glob(PTH_FILES)))


def _adds_folders(path: Path) -> bool:
    """True for a .pth file that names further folders with packages, or that could."""
    try:
        lines = read_plain(path, SMALL_BYTES_MAX).decode(errors="replace").splitlines()
    except (OSError, ValueError):
        return True
    return any(line.strip() and not line.startswith(("#", "import ", "import\t")) for line in lines)


def _said(lacks: Sequence[str], python: str, install: str) -> str:
    are = "is" if len(lacks) == 1 else "are"
    return f"{', '.join(lacks)} {are} not installed in {python}; type: {python} -m pip install {install}"
