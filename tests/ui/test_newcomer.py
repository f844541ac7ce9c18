"""What a newcomer does first: open the address, chat with smollm2, compare two texts with minilm, see the swap."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.docs.test_served import demo
from tests.harness import fake, gateway_process
from tests.ui.rig.browser import Tab, tab


def test_the_first_minutes_with_scripted_models(browser: Browser, tmp_path: Path) -> None:
    """The demo's two models and its budget, by stand-ins."""
    models = {
        "smollm2": fake("smollm2", "--tokens", "8", memory_mib=300, abilities=["chat", "completions"], preload=True),
        "minilm": fake("minilm", memory_mib=160, abilities=["embeddings"]),
    }
    with gateway_process(tmp_path, models, budget_mib=300) as gate, tab(browser, gate.url) as opened:
        _first_minutes(opened)


@pytest.mark.slow
def test_the_first_minutes_with_the_demo(browser: Browser, tmp_path: Path) -> None:
    with demo(tmp_path / "log") as address, tab(browser, address) as opened:
        _first_minutes(opened)


def _first_minutes(opened: Tab) -> None:
    page = opened.page
    page.goto(opened.url)
    expect(page).to_have_url(re.compile("/ui/"))
    stage = page.get_by_role("region", name="On stage")
    expect(stage.get_by_role("button", name="smollm2")).to_contain_text("ready")

    page.get_by_role("link", name="Playground").click()
    expect(page.get_by_label("Model 1")).to_have_value("smollm2")
    page.get_by_text("Settings").click()
    page.get_by_label("Tokens at most").fill("8")
    page.get_by_role("textbox", name="Message").fill("Say hello.")
    page.get_by_role("textbox", name="Message").press("Enter")
    expect(page.get_by_text("tokens/s")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert page.locator(".markdown").inner_text().strip(), "it has answered"

    page.get_by_role("link", name="Embeddings").click()
    expect(page.get_by_role("combobox", name="Model")).to_have_value("minilm")
    page.get_by_role("button", name="Compare").click()
    grid = page.get_by_role("region", name="Similarity")
    expect(grid.get_by_role("cell", name="1.00")).to_have_count(3)

    page.get_by_role("link", name="Stage").click()
    expect(stage.get_by_role("button", name="minilm")).to_contain_text("ready")
    expect(page.get_by_role("region", name="At home").get_by_role("button", name="smollm2")).to_be_visible()
