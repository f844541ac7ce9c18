"""Whether the packages of an engine are installed, as far as files tell. Starts nothing and imports nothing. `greenroom
engines` asks an interpreter itself, which takes longer and tells versions too."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from greenroom.base.plain_file import read_plain
from greenroom.config.schema import Model

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
