"""Every page with the scene's data: shown, accessible, and never taken for anything but text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Browser, Route, expect

from tests.ui.rig.browser import Tab, tab
from tests.ui.rig.hostile import PAYLOADS
from tests.ui.rig.pages import PAGES, ready
from tests.ui.rig.scene import TALKER, Scene

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


@pytest.mark.parametrize("width", [400, 1280])
def test_no_name_is_too_long_for_a_page(browser: Browser, stage: Scene, width: int) -> None:
    with tab(browser, stage.url, viewport={"width": width, "height": 900}) as opened:
        for shown in PAGES:
            page = opened.open(shown)
            ready(page, shown)
            is_wider = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
            assert not is_wider, (shown, width)


@pytest.mark.slow
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


def test_a_download_is_ordered_and_cancelled(looking: Tab, stage: Scene) -> None:
    stage.hub.repos["org/another"] = {"config.json": b"{}", "model.safetensors": bytes(100_000)}
    page = looking.open("tasks")
    page.get_by_label("Model on the hub").fill("org/another")
    page.get_by_role("button", name="Pull").click()
    row = page.get_by_role("listitem").filter(has_text="org/another")
    page.get_by_role("button", name="Cancel the download of org/another").click()
    expect(row.get_by_text("cancelled", exact=True)).to_be_visible()


def test_a_model_on_disk_is_deleted_when_that_is_confirmed(looking: Tab, stage: Scene) -> None:
    page = looking.open("tasks")
    page.get_by_role("button", name="Delete org/finished").click()
    dialog = page.get_by_role("dialog", name="Delete org/finished?")
    dialog.get_by_role("button", name="Keep it").click()
    expect(dialog).to_have_count(0)
    page.get_by_role("button", name="Delete org/finished").click()
    dialog.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("button", name="Delete org/finished")).to_have_count(0)
    assert "org/finished" not in [one["id"] for one in stage.get("/v1/models/inventory")["data"]]


def test_an_earlier_version_serves_again(looking: Tab) -> None:
    page = looking.open("versions")
    page.get_by_role("button", name="Go back to version 1").click()
    expect(page.get_by_text("version 3 serves", exact=True)).to_be_visible()


def test_a_changed_file_is_told_and_reloaded(looking: Tab, stage: Scene) -> None:
    file = stage.folder / "greenroom.yaml"
    whole = yaml.safe_load(file.read_text())
    file.write_text("models: 3\n")
    page = looking.open("config")
    expect(page.get_by_text("cannot be used", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Reload")).to_be_disabled()
    whole["models"]["nomic-embed"]["description"] = "Texts to vectors."
    file.write_text(yaml.safe_dump(whole))
    page.reload()
    expect(page.get_by_text("The file has changed since it was read")).to_be_visible()
    page.get_by_role("button", name="Reload").click()
    expect(page.get_by_text("The gateway runs what the file says.")).to_be_visible()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible(browser: Browser, stage: Scene, scheme: str) -> None:
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


def test_a_model_is_pinned_and_let_go(looking: Tab) -> None:
    page = looking.open("stage?model=kokoro")
    drawer = page.get_by_role("dialog", name="kokoro")
    pin = drawer.get_by_role("button", name="Pin", exact=True)
    pin.click()
    expect(drawer.get_by_text("pinned", exact=True)).to_be_visible()
    drawer.get_by_role("button", name="Unpin").click()
    expect(pin).to_be_visible()
    expect(drawer.get_by_text("pinned", exact=True)).to_be_hidden()
