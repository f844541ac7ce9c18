from __future__ import annotations

from playwright.sync_api import expect

from tests.ui.rig.browser import Tab


def test_a_model_is_pinned_and_let_go(looking: Tab) -> None:
    page = looking.open("stage?model=kokoro")
    drawer = page.get_by_role("dialog", name="kokoro")
    pin = drawer.get_by_role("button", name="Pin", exact=True)
    pin.click()
    expect(drawer.get_by_text("pinned", exact=True)).to_be_visible()
    drawer.get_by_role("button", name="Unpin").click()
    expect(pin).to_be_visible()
    expect(drawer.get_by_text("pinned", exact=True)).to_be_hidden()
