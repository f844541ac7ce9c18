"""The page about the way of a request names the files that a request really runs through."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from greenroom.server.admin.reports.snapshot import BUILD
from tests.integration.requests.request_way import PAGE, ROOT, listed, rewritten, ways
from tests.test_setup import load_setup

# Files on the way of a ready request that are not compiled, each with the reason.
NOT_COMPILED = {"engines/base.py": "engines of other packages extend it"}


def compiled() -> set[str]:
    with contextlib.chdir(ROOT):
        return {file.removeprefix("src/greenroom/") for file in load_setup().hot_files()}


@pytest.mark.skipif(BUILD == "compiled", reason="machine code has no frames to watch")
async def test_page_lists_the_files_of_a_cold_stream_and_of_a_lease(tmp_path: Path) -> None:
    seen = await ways(tmp_path)
    on_page = listed(PAGE.read_text())
    assert sorted(on_page) == ["cold", "lease"]
    advice = "run `python -m tests.integration.requests.request_way`, and see whether the page still tells the truth"
    for name, files in on_page.items():
        assert files == set(seen[name]), advice
    assert {file for file in seen["ready"] if file not in compiled()} == set(NOT_COMPILED)


def test_lists_are_replaced_and_nothing_else() -> None:
    page = "before\n<!-- files: cold -->\n1 file\n\n1. `a/b.py`\n<!-- end -->\nafter\n"
    again = rewritten(page, {"cold": ["c/d.py", "e.py"]})
    assert listed(again) == {"cold": {"c/d.py", "e.py"}}
    assert again.startswith("before\n<!-- files: cold -->\n2 files:\n")
    assert again.endswith("<!-- end -->\nafter\n")
