"""One Chromium for these tests, and one gateway with the whole scene for those that only look.

Neither outlives this folder's tests: while Playwright runs, no other test of the process can have a loop.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.ui.rig.browser import Tab, chromium, tab
from tests.ui.rig.scene import Scene, scene


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="package")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("scene")) as played:
        yield played


@pytest.fixture
def looking(browser: Browser, stage: Scene) -> Iterator[Tab]:
    """A tab on the whole scene."""
    with tab(browser, stage.url) as opened:
        yield opened
