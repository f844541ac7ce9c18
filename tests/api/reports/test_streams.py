from __future__ import annotations

import asyncio
import gc
import json
from dataclasses import replace

import pytest

from greenroom.access.keys import Caller, Permission
from greenroom.api.reports import streams
from greenroom.api.reports.streams import event_frame, line_frame, plain_frame, shown_line
from greenroom.core.model import ModelId, TenantId
from greenroom.process.logs import Subscription
from greenroom.runtime.observer import Event, Hub
from tests.api.management_rig import Call, Client, FakeGateway, model, scope
from tests.waiting import until

EVENTS = "/api/v1/events"
LOGS = "/api/v1/models/org/name/logs/stream"
ORG = ModelId("org/name")


def _gateway() -> FakeGateway:
    return FakeGateway({"org/name": model()})


def _events(body: bytes) -> list[dict[str, str]]:
    """What a reader of server-sent events makes of these bytes: comments and blocks without data are nothing."""
    blocks = [block for block in body.decode().split("\n\n") if block]
    parsed = [dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":")) for block in blocks]
    return [event for event in parsed if "data" in event]


async def _until_listening(hub: Hub) -> None:
    await until(lambda: hub.listeners)


# --- framing --------------------------------------------------------------------------------------------------------


def test_an_event_is_framed_with_kind_id_and_json() -> None:
    frame = event_frame(Event(7, "load", {"model": "a\nb\u2028", "took_s": 1.5, "odd": None}))
    (event,) = _events(frame)
    assert (event["event"], event["id"]) == ("load", "7")
    assert json.loads(event["data"]) == {"model": "a\nb\u2028", "took_s": 1.5, "odd": None}


def test_data_that_is_not_json_is_told_as_text() -> None:
    (event,) = _events(event_frame(Event(1, "odd", {"error": ValueError("why")})))
    assert json.loads(event["data"]) == {"error": "why"}


@pytest.mark.parametrize("line", ["", "plain", "data: fake", "a\r\nid: 9\r\rb\nevent: x", "ünï\u2028cödé", "\ud800"])
def test_a_line_is_one_event_whatever_is_in_it(line: str) -> None:
    frame = line_frame(line)
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert b"\r" not in frame
    assert frame.count(b"\n") == 2


def test_a_plain_line_ends_in_a_line_break() -> None:
    assert plain_frame("ü") == "ü\n".encode()


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("plain\ttext", "plain\ttext"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("half\x1b[", "half"),
        ("bell\x07 back\x08 c1\x9b", "bell back c1"),
        ("turned\u202e round\u2066 and\u200f back", "turned round and back"),
    ],
)
def test_a_line_cannot_steer_a_terminal(printed: str, shown: str) -> None:
    assert shown_line(printed) == shown


# --- events ---------------------------------------------------------------------------------------------------------


async def test_events_are_told_as_they_happen() -> None:
    gateway = _gateway()
    async with Client(gateway).stream(EVENTS) as call:
        await _until_listening(gateway.hub)
        gateway.hub.publish("load", {"model": "a"})
        await call.until_seen(b"event: load")
        gateway.hub.publish("load_done", {"model": "a"})
        await call.until_seen(b"event: load_done")
    assert call.answer.status == 200
    assert call.answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert call.answer.headers["cache-control"] == "no-cache"
    assert call.answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in call.answer.headers
    assert [event["id"] for event in _events(call.answer.body)] == ["1", "2"]


@pytest.mark.parametrize(
    ("query", "headers", "ids"),
    [
        ("?after=2", {}, ["3", "4"]),
        ("?after=0", {}, ["1", "2", "3", "4"]),
        ("", {"last_event_id": "3"}, ["4"]),
        ("?after=1", {"last_event_id": "3"}, ["4"]),
        ("", {}, ["4"]),
    ],
)
async def test_events_resume_after_the_last_one_seen(query: str, headers: dict[str, str], ids: list[str]) -> None:
    gateway = _gateway()
    for number in range(3):
        gateway.hub.publish("load", {"number": number})
    async with Client(gateway).stream(EVENTS + query, **headers) as call:
        await _until_listening(gateway.hub)
        gateway.hub.publish("last", {})
        await call.until_seen(b"event: last")
    assert [event["id"] for event in _events(call.answer.body)] == ids


@pytest.mark.parametrize(
    ("query", "headers", "param"),
    [
        ("?after=x", {}, "after"),
        ("?after=-1", {}, "after"),
        ("?after=99999999999999999999", {}, "after"),
        ("", {"last_event_id": "x"}, "Last-Event-ID"),
    ],
)
async def test_a_place_that_makes_no_sense_is_refused(query: str, headers: dict[str, str], param: str) -> None:
    answer = await Client(_gateway()).get(EVENTS + query, **headers)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_events_end_and_are_forgotten_when_the_client_leaves() -> None:
    gateway = _gateway()
    async with Client(gateway).stream(EVENTS) as call:
        await _until_listening(gateway.hub)
        call.left.set()
        await call.until(lambda: call.is_over)
    assert gateway.hub.listeners == 0


async def test_events_end_when_the_task_is_cancelled() -> None:
    gateway = _gateway()
    call = Call(b"")
    app = Client(gateway).app
    task = asyncio.ensure_future(app(scope("GET", EVENTS, {}), call.receive, call.send))
    await _until_listening(gateway.hub)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gateway.hub.listeners == 0


async def test_events_end_when_the_gateway_drains_after_what_was_told() -> None:
    gateway = _gateway()
    async with Client(gateway).stream(EVENTS) as call:
        await _until_listening(gateway.hub)
        gateway.is_draining = True
        gateway.hub.publish("shutdown", {"drain_s": 30})
        await call.until(lambda: call.is_over)
    assert [event["event"] for event in _events(call.answer.body)] == ["shutdown"]


