from __future__ import annotations

import time

from greenroom.core.model import Move, MoveId, MoveKind, Outcome, Tier
from greenroom.runtime.observer import Residency
from tests.api.management_rig import GPU, Client, FakeGateway, model

START = 1_700_000_000.0


def _move(gateway: FakeGateway, kind: MoveKind, mib: int = 100) -> Move:
    slot = gateway.state.slots_of(gateway.catalog_id("a"))[0]
    return Move(MoveId("m1"), kind, slot.id, slot.model, 1, {GPU: mib}, gateway.now)


async def test_history_has_rates_and_levels() -> None:
    gateway = FakeGateway({"a": model()})
    client = Client(gateway)
    gateway.history.look()
    gateway.now += 10
    ended = {"model": "a", "tenant": "", "route": "chat", "not_there_s": 0.0, "first_byte_s": None}
    gateway.metrics.request_done(status=200, seconds=3.0, wait_s=1.0, **ended)
    gateway.metrics.request_done(status=503, seconds=1.0, wait_s=0.0, **ended)
    gateway.metrics.tokens("a", "", 100, 50, 10)
    gateway.metrics.move_done("a", "load", "done", 4.0)
    gateway.add_slot("a", Tier.READY)
    gateway.add_waiter("a", 1)
    gateway.history.look()
    shown = (await client.get("/api/v1/history")).json
    assert shown["at"] == [START + 10]
    assert (shown["requests_per_s"], shown["errors_per_s"], shown["refused_per_s"]) == ([0.2], [0.1], [0.0])
    assert (shown["prompt_tokens_per_s"], shown["completion_tokens_per_s"]) == ([10.0], [5.0])
    assert (shown["mean_wait_s"], shown["mean_total_s"]) == ([0.5], [2.0])
    assert (shown["swaps_per_min"], shown["mean_swap_s"]) == ([6.0], [4.0])
    assert (shown["queue"], shown["ready"], shown["asleep"]) == ([1], [1], [0])
    assert list(shown["used_mib"]) == ["gpu0"]


async def test_history_gives_what_came_since() -> None:
    gateway = FakeGateway({"a": model()})
    for _ in range(5):
        gateway.history.look()
        gateway.now += 10
    client = Client(gateway)
    assert len((await client.get("/api/v1/history")).json["at"]) == 4
    later = (await client.get(f"/api/v1/history?since={START + 20}")).json
    assert later["at"] == [START + 30, START + 40]
    assert later["mean_wait_s"] == [None, None]
    assert (await client.get(f"/api/v1/history?since={START + 40}")).json["at"] == []


async def test_history_goes_on_when_the_clock_is_set_back() -> None:
    gateway = FakeGateway({"a": model()})
    client = Client(gateway)
    for _ in range(3):
        gateway.history.look()
        gateway.now += 10
    gateway.now -= 3_600
    gateway.history.look()
    back = START + 30 - 3_600
    # A page that has the sample of the former time is given everything, with times that ascend.
    assert (await client.get(f"/api/v1/history?since={START + 20}")).json["at"] == [back - 20, back - 10, back]
    gateway.now += 10
    gateway.history.look()
    assert (await client.get(f"/api/v1/history?since={back}")).json["at"] == [back + 10]
    assert (await client.get("/api/v1/history")).json["at"] == [back - 20, back - 10, back, back + 10]


async def test_rates_do_not_mind_that_the_clock_was_set() -> None:
    gateway = FakeGateway({"a": model()})
    for jump_s in (0.0, 3_600.0, -7_200.0):
        gateway.now += 10
        gateway.wall_ahead_s += jump_s
        gateway.metrics.tokens("a", "", 100, 50, 10)
        gateway.history.look()
    assert (await Client(gateway).get("/api/v1/history")).json["prompt_tokens_per_s"] == [10.0, 10.0]


async def test_history_is_bounded() -> None:
    gateway = FakeGateway({"a": model()})
    for _ in range(1_000):
        gateway.history.look()
        gateway.now += 10
    assert len((await Client(gateway).get("/api/v1/history")).json["at"]) == 360


async def test_timeline_tells_where_a_model_was_and_why() -> None:
    gateway = FakeGateway({"a": model()})
    gateway.add_slot("a", Tier.READY)
    residency = gateway.observer.residency
    load = _move(gateway, MoveKind.LOAD)
    residency.moving(load, "a", {"seq": 7, "what": "load", "why": "asked_for"})
    residency.moved(load, "a", Outcome.DONE)
    shown = (await Client(gateway).get("/api/v1/timeline")).json
    # The rig's clock stands still in 2023: both went on an hour ago and longer.
    assert [(span["phase"], span["ended"] is None) for span in shown["spans"]] == [("ready", True)]
    assert shown["spans"][0]["devices"] == {"gpu0": 100}
    assert shown["devices"] == ["gpu0"]
    refused = await Client(gateway).get("/api/v1/timeline?seconds=0")
    assert refused.status == 400


async def test_timeline_gives_what_changed_since() -> None:
    gateway = FakeGateway({"a": model()})
    gateway.add_slot("a", Tier.READY)
    began = time.time() - 60
    gateway.observer.residency = residency = Residency(lambda: began, lambda: 0.0)
    load = _move(gateway, MoveKind.LOAD)
    residency.moving(load, "a", {})
    residency.moved(load, "a", Outcome.DONE)

    async def phases(since: float) -> list[str]:
        shown = (await Client(gateway).get(f"/api/v1/timeline?since={since}")).json
        return [span["phase"] for span in shown["spans"]]

    assert await phases(0.0) == ["load", "ready"]
    # The load was over before; what goes on is told each time.
    assert await phases(began + 30) == ["ready"]
    # Read before the clock was set back: everything.
    assert await phases(began + 3_600) == ["load", "ready"]
