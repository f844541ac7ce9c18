"""What `make ui` built, and what it was built from."""

from __future__ import annotations

import gzip
import re
import subprocess
from pathlib import Path

import pytest

from greenroom.api.ui.files import ASSETS

ROOT = Path(__file__).parents[2]
# What everything together may weigh on the way to the browser.
PACKED_MAX_BYTES = 150_000


def test_it_is_small() -> None:
    packed = {file.name: len(gzip.compress(file.read_bytes(), 9)) for file in ASSETS.iterdir()}
    assert sum(packed.values()) <= PACKED_MAX_BYTES, packed


def test_text_never_becomes_markup_or_code() -> None:
    """Pages make nodes of text only. What parses text as HTML or as a program appears in no source."""
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|\beval\(|new Function|javascript:"
    )
    sources = [path for path in (ROOT / "ui" / "src").rglob("*.ts*") if path.is_file()]
    assert len(sources) > 10
    found = [
        f"{path.name}: {line}" for path in sources for line in path.read_text().splitlines() if forbidden.search(line)
    ]
    assert not found


def test_the_lock_file_names_no_host() -> None:
    assert '"resolved"' not in (ROOT / "ui" / "package-lock.json").read_text()


@pytest.mark.slow
def test_it_is_what_its_sources_build() -> None:
    done = subprocess.run(["make", "ui-check"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