async def test_events_end_when_the_hub_closes() -> None:
    gateway = _gateway()
    async with Client(gateway).stream(EVENTS) as call:
        await _until_listening(gateway.hub)
        gateway.hub.close()
        await call.until(lambda: call.is_over)


async def test_a_quiet_stream_beats() -> None:
    gateway = _gateway()
    async with Client(gateway).stream(EVENTS) as call:
        await _until_listening(gateway.hub)
        for beats in (1, 2):
            gateway.now += streams.HEARTBEAT_S
            await call.until(lambda beats=beats: call.answer.body.count(b": still here\n\n") >= beats)  # type: ignore[misc]
    assert _events(call.answer.body) == []


async def test_a_reader_that_is_too_slow_is_told_what_it_missed() -> None:
    gateway = _gateway()
    gateway.hub = Hub(queue_max=2)
    async with Client(gateway).stream(EVENTS) as call:
        await _until_listening(gateway.hub)
        for number in range(5):
            gateway.hub.publish("load", {"number": number})
        await call.until_seen(b'"number":4')
    assert {"event": "dropped", "id": "3", "data": '{"count":3}'} in _events(call.answer.body)


async def test_one_stream_too_many_is_refused() -> None:
    gateway = _gateway()
    client = Client(gateway, streams_max=1)
    async with client.stream(EVENTS):
        await _until_listening(gateway.hub)
        answer = await client.get(EVENTS)
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "overloaded", "10")
    async with client.stream(LOGS) as call:
        await call.until(lambda: call.answer.status == 200)


async def test_one_tenant_has_half_of_all_streams() -> None:
    gateway = _gateway()
    keys = {name: Caller(name, TenantId("lab"), 1, admin=False, verbs=frozenset({Permission.READ})) for name in "ab"}
    other = replace(keys["a"], name="c", tenant=TenantId("other"))
    client = Client(gateway, is_admin=False, caller=keys["a"], streams_max=4)
    async with client.stream(EVENTS) as one, client.stream(LOGS) as two:
        await one.until(lambda: one.answer.status == 200)
        await two.until(lambda: two.answer.status == 200)
        client.caller = keys["b"]
        refused = await client.get(EVENTS)
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (429, "too_many_of_key", "10")
        client.caller = other
        async with client.stream(EVENTS) as three:
            await three.until(lambda: three.answer.status == 200)
    client.caller = keys["b"]
    async with client.stream(EVENTS) as four:
        await four.until(lambda: four.answer.status == 200)


async def test_a_hub_that_is_full_refuses_with_a_status() -> None:
    gateway = _gateway()
    gateway.hub = Hub(subscribers_max=0)
    answer = await Client(gateway).get(EVENTS)
    assert (answer.status, answer.error["code"]) == (503, "overloaded")


# --- logs -----------------------------------------------------------------------------------------------------------


async def test_log_lines_come_as_events_history_first() -> None:
    gateway = _gateway()
    ring = gateway.slots.log(ORG)
    ring.write(b"one\ntwo\n")
    async with Client(gateway).stream(LOGS) as call:
        await call.until_seen(b"data: two\n\n")
        ring.write(b"\x1b[32mthree\nfour\n")
        await call.until_seen(b"data: four\n\n")
    assert call.answer.headers["content-type"].startswith("text/event-stream")
    assert [event["data"] for event in _events(call.answer.body)] == ["one", "two", "three", "four"]
    del call
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, Subscription)], "it is forgotten"


@pytest.mark.parametrize("query", ["?no-history", "?no-history=", "?no-history=true", "?no-history=1", "?lines=0"])
async def test_log_lines_come_without_history_when_asked(query: str) -> None:
    gateway = _gateway()
    ring = gateway.slots.log(ORG)
    ring.write(b"one\n")
    async with Client(gateway).stream(LOGS + query) as call:
        await call.until(lambda: call.answer.status == 200)
        ring.write(b"two\n")
        await call.until_seen(b"data: two\n\n")
    assert [event["data"] for event in _events(call.answer.body)] == ["two"]


@pytest.mark.parametrize("query", ["?lines=1", "?lines=1&no-history=false", "?lines=1&no-history=0"])
async def test_as_much_history_comes_as_was_asked_for(query: str) -> None:
    gateway = _gateway()
    gateway.slots.log(ORG).write(b"one\ntwo\n")
    async with Client(gateway).stream(LOGS + query) as call:
        await call.until_seen(b"data: two\n\n")
    assert [event["data"] for event in _events(call.answer.body)] == ["two"]


async def test_log_lines_come_as_plain_text_when_asked() -> None:
    looks = 0

    class Watched(FakeGateway):
        """Counts how often a stream asks whether to go on: each time it could beat."""

        @property
        def is_draining(self) -> bool:  # type: ignore[override]
            nonlocal looks
            looks += 1
            return False

        @is_draining.setter
        def is_draining(self, _: bool) -> None: ...

    gateway = Watched({"org/name": model()})
    ring = gateway.slots.log(ORG)
    ring.write(b"one\n")
    async with Client(gateway).stream(LOGS, accept="text/plain") as call:
        await call.until_seen(b"one\n")
        # A beat would be a line that the engine never printed.
        gateway.now += 10 * streams.HEARTBEAT_S
        before = looks
        await until(lambda: looks >= before + 2)
        ring.write(b"two\n")
        await call.until_seen(b"two\n")
    assert call.answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert call.answer.body == b"one\ntwo\n"


async def test_log_lines_end_when_the_gateway_drains() -> None:
    gateway = _gateway()
    async with Client(gateway).stream(LOGS) as call:
        await call.until(lambda: call.answer.status == 200)
        gateway.is_draining = True
        await call.until(lambda: call.is_over)
