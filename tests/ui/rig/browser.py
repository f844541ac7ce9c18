"""A headless Chromium, and tabs that notice what no page may do.

Owns what counts as wrong in every test: an error on the console (a violation of the content security policy is one),
an uncaught exception, a dialog, a request to another host, a hostile string that was run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Page, Request, expect, sync_playwright

# Generous: the machine may be busy. Nothing waits this long when all is well.
PATIENCE_MS = 60_000
NAMES = ("chromium", "chromium-browser", "google-chrome")
# The browser itself writes this line for every answer of 400 and above, and for every connection that fails.
FAILED_REQUEST = "Failed to load resource"

expect.set_options(timeout=PATIENCE_MS)


def program() -> str:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found is not None, "these tests need a Chromium: apt-get install chromium"
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    # Chromium's sandbox does not work for root, and /dev/shm is small in containers.
    args = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), args=args, timeout=PATIENCE_MS)
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page in a context of its own, with everything that went wrong in it."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.problems: list[str] = []
        # Set by a test in which requests fail on purpose.
        self.requests_may_fail = False
        context.set_default_timeout(PATIENCE_MS)
        self.page: Page = context.new_page()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"not caught: {error}"))
        self.page.on("dialog", self._on_dialog)
        self.page.on("request", self._on_request)
        self.page.expose_function("pwned", lambda *which: self.problems.append(f"a hostile string ran: {which}"))

    def open(self, route: str) -> Page:
        """Show a page of the dashboard, such as `stage`."""
        self.page.goto(f"{self.url}/ui/#/{route}")
        return self.page

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not (self.requests_may_fail and FAILED_REQUEST in message.text):
            self.problems.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _on_dialog(self, dialog: Dialog) -> None:
        self.problems.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def _on_request(self, request: Request) -> None:
        to = urlsplit(request.url)
        if to.scheme not in ("data", "blob", "about") and to.netloc != urlsplit(self.url).netloc:
            self.problems.append(f"asked another host: {request.url}")


@contextmanager
def tab(browser: Browser, url: str, **options: object) -> Iterator[Tab]:
    """A tab for this gateway; fails at its end if anything was wrong in it. `options` are those of a context."""
    context = browser.new_context(reduced_motion="reduce", **options)  # type: ignore[arg-type]
    try:
        opened = Tab(context, url)
        yield opened
        # What has been sent must have arrived here: a round trip through the page.
        opened.page.evaluate("1")
        assert not opened.problems, "\n".join(opened.problems)
    finally:
        context.close()
