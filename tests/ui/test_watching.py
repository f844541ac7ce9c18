"""Queue, requests, decisions, leases and history in a browser: what they show, and how they stay fast."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.harness import GatewayProcess, fake, write_config
from tests.ui.rig.browser import Tab, tab
from tests.ui.rig.scene import CHAT, call
from tests.waiting import until_now

BUSY, OTHER = "busy", "other"
MANY = 10_000


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """Room for one model: `busy` has it and answers without end, so that requests for `other` wait."""
    folder = tmp_path_factory.mktemp("watching")
    models = {BUSY: fake(BUSY, "--tokens", "100000", "--token-s", "0.2", concurrency=2), OTHER: fake(OTHER)}
    gate = GatewayProcess(folder, write_config(folder, models, budget_mib=150))
    with ThreadPoolExecutor() as callers:
        callers.submit(_ask, gate, BUSY)
        until_now(lambda: _model(gate, BUSY)["in_flight"] == 1, "an answer streams")
        try:
            yield gate
        finally:
            gate.kill()


def _ask(gate: GatewayProcess, model: str, tenant: str = "research") -> None:
    asked = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    # The gateway is killed, or the request cancelled, under this caller.
    with suppress(OSError):
        call(gate.url, "POST", CHAT, asked, {"X-Tenant-ID": tenant})


def _model(gate: GatewayProcess, name: str) -> Any:
    return call(gate.url, "GET", f"/api/v1/models/{name}")


@pytest.fixture
def opened(browser: Browser, gate: GatewayProcess) -> Iterator[Tab]:
    with tab(browser, gate.url) as one:
        yield one


def test_a_request_that_waits_is_explained_and_can_be_cancelled(opened: Tab, gate: GatewayProcess) -> None:
    page = opened.open("queue")
    expect(page.get_by_text("Nothing waits")).to_be_visible()
    with ThreadPoolExecutor() as callers:
        waiting = callers.submit(_ask, gate, OTHER, "website")
        row = page.get_by_role("row").filter(has_text="website")
        expect(row).to_contain_text(OTHER)
        expect(page.get_by_text("the models that would have to leave for it may not do so yet")).to_be_visible()
        expect(page.get_by_role("link", name=re.compile("Queue"))).to_contain_text("1")
        row.get_by_role("button", name="Cancel").click()
        expect(page.get_by_text("Nothing waits")).to_be_visible()
        waiting.result()


def test_requests_tell_their_times_and_what_went_wrong(opened: Tab, gate: GatewayProcess) -> None:
    _ask(gate, "unheard-of")
    with ThreadPoolExecutor() as callers:
        cancelled = callers.submit(_ask, gate, OTHER, "nightly")
        page = opened.open("requests")
        row = page.get_by_role("row").filter(has_text="nightly")
        expect(row).to_contain_text("waiting")
        row.click()
        drawer = page.get_by_role("dialog")
        drawer.get_by_role("button", name="Cancel this request").click()
        expect(drawer.get_by_text("An operator cancelled this request.")).to_be_visible()
        cancelled.result()
    drawer.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Running").click()
    expect(page.get_by_role("row").filter(has_text="research")).to_contain_text("answering")
    expect(row).to_have_count(0)
    page.get_by_role("button", name="Failed").click()
    expect(row).to_contain_text("cancelled")


def test_decisions_have_reasons_and_explain_tells_what_would_happen(opened: Tab) -> None:
    page = opened.open(f"decisions?model={BUSY}")
    expect(page.get_by_role("row").filter(has_text="loaded: it was asked for")).to_have_count(1)
    expect(page.get_by_text(f"{BUSY} is ready: the request would be served at once.")).to_be_visible()
    page.get_by_label("Model or task").fill(OTHER)
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_text(f"{OTHER} would have to wait")).to_be_visible()
    page.get_by_label("Model or task").fill("unheard-of")
    opened.requests_may_fail = True
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_role("alert")).to_contain_text("unheard-of")


def test_an_explanation_names_the_gpu_and_says_of_a_caller_that_may_not_wait_that_it_does_not(opened: Tab) -> None:
    lists = {name: list[str]() for name in ("candidates", "behind", "beside", "evict", "calls_off")}
    nulls = dict.fromkeys(("task", "slot", "why", "detail", "eta_s", "retry_after_s"))
    devices = [{"id": "GPU-a", "name": "gpu3", "mib": 100}, {"id": "host", "name": "host", "mib": 1}]
    told = {"action": "swap", "model": OTHER, "move": "load", "devices": devices, "position": 1, "too_late": True}
    body = json.dumps({**lists, **nulls, **told, "wait_max_s": 0})
    opened.page.route("**/api/v1/explain", lambda route: route.fulfill(content_type="application/json", body=body))
    page = opened.open(f"decisions?model={OTHER}")
    expect(page.get_by_text(f"{OTHER} would be loaded on gpu3.")).to_be_visible()
    expect(page.get_by_text("This caller would be refused at once: it may not wait")).to_be_visible()
    expect(page.get_by_text("The model would be brought all the same.")).to_be_visible()
    expect(page.get_by_text("it would be refused")).to_have_count(0)


def test_a_model_that_left_after_its_answers_says_for_which_one(opened: Tab) -> None:
    left = {
        "seq": 1,
        "at": 1.0,
        "what": "unload",
        "model": BUSY,
        "why": "leaving",
        "cause": "evicted",
        "for_model": OTHER,
    }
    opened.page.route(
        "**/api/v1/decisions?*",
        lambda route: route.fulfill(content_type="application/json", body=json.dumps({"decisions": [left]})),
    )
    page = opened.open("decisions")
    expect(page.get_by_role("row").filter(has_text=f"unloaded: it made room for {OTHER}; it left once")).to_have_count(
        1
    )


def test_every_reason_of_a_departure_has_words() -> None:
    sources = Path(__file__).parents[2]
    known = re.findall(r'case "(\w+)":', (sources / "ui/src/reasons.ts").read_text())
    told = (sources / "docs/operating.md").read_text().partition("| `why` |")[2].partition("\n\n")[0]
    words = {word for row in told.splitlines() for word in re.findall(r"`(\w+)`", row.partition(" | ")[0])}
    assert {"evicted", "leaving", "held"} <= words <= set(known)


def test_a_lease_can_be_released(opened: Tab, gate: GatewayProcess) -> None:
    page = opened.open("leases")
    expect(page.get_by_text("No program holds a lease")).to_be_visible()
    call(gate.url, "POST", "/api/v1/leases", {"mib": 20, "name": "training", "ttl_s": 600, "pid": os.getpid()})
    expect(page.get_by_role("row").filter(has_text="training")).to_contain_text("held")
    page.get_by_role("button", name="Release training").click()
    page.get_by_role("dialog").get_by_role("button", name="Release").click()
    expect(page.get_by_text("No program holds a lease")).to_be_visible()


def test_ten_thousand_that_wait_are_asked_for_as_they_are_scrolled_to(opened: Tab) -> None:
    asked: list[int] = []

    def answer(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        first, limit = int(query["offset"][0]), int(query["limit"][0])
        asked.append(first)
        rows = [_queued(place) for place in range(first + 1, min(first + limit, MANY) + 1)]
        route.fulfill(content_type="application/json", body=json.dumps({"depth": MANY, "max": MANY, "requests": rows}))

    opened.page.route("**/api/v1/queue?*", answer)
    page = opened.open("queue")
    expect(page.get_by_text("tenant-1", exact=True)).to_be_visible()
    assert page.get_by_role("row").count() < 100
    page.get_by_role("table").evaluate("table => table.scrollTo(0, table.scrollHeight)")
    expect(page.get_by_text(f"tenant-{MANY}", exact=True)).to_be_visible()
    assert page.get_by_role("row").count() < 100
    assert max(asked) > MANY - 300


def _queued(place: int) -> dict[str, Any]:
    named = {"id": f"r-{place}", "position": place, "model": OTHER, "asked_as": OTHER, "tenant": f"tenant-{place}"}
    times = {"priority": 1, "waited_s": 1.0, "eta_s": None, "plan": None, "why": None, "behind": []}
    return {**named, "client": None, "route": "chat", **times}


@pytest.mark.slow
def test_hundreds_of_models_are_found_by_name(browser: Browser, tmp_path: Path) -> None:
    models = {f"model-{number:04}": fake("one") for number in range(400)}
    gate = GatewayProcess(tmp_path, write_config(tmp_path, models))
    try:
        with tab(browser, gate.url) as opened:
            page = opened.open("stage")
            home = page.get_by_role("region", name="At home")
            expect(home.get_by_text("400 models")).to_be_visible()
            assert home.get_by_role("listitem").count() < 300
            page.get_by_label("Find a model").fill("0377")
            home.get_by_role("button", name="model-0377").click()
            expect(page.get_by_role("dialog").get_by_role("heading", name="model-0377")).to_be_visible()
    finally:
        gate.kill()


def test_the_theme_is_the_users_choice(opened: Tab) -> None:
    page = opened.open("stage")
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)
    # The browser of these tests likes light pages; system, light, dark.
    for _ in range(2):
        page.get_by_role("button", name=re.compile("Theme")).click()
    page.wait_for_function(f"{ground} !== '{before}'")
    page.reload()
    page.wait_for_function(f"{ground} !== '{before}'")


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
