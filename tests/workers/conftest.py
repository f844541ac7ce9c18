from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """Short: the path of a Unix socket has about a hundred letters at most."""
    folder = Path(tempfile.mkdtemp(prefix="gr-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
