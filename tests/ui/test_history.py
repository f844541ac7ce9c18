"""Timeline, Metrics, Tenants and limits: the last hour, and how much each tenant uses."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.ui.rig.browser import Tab


def _shown(looking: Tab, route: str, title: str) -> Page:
    page = looking.open(route)
    expect(page.get_by_role("heading", level=1, name=title)).to_be_visible()
    return page


def test_timeline_shows_where_models_were_and_why(looking: Tab) -> None:
    page = _shown(looking, "timeline", "Timeline")
    first = page.get_by_role("region", name="gpu0")
    expect(first.get_by_role("link", name="qwen3-14b", exact=True)).to_be_visible()
    load = first.get_by_role("button", name=re.compile("^qwen3-14b: load from"))
    load.first.focus()
    expect(page.get_by_role("status").filter(has_text="qwen3-14b: load")).to_contain_text("Why: it was asked for")
    # A model that fell asleep is shown on the host.
    host = page.get_by_role("region", name="Host memory")
    expect(host.get_by_role("button", name=re.compile("^gemma-3-4b: asleep from"))).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("waited at once"))).to_be_visible()


def test_timeline_goes_back_as_far_as_is_asked_for(looking: Tab) -> None:
    page = _shown(looking, "timeline", "Timeline")
    expect(page.get_by_role("button", name="15 min")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="1 hour").click()
    expect(page.get_by_role("button", name="1 hour")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("region", name="gpu0")).to_be_visible()


def test_metrics_draw_a_dozen_plots(looking: Tab) -> None:
    page = _shown(looking, "metrics", "Metrics")
    expect(page.locator(".graph canvas")).to_have_count(15)
    # The scene has requests that wait and one that is answered.
    expect(page.get_by_role("img", name="Waiting: 4", exact=True)).to_be_visible()
    expect(page.get_by_role("region", name="Memory")).to_contain_text("gpu1")


def test_tenants_and_what_is_left_for_them(looking: Tab) -> None:
    page = _shown(looking, "tenants", "Tenants and limits")
    research = page.get_by_role("article", name="tenant research")
    expect(research.get_by_role("progressbar", name=re.compile("of 600 requests this minute"))).to_be_attached()
    expect(page.get_by_role("article", name="tenant website")).to_contain_text("at once")
    usage = page.get_by_role("table", name="Usage")
    expect(usage.get_by_role("row").filter(has=page.get_by_role("cell", name="website", exact=True))).to_be_visible()
    page.get_by_label("Usage by").select_option("model")
    expect(usage.get_by_role("cell", name="phi-4-mini")).to_be_visible()
    clients = page.get_by_role("table", name="Clients")
    expect(clients.get_by_role("cell", name="research").first).to_be_visible()


@pytest.mark.slow
def test_simulate_compares_hardware(looking: Tab) -> None:
    page = _shown(looking, "simulate", "Simulate")
    # Two GPUs now, and three beside them; requests were recorded.
    expect(page.get_by_label("Number of GPUs")).to_have_value("2, 3")
    expect(page.get_by_text("that this gateway remembers")).to_be_visible()
    page.get_by_role("button", name="Play").click()
    line = page.get_by_role("status", name="Bottom line")
    expect(line).to_contain_text("As it is (default, 2 GPUs)")
    swaps = page.get_by_role("region", name="Swaps")
    expect(swaps.get_by_text("default, 3 GPUs")).to_be_visible()
    # What is no number is told before anything is asked.
    page.get_by_label("Green room, MiB").fill("much")
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("alert")).to_have_text("Green room: much is not a number.")
