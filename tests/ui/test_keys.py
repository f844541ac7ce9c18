"""With keys on, the shell is open and the data are not; what a key may see decides what the page shows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.harness import GatewayProcess, fake, gateway_process
from tests.ui.rig.browser import Tab, tab

ADMIN, ASKER = "gr-" + "a" * 40, "gr-" + "b" * 40


def _entry(name: str, key: str, **more: object) -> dict[str, object]:
    return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **more}


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    keys = [_entry("ops", ADMIN, admin=True), _entry("app", ASKER, models=["alpha"])]
    models = {name: fake(name, abilities=["chat"]) for name in ("alpha", "secret")}
    with gateway_process(tmp_path_factory.mktemp("keys"), models, server={"api_keys": keys}) as started:
        yield started


@pytest.fixture
def opened(browser: Browser, gate: GatewayProcess) -> Iterator[Tab]:
    with tab(browser, gate.url) as opened:
        # The browser writes a line for each 401 and 403.
        opened.requests_may_fail = True
        yield opened


def _enter(page: Page, key: str, *, keep: bool = False) -> None:
    page.locator("input[type=password]").fill(key)
    page.get_by_label("Keep it until this tab is closed").set_checked(keep)
    page.get_by_role("button", name="Use this key").click()


def test_a_key_without_admin_sees_its_models_and_may_ask_them(opened: Tab) -> None:
    page = opened.open("stage")
    expect(page.get_by_role("heading", name="This gateway asks for a key")).to_be_visible()
    expect(page.get_by_text("alpha")).to_have_count(0)
    _enter(page, "gr-wrong")
    expect(page.get_by_role("heading", name="This gateway asks for a key")).to_be_visible()
    _enter(page, ASKER)
    expect(page.get_by_role("button", name="alpha")).to_be_visible()
    expect(page.get_by_text("secret")).to_have_count(0)
    opened.open("tasks")
    expect(page.get_by_text("This key may not see this page")).to_be_visible()
    opened.open("playground")
    page.get_by_role("textbox", name="Message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".markdown")).to_contain_text("alpha")


def test_a_reload_forgets_a_key_unless_it_is_kept(opened: Tab) -> None:
    page = opened.open("stage")
    _enter(page, ADMIN)
    expect(page.get_by_role("button", name="secret")).to_be_visible()
    assert page.context.cookies() == []
    page.reload()
    expect(page.get_by_role("heading", name="This gateway asks for a key")).to_be_visible()
    _enter(page, ADMIN, keep=True)
    expect(page.get_by_role("button", name="secret")).to_be_visible()
    page.reload()
    expect(page.get_by_role("button", name="secret")).to_be_visible()


def test_nothing_of_the_former_key_stays(opened: Tab) -> None:
    page = opened.open("playground?model=secret")
    _enter(page, ADMIN)
    page.get_by_role("textbox", name="Message").fill("For operators only")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".markdown")).to_contain_text("secret")
    opened.open("leases")
    page.get_by_label("Show models too").check()
    expect(page.get_by_role("row").filter(has_text="secret")).to_be_visible()
    page.get_by_role("button", name="Key", exact=True).click()
    _enter(page, ASKER)
    expect(page.get_by_role("alert")).to_contain_text("may not take leases")
    expect(page.get_by_text("secret")).to_have_count(0)
    opened.open("playground")
    expect(page.get_by_text("Say something")).to_be_visible()
    expect(page.get_by_text("For operators only")).to_have_count(0)


def test_a_limited_key_reads_the_models_seldom_and_after_its_orders(opened: Tab) -> None:
    opened.page.clock.install()
    page = opened.open("playground?model=alpha")
    _enter(page, ASKER)
    expect(page.get_by_text("Say something")).to_be_visible()
    with page.expect_response("**/api/v1/models"):
        page.clock.pause_at(datetime.now() + timedelta(hours=1))
    asked: list[str] = []
    page.on("request", lambda one: asked.append(one.url) if one.url.endswith("/api/v1/models") else None)
    page.clock.run_for(20_000)
    assert asked == []
    page.get_by_role("textbox", name="Message").fill("Hello")
    with page.expect_request("**/api/v1/models"):
        page.get_by_role("button", name="Send").click()
        page.clock.run_for(5_000)
