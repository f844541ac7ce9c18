"""Pictures of every page of the dashboard, from the scripted scene: at two widths, light and dark.

python -m tests.ui.screenshots FOLDER [PAGE …]    # all of them, or these pages
python -m tests.ui.screenshots                    # the few that README and documentation show
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.ui.rig.browser import chromium, tab
from tests.ui.rig.pages import PAGES, ready
from tests.ui.rig.scene import Scene, scene

DOCS = Path(__file__).resolve().parents[2] / "docs" / "pictures"
SIZES: dict[str, ViewportSize] = {"1440": {"width": 1440, "height": 900}, "390": {"width": 390, "height": 844}}
SCHEMES = ("light", "dark")
# What the documentation shows: page, width, scheme.
SHOWN = (("stage", "1440", "dark"), ("stage", "390", "light"), ("playground", "1440", "light"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures of the dashboard.")
    parser.add_argument(
        "folder", nargs="?", type=Path, help="where to; without it docs/pictures, and only what is shown"
    )
    parser.add_argument("pages", nargs="*", default=list(PAGES), help="such as stage; all when not given")
    said = parser.parse_args()
    folder = said.folder or DOCS
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, scene(Path(work), hostile=False) as played, chromium() as browser:
        for what in SHOWN if said.folder is None else _all(said.pages):
            _take(browser, played, folder / f"{'-'.join(what)}.png", what)


def _all(pages: list[str]) -> Iterator[tuple[str, str, str]]:
    return ((page, width, scheme) for page in pages for width in SIZES for scheme in SCHEMES)


def _take(browser: Browser, played: Scene, file: Path, what: tuple[str, str, str]) -> None:
    page, width, scheme = what
    with tab(browser, played.url, viewport=SIZES[width], color_scheme=scheme) as opened:
        shown = opened.open(page)
        ready(shown, page)
        _act(shown, page)
        shown.screenshot(path=file)


def _act(shown: Page, page: str) -> None:
    """Bring the page to what it is there for."""
    if page == "playground":
        shown.get_by_label("Model 1").select_option("phi-4-mini")
        if _is_wide(shown):
            shown.get_by_role("button", name="Compare with another model").click()
            shown.get_by_label("Model 2").select_option("tiny-chat")
        shown.get_by_role("textbox", name="Message").fill("What is a green room?")
        shown.get_by_role("button", name="Send").click()
        expect(shown.get_by_text("in all")).to_have_count(2 if _is_wide(shown) else 1)


def _is_wide(shown: Page) -> bool:
    return shown.viewport_size is not None and shown.viewport_size["width"] > 1000


if __name__ == "__main__":
    main()
