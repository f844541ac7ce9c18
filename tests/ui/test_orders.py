"""What a click changes, and what the page says when an engine dies or the gateway goes away."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.harness import GatewayProcess, fake, gateway_process, write_config
from tests.integration.hosted_rig import Folder
from tests.ports import free_port
from tests.ui.rig.browser import Tab, tab
from tests.ui.rig.scene import call
from tests.waiting import until_now


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[GatewayProcess]:
    models = {
        "alpha": fake("alpha", "--talkative", abilities=["chat"]),
        "bravo": Folder(tmp_path, "bravo").model(abilities=["chat"]),
        "media": fake("media", abilities=["images", "speech", "transcription"]),
    }
    with gateway_process(tmp_path, models) as started:
        yield started


@pytest.fixture
def opened(browser: Browser, gate: GatewayProcess) -> Iterator[Tab]:
    with tab(browser, gate.url) as opened:
        yield opened


def test_load_sleep_and_unload_by_click(opened: Tab) -> None:
    page = opened.open("stage")
    page.get_by_role("button", name="bravo").click()
    drawer = page.get_by_role("dialog", name="bravo")
    drawer.get_by_role("button", name="Load", exact=True).click()
    expect(drawer.locator(".drawer-state")).to_contain_text("ready")
    drawer.get_by_role("button", name="Sleep", exact=True).click()
    expect(drawer.locator(".drawer-state")).to_contain_text("asleep")
    page.keyboard.press("Escape")
    room = page.get_by_role("region", name="In the green room")
    room.get_by_role("button", name="bravo").click()
    drawer.get_by_role("button", name="Unload", exact=True).click()
    expect(drawer.get_by_role("button", name="Load", exact=True)).to_be_enabled()
    page.keyboard.press("Escape")
    expect(page.get_by_role("region", name="At home").get_by_role("button", name="bravo")).to_be_visible()


def test_a_killed_engine_is_told(opened: Tab, gate: GatewayProcess) -> None:
    call(gate.url, "POST", "/api/v1/models/alpha/load", {})
    page = opened.open("stage")
    page.get_by_role("region", name="On stage").get_by_role("button", name="alpha").click()
    drawer = page.get_by_role("dialog", name="alpha")
    expect(drawer.get_by_label("Log").get_by_text("started as")).to_be_visible()
    pid = call(gate.url, "GET", "/api/v1/models/alpha")["pid"]
    os.kill(pid, signal.SIGKILL)
    expect(drawer.get_by_role("alert")).to_contain_text("alpha")
    expect(drawer.get_by_role("button", name="Load", exact=True)).to_be_visible()


@pytest.mark.slow
def test_a_restarted_gateway_is_found_again(browser: Browser, tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, {"alpha": fake("alpha")}, server={"port": port})
    first = GatewayProcess(tmp_path, config)
    try:
        with tab(browser, first.url) as opened:
            opened.requests_may_fail = True
            page = opened.open("stage")
            link = page.locator(".nav-foot .link")
            expect(link).to_have_text("Live")
            first.kill()
            expect(link).to_have_text("Reconnecting")
            expect(page.get_by_text("The figures are old.")).to_be_visible()
            second = GatewayProcess(tmp_path, config)
            try:
                expect(link).to_have_text("Live")
                call(second.url, "POST", "/api/v1/models/alpha/load", {})
                stage = page.get_by_role("region", name="On stage")
                expect(stage.get_by_role("button", name="alpha")).to_contain_text("ready")
            finally:
                second.kill()
    finally:
        first.kill()
        assert first.nothing_left()


def test_stop_ends_the_answer(opened: Tab, gate: GatewayProcess) -> None:
    """Stop in the playground ends the request at the engine."""
    page = opened.open("playground?model=alpha")
    page.route(
        "**/v1/chat/completions", lambda route: route.continue_(post_data=_endless(route.request.post_data_json))
    )
    page.get_by_role("textbox", name="Message").fill("Write a book.")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".markdown")).to_contain_text("alpha 1")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    until_now(lambda: _running(gate) == 0, "the request has ended")


def test_pictures_speech_and_transcription(opened: Tab, tmp_path: Path) -> None:
    page = opened.open("playground?kind=images")
    page.get_by_label("What the picture shows").fill("A stage.")
    page.get_by_role("button", name="Draw").click()
    expect(page.get_by_role("img", name="Picture 1: A stage.")).to_be_attached()
    page.get_by_role("link", name="Speech").click()
    page.get_by_role("button", name="Speak").click()
    expect(page.get_by_label("What the model said")).to_be_visible()
    page.get_by_role("link", name="Transcription").click()
    sound = tmp_path / "sound.wav"
    sound.write_bytes(b"RIFF")
    page.get_by_label("Sound file").set_input_files(sound)
    page.get_by_role("button", name="Write it down").click()
    expect(page.get_by_text("media heard")).to_be_visible()


def _endless(body: dict[str, object]) -> dict[str, object]:
    return {**body, "tokens": 100_000, "token_s": 0.05}


def _running(gate: GatewayProcess) -> int:
    requests = call(gate.url, "GET", "/api/v1/requests")["requests"]
    return sum(one["state"] != "done" for one in requests)


@pytest.mark.slow
def test_text_that_takes_long_to_read_is_shown_as_it_is(opened: Tab) -> None:
    """The lexer takes many seconds for this answer; the page must not."""
    said = "_a" * 20_000
    chunk = json.dumps({"choices": [{"delta": {"content": said}}]})
    page = opened.open("playground?model=alpha")
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {chunk}\n\ndata: [DONE]\n\n"),
    )
    page.get_by_role("textbox", name="Message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".markdown > .plain")).to_have_text(said)
