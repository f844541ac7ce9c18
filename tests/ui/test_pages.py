"""Every page with the scene's data: shown, readable by everybody, and never taken for anything but text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.ui.browser import Tab, tab
from tests.ui.hostile import PAYLOADS
from tests.ui.pages import PAGES, ready
from tests.ui.scene import TALKER, Scene

AXE = Path(__file__).resolve().parents[2] / "ui" / "node_modules" / "axe-core" / "axe.min.js"
SERIOUS = ("serious", "critical")


def test_every_page_shows_the_scene(looking: Tab) -> None:
    for page in PAGES:
        ready(looking.open(page), page)


def test_words_of_attackers_are_text(looking: Tab) -> None:
    """Ids, names, tenants, programs and log lines that are attacks. The tab fails if one is run."""
    page = looking.open("stage")
    ready(page, "stage")
    expect(page.get_by_role("button", name=PAYLOADS[3]).first).to_be_attached()
    page.get_by_role("region", name="On stage").get_by_role("button", name=TALKER).click()
    log = page.get_by_role("dialog", name=TALKER).get_by_label("Log", exact=True)
    expect(log).to_contain_text("constructor.constructor")
    for shown in PAGES:
        ready(looking.open(shown), shown)
        assert page.locator("script, iframe, object, embed, base").count() == 1, "its own script alone"


def test_answers_of_attackers_are_text(looking: Tab) -> None:
    """Each attack as the question and, as markdown, as the answer."""
    page = looking.open("playground")
    page.route("**/v1/chat/completions", _repeat)
    for text in PAYLOADS:
        page.get_by_role("textbox", name="Message").fill(text)
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".markdown")).to_have_count(len(PAYLOADS))
    for link in page.locator(".turns a").all():
        assert (link.get_attribute("href") or "").startswith("http")
    assert (
        page.locator(".turns :is(script, img, iframe, svg, style, link, form, object, embed, base, meta)").count() == 0
    )


def _repeat(route: Route) -> None:
    """Answer with the question, as an engine would."""
    question = route.request.post_data_json["messages"][-1]["content"]
    chunk = {"choices": [{"index": 0, "delta": {"content": question}}]}
    route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_no_page_shuts_anybody_out(browser: Browser, stage: Scene, scheme: str) -> None:
    """axe finds nothing serious on any page."""
    with tab(browser, stage.url, color_scheme=scheme) as opened:
        opened.page.add_init_script(path=AXE)
        found = {page: _serious(opened, page) for page in PAGES}
    assert {page: what for page, what in found.items() if what} == {}


def _serious(opened: Tab, page: str) -> list[str]:
    ready(opened.open(page), page)
    result: dict[str, Any] = opened.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {one['help']} ({one['nodes'][0]['html'][:200]})"
        for one in result["violations"]
        if one["impact"] in SERIOUS
    ]
