"""Small files that are replaced as a whole: a reader finds the old text or the new one, never half of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Whole or not at all, also if the machine stops meanwhile. Blocks; raises OSError, and then nothing is changed."""
    draft = path.with_suffix(".new")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
