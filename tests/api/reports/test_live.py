from __future__ import annotations

import asyncio
import json
from typing import Any

from greenroom.api.reports import live
from greenroom.core.model import Tier
from tests.api.management_rig import Call, Client, FakeGateway, FakeListening, model
from tests.waiting import until

STATE = "/api/v1/events?state=true"


class WatchedEdge(FakeListening):
    """Counts how often the state is looked at, and fails where a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.failures: list[Exception] = []

    @property
    def connections(self) -> int:  # type: ignore[override]
        self.looks += 1
        if self.failures:
            raise self.failures.pop()
        return 0

    @connections.setter
    def connections(self, _: int) -> None: ...


def _events(call: Call) -> list[tuple[str, Any]]:
    """Kind and data of every whole event that has come."""
    whole = call.answer.body.decode().split("\n\n")[:-1]
    rows = [dict(line.split(": ", 1) for line in frame.split("\n")) for frame in whole if frame.startswith("event")]
    return [(row["event"], json.loads(row["data"])) for row in rows]


def _states(call: Call) -> list[Any]:
    return [data for kind, data in _events(call) if kind == "state"]


def _seen(call: Call) -> dict[str, Any]:
    """The models as a client knows them."""
    seen: dict[str, Any] = {}
    for state in _states(call):
        seen |= {one["id"]: one for one in state["models"]}
        for gone in state["gone"]:
            seen.pop(gone, None)
    return seen


async def test_the_first_state_has_everything() -> None:
    gateway = FakeGateway({"a": model(), "b": model()})
    gateway.add_slot("a", Tier.READY)
    gateway.add_waiter("b", 1)
    client = Client(gateway)
    async with client.stream(STATE) as call:
        await call.until(lambda: len(_states(call)) == 1)
    first = _states(call)[0]
    assert (first["first"], first["more"], first["gone"]) == (True, False, [])
    whole = (await client.get("/api/v1/status")).json
    assert first["models"] == whole["models"]
    assert first["models"][1]["waiting"] == 1
    same = ("version", "started", "queue", "devices", "gpus", "green_room", "other_slots", "waiting", "draining")
    assert {name: first["status"][name] for name in same} == {name: whole[name] for name in same}
    assert "models" not in first["status"]


async def test_later_only_what_changed_is_sent() -> None:
    gateway = FakeGateway({"a": model(), "b": model()})
    client = Client(gateway)
    async with client.stream(STATE) as call:
        await call.until(lambda: len(_states(call)) == 1)
        gateway.add_slot("b", Tier.READY)
        await call.until(lambda: len(_states(call)) == 2)
        gateway.add_waiter("a", 1)
        await call.until(lambda: len(_states(call)) == 3)
    told = [[one["id"] for one in state["models"]] for state in _states(call)]
    assert told == [["a", "b"], ["b"], ["a"]]
    assert (_seen(call)["b"]["tier"], _seen(call)["a"]["waiting"]) == ("ready", 1)


async def test_nothing_is_sent_while_nothing_changes() -> None:
    gateway = FakeGateway({"a": model()})
    edge = gateway.edge = WatchedEdge()
    viewer = live.StateViewer(gateway.hub, live.LiveState(gateway, 0.001), None)
    assert b"event: state" in await viewer.piece()
    # Time passes, and nothing else.
    before = edge.looks
    while edge.looks < before + 5:
        gateway.now += 60
        await asyncio.sleep(0.001)
    gateway.hub.publish("load", {"model": "a"})
    piece = await viewer.piece()
    viewer.close()
    assert b"event: load" in piece and b"event: state" not in piece


async def test_one_look_that_fails_is_not_the_last() -> None:
    gateway = FakeGateway({"a": model()})
    edge = gateway.edge = WatchedEdge()
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    viewer = live.StateViewer(gateway.hub, live.LiveState(gateway, 0.001), None)
    await viewer.piece()
    edge.failures.append(RuntimeError("once"))
    await until(lambda: bool(told))
    gateway.add_slot("a", Tier.READY)
    assert b'"tier":"ready"' in await asyncio.wait_for(viewer.piece(), 30)
    viewer.close()
    assert [str(error) for error in told] == ["once"]


async def test_events_that_wait_are_sent_together() -> None:
    gateway = FakeGateway({"a": model()})
    viewer = live.StateViewer(gateway.hub, live.LiveState(gateway, 60.0), None)
    for number in range(60):
        gateway.hub.publish("load", {"number": number})
    first, second = await viewer.piece(), await viewer.piece()
    viewer.close()
    assert (first.count(b"event: "), second.count(b"event: ")) == (50, 11)


async def test_a_later_watcher_gets_times_as_they_are_then() -> None:
    gateway = FakeGateway({"a": model()})
    gateway.add_slot("a", Tier.READY, last_used=gateway.now)
    client = Client(gateway)
    async with client.stream(STATE) as early:
        await early.until(lambda: len(_states(early)) == 1)
        gateway.now += 60
        async with client.stream(STATE) as late:
            await late.until(lambda: len(_states(late)) == 1)
    assert (_seen(early)["a"]["last_used_s_ago"], _seen(late)["a"]["last_used_s_ago"]) == (0, 60)


async def test_a_model_that_is_no_longer_configured_is_gone() -> None:
    gateway = FakeGateway({"a": model(), "b": model()})
    async with Client(gateway).stream(STATE) as call:
        await call.until(lambda: len(_states(call)) == 1)
        gateway.catalog.fill(FakeGateway({"b": model()}).config)
        await call.until(lambda: len(_states(call)) == 2)
    assert _states(call)[1]["gone"] == ["a"]
    assert list(_seen(call)) == ["b"]


async def test_many_models_come_in_parts() -> None:
    names = {f"m{number:03}": model() for number in range(120)}
    gateway = FakeGateway(names)
    async with Client(gateway).stream(STATE) as call:
        await call.until(lambda: len(_seen(call)) == 120)
    states = _states(call)
    assert [len(state["models"]) for state in states] == [50, 50, 20]
    assert [state["more"] for state in states] == [True, True, False]
    assert [state["first"] for state in states] == [True, False, False]


async def test_a_viewer_that_lost_events_still_gets_the_latest_state() -> None:
    gateway = FakeGateway({"a": model()})
    async with Client(gateway).stream(STATE) as call:
        await call.until(lambda: len(_states(call)) == 1)
        gateway.add_slot("a", Tier.READY)
        # More at once than its queue holds: the mark for the state may be among those that are lost.
        for _ in range(2_000):
            gateway.hub.publish("load", {})
        await call.until_seen(b'"tier":"ready"')
    assert any(kind == "dropped" for kind, _ in _events(call))


async def test_events_before_the_stream_are_sent_again() -> None:
    gateway = FakeGateway({"a": model()})
    gateway.hub.publish("load", {"model": "a"})
    gateway.hub.publish("load_done", {"model": "a"})
    async with Client(gateway).stream(STATE + "&after=1") as call:
        await call.until(lambda: len(_events(call)) == 2)
    assert [kind for kind, _ in _events(call)] == ["load_done", "state"]


async def test_the_state_is_looked_at_only_while_it_is_watched() -> None:
    gateway = FakeGateway({"a": model()})
    edge = gateway.edge = WatchedEdge()
    state = live.LiveState(gateway, 0.01)
    assert not state.is_looking
    viewer = live.StateViewer(gateway.hub, state, None)
    assert await viewer.piece()
    assert state.is_looking and edge.looks == 1
    viewer.close()
    assert not state.is_looking and gateway.hub.listeners == 0


async def test_without_the_option_there_are_only_events() -> None:
    gateway = FakeGateway({"a": model()})
    async with Client(gateway).stream("/api/v1/events") as call:
        await call.until_seen(b"retry")
        gateway.hub.publish("load", {"model": "a"})
        await call.until_seen(b"event: load")
    assert [kind for kind, _ in _events(call)] == ["load"]
