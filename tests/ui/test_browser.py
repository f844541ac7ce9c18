"""The rig itself: a tab notices whatever no page of the dashboard may do."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from playwright.sync_api import Browser

from tests.ui.rig.browser import tab

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
