"""What a newcomer does first in the dashboard; and that a tab of the rig notices what no page may do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

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


WRONG = {
    "console: broken": "<script>console.error('broken')</script>",
    "not caught": "<script>null.x</script>",
    "a dialog": "<script>alert(1)</script>",
    "asked another host": "<img src=http://evil.invalid/x>",
    "a hostile string ran": "<script>pwned(1)</script>",
}


class _Site(BaseHTTPRequestHandler):
    """`/wrong` does everything that is wrong, any other page nothing."""

    def do_GET(self) -> None:
        wrong = "".join(WRONG.values()) if self.path == "/wrong" else ""
        data = f"<!doctype html><title>x</title><h1>here</h1>{wrong}".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Site) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_tab_notices_everything_that_is_wrong(browser: Browser, site: str) -> None:
    with pytest.raises(AssertionError) as noticed, tab(browser, site) as opened:
        opened.page.goto(f"{site}/wrong", wait_until="load")
    assert [what for what in WRONG if what not in str(noticed.value)] == []


def test_a_plain_page_is_fine(browser: Browser, site: str) -> None:
    with tab(browser, site) as opened:
        opened.page.goto(f"{site}/plain")
        assert opened.page.inner_text("h1") == "here"
